"""What the sanitizer costs: steps of DDP on two ranks, with and without it, by turns.

`python benchmarks/sanitizer.py` prints the median step of each and their ratio, for a GPT and for
24 small linear layers, on gloo and on unisono.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import unisono
from unisono import watch

ROUNDS, STEPS = 3, 4


class GPT(nn.Module):
    """Six layers, 384 wide, on 64 characters: ten million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(65, 384), nn.Embedding(64, 384)
        layer = nn.TransformerEncoderLayer(384, 6, 1536, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(384, 65)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits."""
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return torch.as_tensor(self.head(self.blocks(hidden, mask)))


def small() -> nn.Module:
    """24 linear layers of 64."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(24)))


def measure(
    backend: str, clock: Callable[[], float] = time.perf_counter
) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step without and with the sanitizer, by model."""
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    found = {}
    for name, make, batch in (
        ("GPT", GPT, torch.randint(65, (4, 64))),
        ("24 linear layers", small, torch.randn(32, 64)),
    ):
        took: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * ROUNDS):
            sanitized = number % 2 == 1
            if sanitized:
                watch.sanitize()
            else:
                watch.start()
            model: Any = DistributedDataParallel(make())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            for step in range(STEPS + 2):
                dist.barrier()
                start = clock()
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                if step >= 2:
                    took[sanitized].append((clock() - start) * 1e3)
            watch.stop()
        found[name] = statistics.median(took[False]), statistics.median(took[True])
    dist.destroy_process_group()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", action="append")
    parser.add_argument("--cpu", action="store_true", help="CPU time, for a busy machine")
    given = parser.parse_args()
    clock = time.process_time if given.cpu else time.perf_counter
    for backend in given.backend or ["gloo", "unisono"]:
        found = unisono.launch(measure, 2, (backend, clock), threads=1)[0]
        for name, (without, sanitized) in found.items():
            ratio = sanitized / without
            print(f"{backend}: {name}: {without:.1f} ms, sanitized {sanitized:.1f} ms: {ratio:.2f}")


if __name__ == "__main__":
    main()
