"""Run by every rank: a program's steps on gloo and on unisono, taking turns in one process.

    unisono run -n 4 tests/real/stepwise.py --steps 20 --json steps.json "nanoGPT, DDP"

Both have their own model, optimizer and groups; batches are the same. The ranks meet before every
step, outside the timing; a step takes as long as its slowest rank. Rank 0 writes losses and times.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import PICOTRON, PROGRAMS, losses_alone

BACKENDS = ("gloo", "unisono")


def run_by_turns(name: str, steps: int, warm_up: int = 3) -> dict[str, Any]:
    """The losses and step times of both backends; `alone` are those of one process."""
    programs = {backend: PROGRAMS[name](backend) for backend in BACKENDS}
    losses: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    seconds: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    for number in range(warm_up + steps):
        for backend in BACKENDS if number % 2 else reversed(BACKENDS):
            dist.barrier()
            began = time.perf_counter()
            losses[backend].append(programs[backend].step(number))
            seconds[backend].append(time.perf_counter() - began)
    found: dict[str, Any] = {"program": name, "ranks": dist.get_world_size()}
    for backend, program in programs.items():
        slowest = torch.tensor(seconds[backend][warm_up:])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found[backend] = {
            "losses": program.mean_loss(losses[backend]),
            "step_ms": (slowest * 1e3).tolist(),
        }
    if name.startswith("picotron"):
        found["alone"] = losses_alone(PICOTRON, warm_up + steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", nargs="+", choices=PROGRAMS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    found = [run_by_turns(name, options.steps) for name in options.program]
    if dist.get_rank() == 0:
        options.json.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
