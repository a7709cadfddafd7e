"""From the ranks' measurements to one number, and to the table of docs/programs.md.

python tests/real/figures.py steps.json runs.json
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any


def step_times(found: dict[str, Any], backend: str) -> list[float]:
    """Milliseconds; for trainers those of all runs in sequence."""
    times = found[backend]["step_ms"]
    return list(itertools.chain(*times)) if isinstance(times[0], list) else times


def ratio_of_steps(found: dict[str, Any]) -> float:
    """How many times as long gloo's steps took: the median over pairs that are next to each other
    in time, of steps, or of whole runs if a trainer owns the loop."""
    if isinstance(found["gloo"]["step_ms"][0], list):
        pairs = zip(
            map(statistics.median, found["gloo"]["step_ms"]),
            map(statistics.median, found["unisono"]["step_ms"]),
            strict=True,
        )
    else:
        pairs = zip(found["gloo"]["step_ms"], found["unisono"]["step_ms"], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def main() -> None:
    print("| program | gloo, ms per step | unisono | gloo / unisono |\n|---|---:|---:|---:|")
    for path in sys.argv[1:]:
        for found in json.loads(Path(path).read_text()):
            theirs, ours = (
                statistics.median(step_times(found, backend)) for backend in ("gloo", "unisono")
            )
            ratio = ratio_of_steps(found)
            print(f"| {found['program']} | {theirs:.1f} | {ours:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
