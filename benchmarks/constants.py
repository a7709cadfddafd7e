"""What other values of the engine's constants cost: csrc/base/constants.h with one of them changed.

    python benchmarks/constants.py                     every constant, smaller and larger
    python benchmarks/constants.py CUT_FROM --rounds 9

For each value the engine is compiled again, outside the tree, with native_latency.c, which times
calls without Python. The variants take turns. Shown is the shortest time of all rounds, relative to
that of the value in the header: 1.10 is a tenth slower. Needs gcc, cmake and quiet cores.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
KIB, MIB = 1024, 1024**2
# What each constant matters for (operation, sizes and ranks), and the factors to try.
MEASURED = {
    "STEP_BYTES": ("all_gather", (256 * KIB, MIB, 16 * MIB), 2, (0.5, 2)),
    "CUT_STEP_BYTES": ("all_reduce", (256 * KIB, MIB, 16 * MIB), 2, (0.5, 2)),
    "CUT_FROM": ("all_reduce", (16 * KIB, 64 * KIB), 2, (0.5, 4)),
    "CROWDED_FROM": ("all_reduce", (16 * KIB, 64 * KIB), 4, (0.25, 4)),
    "BYPASS_FROM": ("all_reduce", (4 * MIB, 16 * MIB), 2, (0.5, 4)),
    "COPIED_BYTES": ("all_reduce", (256 * KIB, MIB), 2, (0.5, 2)),
    "GLANCES": ("all_reduce", (8, 64 * KIB), 2, (0.5, 2)),
    "SPIN_NS_MOST": ("all_reduce", (8, 64 * KIB), 2, (0.1, 2)),
}


def build(folder: Path, constant: str, factor: float) -> Path:
    """native_latency with a constant multiplied by a factor."""
    for name in ("csrc", "CMakeLists.txt", "benchmarks/native_latency.c"):
        to = folder / name
        to.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if name == "csrc" else shutil.copy)(ROOT / name, to)
    header = folder / "csrc/base/constants.h"
    text, count = re.subn(
        rf"\b{constant} = ([^,]+),", rf"{constant} = (int)((\1) * {factor}),", header.read_text()
    )
    assert count, f"csrc/base/constants.h has no {constant}"
    header.write_text(text)
    build = ["cmake", "--build", folder / "build", "--target", "native_latency"]
    for command in (["cmake", "-S", folder, "-B", folder / "build", "-DUNISONO_MODULE=OFF"], build):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "build/native_latency"


def least_ns(program: Path, operation: str, sizes: tuple[int, ...], ranks: int) -> dict[int, float]:
    command = [program, str(ranks), str(max(sizes)), operation]
    lines = subprocess.check_output(command, text=True).split("\n")
    times = {int(size): float(ns) for _, size, _, ns in map(str.split, filter(None, lines))}
    return {size: times[min(times, key=lambda other: abs(other - size))] for size in sizes}


def measure(constant: str, rounds: int) -> None:
    operation, sizes, ranks, factors = MEASURED[constant]
    least: dict[float, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        programs = {f: build(Path(folder) / str(f), constant, f) for f in (1.0, *factors)}
        for _ in range(rounds):
            for factor, program in programs.items():
                times, before = least_ns(program, operation, sizes, ranks), least.get(factor, {})
                least[factor] = {size: min(ns, before.get(size, ns)) for size, ns in times.items()}
    for factor in factors:
        shown = ", ".join(
            f"{least[factor][size] / least[1.0][size]:.2f} at {size} B" for size in sizes
        )
        print(f"{constant} x {factor:g}: {operation} on {ranks} ranks {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("constants", nargs="*", metavar="CONSTANT", default=list(MEASURED))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for constant in args.constants:
        measure(constant, args.rounds)


if __name__ == "__main__":
    main()
