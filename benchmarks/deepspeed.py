"""unisono and DeepSpeed's shared-memory all_reduce, in turns in the same processes.

    python benchmarks/deepspeed.py                    2 ranks, a minute after the first build
    python benchmarks/deepspeed.py --ranks 8 --sizes 64K 1M --seconds 0.5 --json deepspeed.json

The peer is `torch.ops.deepspeed.inference_all_reduce_`, with which DeepSpeed serves models on CPUs.
The first run downloads DeepSpeed's source package from PyPI and builds only these kernels, with the
flags of DeepSpeed's own builder, in build/deepspeed; this needs a C++ compiler.

Before a size is measured, each variant adds small whole numbers, whose sum is exact in every order
and dtype: "wrong" marks a variant whose sum differs. Times are medians over turns in microseconds;
a turn takes as long as its slowest rank.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import unisono

PACKAGE = "deepspeed==0.19.8"
HOME = Path(__file__).resolve().parent.parent / "build" / "deepspeed"
NAME = "deepspeed_shm_comm"
SOURCES = ("shm_interface.cpp", "shm.cpp")
FLAGS = ["-O2", "-fopenmp"]
SIZES = ("8", "1K", "64K", "256K", "1M", "4M", "16M", "64M")
UNITS = {"K": 1 << 10, "M": 1 << 20}
DTYPES = ("float32", "bfloat16")
TURN_S = 0.01
"""About how long one variant runs before the other has its turn."""


def bytes_of(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def build() -> str:
    """Build the kernels as a Python module, if that was not done yet; returns its folder."""
    from torch.utils import cpp_extension

    folder = HOME / PACKAGE
    if not folder.exists():
        print(f"downloading the sources of {PACKAGE} to {HOME}", flush=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        source = ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(HOME)]
        subprocess.run([*pip, *source, PACKAGE], check=True)
        with tarfile.open(next(HOME.glob("*.tar.gz"))) as package:
            package.extractall(folder, filter="data")
    kernels = next(folder.glob("*/csrc/cpu/comm"))
    # ninja may be next to the interpreter, in an environment that is not activated
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    made = HOME / "made"
    made.mkdir(exist_ok=True)
    sources = [str(kernels / source) for source in SOURCES]
    options = {"extra_cflags": FLAGS, "extra_ldflags": ["-fopenmp"]}
    cpp_extension.load(NAME, sources, build_directory=str(made), **options)
    return str(made)


def load(folder: str, comm: Any, meeting: str) -> None:
    """Make `torch.ops.deepspeed` work on this rank; all ranks name the same meeting."""
    os.environ.update(LOCAL_SIZE=str(comm.size), MASTER_ADDR="unisono", MASTER_PORT=meeting)
    sys.path.append(folder)
    importlib.import_module(NAME).initialize(comm.size, comm.rank)


def is_right(comm: Any, add: Callable[[torch.Tensor], object], like: torch.Tensor) -> bool:
    """Whether all ranks have the sum of small whole numbers after `add`."""
    whole = torch.arange(like.numel()) % 13
    x = (whole + comm.rank).to(like.dtype)
    add(x)
    expected = comm.size * whole + sum(range(comm.size))
    wrong = torch.tensor([float(not torch.equal(x.long(), expected))])
    comm.all_reduce(wrong)
    return not wrong.item()


def measure(sizes: Sequence[str], seconds: float, folder: str, meeting: str) -> list[Any]:
    """One rank: each variant's median by dtype and size, and whether its sum is right."""
    torch.set_num_threads(1)
    comm = unisono.init()
    load(folder, comm, meeting)
    ways = {"unisono": comm.all_reduce, "deepspeed": torch.ops.deepspeed.inference_all_reduce_}
    order = random.Random(7)  # the same on all ranks
    rows = []
    for name in DTYPES:
        dtype = getattr(torch, name)
        for size in sizes:
            x = torch.zeros(bytes_of(size) // dtype.itemsize, dtype=dtype)
            right = {way: is_right(comm, call, x) for way, call in ways.items()}

            def turn(call: Callable[[torch.Tensor], object], x: torch.Tensor, times: int) -> float:
                comm.barrier()
                start = time.perf_counter()
                for _ in range(times):
                    call(x)
                taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
                comm.all_reduce(taken, "max")
                return taken.item() / times

            each = {way: turn(call, x, 3) for way, call in ways.items()}
            times = {way: max(1, int(TURN_S / each[way])) for way in ways}
            taken: dict[str, list[float]] = {way: [] for way in ways}
            turns = max(5, int(seconds / sum(times[way] * each[way] for way in ways)))
            for _ in range(turns):
                for way in order.sample(list(ways), len(ways)):
                    taken[way].append(turn(ways[way], x, times[way]))
            medians = {way: statistics.median(taken[way]) * 1e6 for way in ways}
            rows.append({"dtype": name, "size": size, "us": medians, "right": right})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="bytes of the tensor: 8 64K 16M")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each type and size")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    folder, meeting = build(), str(os.getpid())
    try:
        arguments = (options.sizes, options.seconds, folder, meeting)
        rows = unisono.launch(measure, options.ranks, arguments, threads=1)[0]
    finally:  # DeepSpeed leaves its buffers behind
        for buffer in Path("/dev/shm").glob(f"deepspeed_*_unisono_{meeting}_*"):
            buffer.unlink()
    print(f"{'type':9} {'size':>5} {'unisono us':>11} {'deepspeed us':>13} {'ratio':>6}")
    for row in rows:
        ours, theirs = row["us"]["unisono"], row["us"]["deepspeed"]
        wrong = ", ".join(f"{way} is wrong" for way, right in row["right"].items() if not right)
        text = f"{row['dtype']:9} {row['size']:>5} {ours:11,.2f} {theirs:13,.2f}"
        print(f"{text} {theirs / ours:6.2f}  {wrong}".rstrip())
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
