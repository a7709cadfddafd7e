"""The GPT of examples/parallel_gpt in many layouts: steps measured, and as layouts expect them.

    python benchmarks/layouts.py                    8 ranks, 2 or 3 minutes
    python benchmarks/layouts.py --ranks 4 --steps 8 --goals
    python benchmarks/layouts.py --json layouts.json

First `unisono doctor --topology` measures this machine. Then all layouts run in the same processes,
one thread each, and take turns. A time is the median of the slowest rank's steps, without the
first two of each turn. Expected times know nothing of these runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import unisono
from unisono.doctor.topology import write_topology
from unisono.plan.layouts import Layout, Model, memory_by_part, step_time
from unisono.plan.topology import find_topology

EXAMPLE = Path(__file__).parents[1] / "examples/parallel_gpt"
WARM_UP = 2


def layouts_of(ranks: int) -> list[Layout]:
    """Every layout of the example's four axes."""
    sizes = [size for size in (1, 2, 4, 8) if ranks % size == 0]
    return [
        Layout(
            tp=tp,
            cp=cp,
            pp=pp,
            dp=ranks // (tp * cp * pp),
            micro_batches=2,
            sequence_parallel=False,
        )
        for tp in sizes
        for cp in sizes
        for pp in sizes
        if ranks % (tp * cp * pp) == 0
    ]


def be_a_rank(layouts: Sequence[Layout], steps: int, turns: int) -> list[float]:
    """The median seconds of a step of each layout."""
    sys.path.insert(0, str(EXAMPLE))
    import torch
    from train import train

    from model import Config
    from unisono import ProcessGroupManager

    torch.set_num_threads(1)
    world = unisono.init()
    found: list[list[float]] = [[] for _ in layouts]
    for turn in range(turns):
        for number, layout in enumerate(layouts):
            axes = layout.tp, layout.cp, layout.pp, layout.dp
            with ProcessGroupManager(*axes) as manager:
                running = train(Config(), manager, WARM_UP + steps)
                for step in range(WARM_UP + steps):
                    world.barrier()
                    begin_s = time.perf_counter()
                    next(running)
                    took = torch.tensor([time.perf_counter() - begin_s])
                    world.all_reduce(took, "max")
                    if step >= WARM_UP:
                        found[number].append(float(took))
                running.close()
            if world.rank == 0:
                done = f"turn {turn + 1} of {turns}, layout {number + 1} of {len(layouts)}"
                print(done, file=sys.stderr, flush=True)
    unisono.shutdown()
    return [statistics.median(times) for times in found]


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="measured, of each layout and turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--goals", action="store_true", help="say which goals are met or missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save everything measured")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "here.toml"
        print(write_topology(path).replace(str(path), "a topology"))
        here = find_topology(str(path))
    model = Model(
        layers=8, width=192, heads=8, positions=64, vocabulary=128, precision="float32", tied=False
    )
    layouts = layouts_of(options.ranks)
    expected = [step_time(model, layout, 16, here).time_s for layout in layouts]
    measured = unisono.launch(
        be_a_rank, options.ranks, (layouts, options.steps, options.turns), threads=1
    )[0]
    print(f"{options.ranks} ranks, {os.cpu_count()} cores ({platform.machine()}), ms of a step")
    rows = sorted(zip(measured, expected, layouts, strict=True), key=lambda row: row[0])
    for time_s, wanted_s, layout in rows:
        held = sum(memory_by_part(model, layout, 16).values()) / 1e6
        print(
            f"  {layout.label:24}measured {time_s * 1e3:7.1f}  expected {wanted_s * 1e3:7.1f}"
            f"  {wanted_s / time_s - 1:+5.0%}  {held:6.1f} MB expected"
        )
    chosen_s = min(rows, key=lambda row: row[1])[0]
    error = statistics.median(abs(wanted / time_s - 1) for time_s, wanted, _ in rows)
    goals = (
        ("the expected best, over the measured best", chosen_s / rows[0][0], 1.10),
        ("median error of expected times", error, 0.25),
    )
    for text, value, most in goals:
        met = ("met    " if value <= most else "MISSED ") if options.goals else ""
        print(f"  {met}{text}: {value:.2f}, at most {most:.2f}")
    if options.json:
        saved = [
            {"layout": layout.label, "measured_s": time_s, "expected_s": wanted_s}
            for time_s, wanted_s, layout in rows
        ]
        options.json.write_text(json.dumps(saved, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
