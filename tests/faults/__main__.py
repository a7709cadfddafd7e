"""`python -m faults [--json] [--setup SETUP] [NAME ...]`: run programs of the corpus."""

from __future__ import annotations

import argparse
import dataclasses
import json

from commit import commit
from faults.corpus import corpus, outcomes_of, reports_in, right


def main() -> None:
    """Run them, and print the verdicts and the score, or every rank's output as lines of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--setup", action="append")
    parser.add_argument("--json", action="store_true", help="for faults.page --outcomes")
    given = parser.parse_args()
    chosen = [
        (fault, setup)
        for fault in corpus()
        if not given.names or fault.name in given.names
        for setup in given.setup or fault.setups
        if fault.occurs_in(setup)
    ]
    score = 0
    for (fault, setup), outcome in zip(chosen, outcomes_of(chosen), strict=True):
        if given.json:
            said = {"commit": commit(), "name": fault.name, "setup": setup}
            said |= dataclasses.asdict(outcome)
            print(json.dumps(said), flush=True)
            continue
        good = right(fault, outcome)
        score += good
        print(f"{'right' if good else 'WRONG'}  {fault.name} on {setup}", flush=True)
        for report in reports_in(outcome):
            print("   ", report.replace("\n", "\n    "))
        if not good:
            print("    wanted:", fault.culprits, fault.line, *outcome.said, sep="\n")
    if not given.json:
        print(f"{score} of {len(chosen)}")


if __name__ == "__main__":
    main()
