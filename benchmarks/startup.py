"""What `init_process_group` costs each rank in CPU time, and how much of that is importing.

    python benchmarks/startup.py                 two ranks, nine starts of each backend
    python benchmarks/startup.py --ranks 4 --times 5 --json startup.json

Every start is a separate torchrun: processes in which torch is imported, unisono is not used yet,
and Python's compiled files exist. Backends take turns, so that a busy moment affects both
alike. `first group` is the CPU time of `init_process_group`, `imports` that of importing the
modules it needs in another process, `later group` the CPU time of a `new_group` with all ranks
after it. A figure is the median over all ranks of all starts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

BACKENDS = ("unisono", "gloo")
MEASURES = ("first group", "imports", "later group")


def measure_rank(backend: str) -> dict[str, float]:
    """Run by every rank of a start: milliseconds of CPU time."""
    import torch.distributed as dist

    began = time.process_time()
    dist.init_process_group(backend)
    first = time.process_time()
    dist.new_group()
    later = time.process_time()
    dist.barrier()
    dist.destroy_process_group()
    return {"first group": 1e3 * (first - began), "later group": 1e3 * (later - first)}


def measure_imports() -> dict[str, float]:
    """Run by a separate process: what unisono's first group imports."""
    import torch.distributed  # noqa: F401

    began = time.process_time()
    import unisono.torch_backend.creation  # noqa: F401

    return {"imports": 1e3 * (time.process_time() - began)}


def start(backend: str, ranks: int) -> list[dict[str, float]]:
    """What the ranks of one start have measured."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    found = _lines([*torchrun, __file__, "--rank-of", backend])
    if backend == "unisono":
        found += _lines([__file__, "--rank-of", "imports"])
    return found


def _lines(command: list[str]) -> list[dict[str, float]]:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120
    )
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]


def measure(ranks: int, times: int) -> dict[str, dict[str, float]]:
    """The medians of both backends, after one start of each that does not count."""
    found: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
    for turn in range(times + 1):
        for backend in BACKENDS:
            measured = start(backend, ranks)
            found[backend] += measured if turn > 0 else []
    medians = {}
    for backend, rows in found.items():
        by_name = {name: [row[name] for row in rows if name in row] for name in MEASURES}
        medians[backend] = {name: statistics.median(ms) for name, ms in by_name.items() if ms}
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=9, help="starts of each backend")
    parser.add_argument("--json", type=Path, help="also write the medians to this file")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        by_rank = options.rank_of != "imports"
        measured = measure_rank(options.rank_of) if by_rank else measure_imports()
        print(json.dumps(measured) + "\n", end="", flush=True)
        return
    medians = measure(options.ranks, options.times)
    cores = len(os.sched_getaffinity(0))
    print(
        f"{options.ranks} ranks on {cores} cores ({platform.machine()}), CPU time per rank, "
        f"median of {options.times} starts, ms\n"
    )
    print("| backend | first group | of it imports | later group |\n|---|---:|---:|---:|")
    for backend, row in medians.items():
        first, imports, later = (row.get(name) for name in MEASURES)
        print(f"| {backend} | {first:.1f} | {imports or 0:.1f} | {later:.1f} |")
    if options.json:
        options.json.write_text(json.dumps(medians, indent=1) + "\n")


if __name__ == "__main__":
    main()
