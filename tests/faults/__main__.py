"""`python -m faults [--json] [--setup SETUP] [NAME ...]`: play programs of the corpus."""

from __future__ import annotations

import argparse
import functools
import json

from faults.corpus import corpus, reports_in, right
from faults.runner import run_program


def main() -> None:
    """Play, and print the verdicts and the score, or what every rank said as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--setup")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    score, played = 0, []
    for fault in corpus():
        if given.names and fault.name not in given.names:
            continue
        for setup in [given.setup] if given.setup else fault.setups:
            enough = functools.partial(right, fault)
            outcome = run_program(fault.path, fault.ranks, setup, enough=enough)
            told = {"name": fault.name, "setup": setup, "ended": outcome.ended}
            played.append(told | {"said": outcome.said})
            if given.json:
                continue
            good = right(fault, outcome)
            score += good
            print(f"{'right' if good else 'WRONG'}  {fault.name} on {setup}", flush=True)
            for report in reports_in(outcome):
                print("   ", report.replace("\n", "\n    "))
            if not good:
                print("    wanted:", fault.culprits, fault.line, *outcome.said, sep="\n")
    print(json.dumps(played) if given.json else f"{score} of {len(played)}")


if __name__ == "__main__":
    main()
