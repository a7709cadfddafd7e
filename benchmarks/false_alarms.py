"""Whether the watch raises false alarms: correct but awkward programs, again and again.

    python benchmarks/false_alarms.py [--runs 200] [--jobs 1] [--seconds 1800] [NAME ...]

The programs are tests/faults/awkward; each says which rank is late, if one is. A report may say
that ranks waited for a late one; any other is a false alarm. Runs alternate between unisono and
gloo. A run has three ranks: on 16 cores, `--jobs 5` runs five programs side by side. More jobs than
cores make every rank late, which is a harder test and a longer one.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))  # before our own folder, which has a faults.py
from faults.corpus import reports_in  # noqa: E402
from faults.runner import run_program  # noqa: E402
from unisono.processes import end_with_parent  # noqa: E402

_RANKS = 3
_AWAITED = re.compile(r"ranks? ([\d, and-]+?)(?: on \S+)? never reached|.* continued after \d+ s$")


def false_alarms(path: Path, setup: str) -> list[str]:
    """False reports, or that the program did not end."""
    (late,) = re.findall(r"^# late: ?(.*)$", path.read_text(), re.MULTILINE)
    outcome = run_program(path, _RANKS, setup, deadline_s=90, grace_s=90)
    found = [] if outcome.ended else [f"it did not end: {outcome.said}"]
    for report in reports_in(outcome):
        verdict = report.partition("\n")[0]
        awaited = _AWAITED.match(verdict)
        if awaited is None or awaited[1] not in (None, late):
            found.append(verdict)
    return found


def run(chosen: tuple[Path, str, float]) -> tuple[float, list[str]] | None:
    """Run one program, unless its time is over: seconds, and what is false."""
    path, setup, latest_s = chosen
    begun_s = time.monotonic()
    if begun_s > latest_s:
        return None
    found = false_alarms(path, setup)
    return time.monotonic() - begun_s, found


def main() -> None:
    """Run them; print each run, what is wrong, and the count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    programs = sorted((TESTS / "faults" / "awkward").glob("*.py"))
    chosen = [path for path in programs if not given.names or path.stem in given.names]
    begun_s = time.monotonic()
    latest_s = begun_s + given.seconds
    pairs = [(path, setup, latest_s) for path in chosen for setup in ("unisono", "watched")]
    runs = list(itertools.islice(itertools.cycle(pairs), given.runs))
    done = wrong = 0
    importlib.import_module("torch._dynamo")  # DDP and optimizers would, for seconds, in every rank
    # A fork of this process has no threads, so it may fork ranks.
    fork = multiprocessing.get_context("fork")
    with fork.Pool(given.jobs, end_with_parent, (os.getpid(),)) as pool:
        for (path, setup, _), outcome in zip(runs, pool.imap(run, runs), strict=True):
            if outcome is None:
                continue
            took_s, false = outcome
            done, wrong = done + 1, wrong + len(false)
            now_s = time.monotonic() - begun_s
            name = f"{path.stem} on {setup}"
            print(f"{now_s:5.0f} s, {done} of {given.runs}: {name}, {took_s:.1f} s", flush=True)
            for text in false:
                print(f"    FALSE: {text}", flush=True)
    print(f"{wrong} false alarms in {done} runs, {time.monotonic() - begun_s:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
