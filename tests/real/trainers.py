"""Run by every rank: trainers that own the loop, on gloo and on unisono, in turns of whole runs.

    unisono run -n 4 tests/real/trainers.py --runs 3 --steps 20 --json runs.json lightning

Every run creates torch's default group, trains the same model on the same data, and destroys the
group: like a program, several times in one process. Rank 0 writes the losses and the time of each
step, without the first three of a run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

BACKENDS = ("gloo", "unisono")
WARM_UP = 3
BATCH = 16


class Clock:
    """The losses of this rank, and when its steps ended."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.moments: list[float] = []

    def note(self, loss: Tensor) -> None:
        self.losses.append(float(loss.detach()))
        self.moments.append(time.perf_counter())


def make_model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(1)
    sizes = [64, 256, 256, 256, 1]
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def make_data(steps: int) -> TensorDataset:
    """As much as all ranks need for this many steps."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(steps * BATCH * dist.get_world_size(), 64, generator=generator)
    return TensorDataset(inputs, inputs.pow(2).mean(1, keepdim=True))


def run_lightning(backend: str, steps: int, clock: Clock) -> None:
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            inputs, targets = batch
            self.loss = functional.mse_loss(self.model(inputs), targets)
            return self.loss

        def on_train_batch_end(self, *_: Any) -> None:
            clock.note(self.loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(process_group_backend=backend),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(make_data(steps), batch_size=BATCH))


def run_fabric(backend: str, steps: int, clock: Clock) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(process_group_backend=backend)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, targets in fabric.setup_dataloaders(DataLoader(make_data(steps), BATCH)):
        loss = functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        clock.note(loss)


def run_accelerate(backend: str, steps: int, clock: Clock) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(make_data(steps), BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        loss = functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        clock.note(loss)


def run_transformers(backend: str, steps: int, clock: Clock) -> None:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Timed(Trainer):
        def compute_loss(self, *args: Any, **keywords: Any) -> Any:
            result = super().compute_loss(*args, **keywords)
            self.latest = result[0] if isinstance(result, tuple) else result
            return result

    class Note(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.note(trainer.latest)

    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=65, n_positions=32, n_embd=64, n_layer=2, n_head=2, use_cache=False)
    )
    rows = (torch.arange(steps * 4 * dist.get_world_size())[:, None] + torch.arange(32)) % 65
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Timed(
            model,
            TrainingArguments(
                folder,
                use_cpu=True,
                per_device_train_batch_size=4,
                max_steps=steps,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                logging_strategy="no",
                seed=3,
            ),
            train_dataset=data,
            callbacks=[Note()],
        )
        trainer.train()


def forget_state() -> None:
    """Reset Accelerate for the next run, as in a new process; it keeps its state in classes."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


RUNS: dict[str, Callable[[str, int, Clock], None]] = {
    "lightning": run_lightning,
    "fabric": run_fabric,
    "accelerate": run_accelerate,
    "transformers": run_transformers,
}


def run_by_turns(name: str, runs: int, steps: int, folder: str) -> dict[str, Any]:
    """The losses and step times of both backends, run by run. The ranks of each run meet in its own
    file in `folder`: in a shared file gloo would find the addresses of an earlier run."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {"program": name, "ranks": size}
    for backend in BACKENDS:
        found[backend] = {"losses": [], "step_ms": []}
    for run in range(runs):
        for backend in BACKENDS if run % 2 else reversed(BACKENDS):
            store = dist.FileStore(f"{folder}/{name}-{run}-{backend}", size)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)
            clock = Clock()
            RUNS[name](backend, steps, clock)
            assert dist.get_backend() == backend
            if name in ("accelerate", "transformers"):
                forget_state()
            losses = torch.tensor(clock.losses, dtype=torch.float64)
            dist.all_reduce(losses)
            moments = torch.tensor(clock.moments[WARM_UP:], dtype=torch.float64)
            dist.all_reduce(moments, dist.ReduceOp.MAX)  # a step ends with its last rank
            found[backend]["losses"].append((losses / dist.get_world_size()).tolist())
            found[backend]["step_ms"].append((moments.diff() * 1e3).tolist())
            dist.barrier()
            dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", nargs="+", choices=RUNS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    folder = str(options.json.parent.absolute())
    found = [run_by_turns(name, options.runs, options.steps, folder) for name in options.program]
    if os.environ["RANK"] == "0":
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
