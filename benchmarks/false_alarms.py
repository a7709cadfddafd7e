"""Whether the watch raises false alarms: correct but awkward programs, again and again.

    python benchmarks/false_alarms.py [--runs 200] [--seconds 1800] [NAME ...]

The programs are tests/faults/awkward; each says which rank is late, if one is. A report may say
that ranks waited for a late one; any other is a false alarm. Runs alternate between unisono and
gloo.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
sys.path.append(str(TESTS))
from faults.corpus import reports_in  # noqa: E402
from faults.runner import run_program  # noqa: E402

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


def main() -> None:
    """Run them, and print what is wrong and the count."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    given = parser.parse_args()
    programs = sorted((TESTS / "faults" / "awkward").glob("*.py"))
    chosen = [path for path in programs if not given.names or path.stem in given.names]
    begun = time.monotonic()
    done = wrong = 0
    while done < given.runs and time.monotonic() - begun < given.seconds:
        path = chosen[done // 2 % len(chosen)]
        setup = ("unisono", "watched")[done % 2]
        done += 1
        for text in false_alarms(path, setup):
            wrong += 1
            print(f"{path.stem} on {setup}: {text}", flush=True)
    print(f"{wrong} false alarms in {done} runs")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
