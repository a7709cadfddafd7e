"""What fewer bits on the wire cost in training: a small GPT's loss with each wire format.

    python benchmarks/wire_losses.py                     5 seeds, some minutes
    python benchmarks/wire_losses.py --seeds 3 --steps 100 --goals

Two ranks, which pass as two hosts, train a character model of 118,000 parameters on the sonnets of
examples/parallel_gpt, with AdamW. A seed fixes the first parameters and the batches. The figures
are the loss over the whole text after the last step. In the second row every first parameter is the
next larger float32: that is how far any rounding moves a loss. The last two rows are controls,
which unisono does not have, with the first two seeds: this program rounds all gradients to 15
values with a single scale, before they are averaged and afterwards, without and with error
feedback.

"outside" is how far a row's worst loss is outside of float32's, in percent of how far these are
apart. A row with float32's seeds that differs by any rounding at all is likely to be outside: the
seeds with the least and the largest loss each move one way or the other. --goals: no format is
outside by more than 5%, and 4 bits without feedback are outside by more than 100%.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn import functional

from unisono import Communicator
from unisono.comm.reductions import WIRES
from unisono.training import GradientSync

TEXT = Path(__file__).parents[1] / "examples" / "parallel_gpt" / "sonnets.txt"
CONTROLS = ("4 bits", "4 bits, fed back")
NEXT = "next float32"
ALLOWED = 0.05
WAYS = ("float32", NEXT, *WIRES, *CONTROLS)
HOSTS, BATCH, POSITIONS, WIDTH, SEEDS_OF_CONTROLS = 2, 4, 32, 64, 2


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, WIDTH)
        self.positions = nn.Parameter(torch.randn(POSITIONS, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 128, bias=False)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows of characters, each one longer than its inputs."""
        mask = nn.Transformer.generate_square_subsequent_mask(POSITIONS)
        x = self.characters(rows[:, :-1]) + self.positions
        logits = self.head(self.layers(x, mask, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def batches(text: torch.Tensor, seed: int, comm: Communicator) -> Iterator[torch.Tensor]:
    """This rank's part of each step's batch."""
    chance = torch.Generator().manual_seed(seed)
    while True:
        begins = torch.randint(len(text) - POSITIONS, (comm.size * BATCH,), generator=chance)
        mine = begins.chunk(comm.size)[comm.rank].tolist()
        yield torch.stack([text[begin : begin + POSITIONS + 1] for begin in mine])


def in_4_bits(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax() / 7
    return (x / scale).round() * scale


def averaging_in_4_bits(
    model: nn.Module, comm: Communicator, feeds_back: bool
) -> Callable[[], None]:
    parameters = list(model.parameters())
    lost = torch.zeros(sum(parameter.numel() for parameter in parameters))
    lost_of_sums = torch.zeros_like(lost)

    def average() -> None:
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters]) + lost
        sent = in_4_bits(flat)
        mean = sent.clone()
        comm.all_reduce(mean, "avg")
        mean += lost_of_sums
        result = in_4_bits(mean)
        if feeds_back:
            lost.copy_(flat - sent)
            lost_of_sums.copy_(mean - result)
        parts = result.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)

    return average


def final_loss(comm: Communicator, way: str, seed: int, steps: int) -> float:
    torch.manual_seed(seed)
    model = GPT()
    if way == NEXT:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.nextafter(parameter, torch.tensor(torch.inf)))
    if way in CONTROLS:
        average = averaging_in_4_bits(model, comm, way != CONTROLS[0])
    else:
        average = GradientSync(model, comm, wire=way if way in WIRES else None).finish
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    for _, rows in zip(range(steps), batches(text, seed, comm), strict=False):
        model.loss(rows).backward()
        average()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return model.loss(text.unfold(0, POSITIONS + 1, POSITIONS)).item()


def be_a_host(rank: int, port: int, folder: str, seeds: int, steps: int) -> None:
    torch.set_num_threads(1)
    os.environ["UNISONO_HOSTID"] = f"host {rank}"
    store = TCPStore("127.0.0.1", port)
    with Communicator.join(folder, rank, HOSTS, store) as comm:
        losses = {}
        for way in WAYS:
            count = min(seeds, SEEDS_OF_CONTROLS) if way in CONTROLS else seeds
            losses[way] = [final_loss(comm, way, seed, steps) for seed in range(count)]
            if rank == 0:
                print(f"{way:16}", *(f"{loss:.4f}" for loss in losses[way]), flush=True)
        if rank == 0:
            torch.save(losses, f"{folder}/losses")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--goals", action="store_true", help="exit with 1 if one is missed")
    given = parser.parse_args()
    print(f"loss after {given.steps} steps, with each seed", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        own = (store.port, folder, given.seeds, given.steps)
        torch.multiprocessing.spawn(be_a_host, own, HOSTS)
        losses = torch.load(f"{folder}/losses")
    plain = losses["float32"]
    least, most = min(plain), max(plain)
    print(f"float32's seeds are {most - least:.6f} apart")
    outside = {}
    for way in WAYS[1:]:
        worst = max(max(least - loss, loss - most, 0.0) for loss in losses[way])
        outside[way] = worst / (most - least)
        moved = max(abs(a - b) for a, b in zip(losses[way], plain, strict=False))
        print(
            f"  {way:16} {moved:.6f} from float32 with the same seed, {outside[way]:6.1%} outside"
        )
    are_close = all(outside[wire] <= ALLOWED for wire in WIRES)
    is_visible = outside[CONTROLS[0]] > 1
    print(f"formats within float32's seeds: {are_close}, 4 bits outside: {is_visible}")
    return int(given.goals and not (are_close and is_visible))


if __name__ == "__main__":
    sys.exit(main())
