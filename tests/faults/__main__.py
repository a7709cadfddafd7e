"""`python -m faults [--json] [--setup SETUP] [NAME ...]`: run programs of the corpus."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing

from faults.corpus import Fault, corpus, reports_in, right
from faults.runner import Outcome, run_program

AT_ONCE = 3


def main() -> None:
    """Run them, and print the verdicts and the score, or every rank's output as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--setup")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    chosen = [
        (fault, setup)
        for fault in corpus()
        if not given.names or fault.name in given.names
        for setup in ([given.setup] if given.setup else fault.setups)
    ]
    score, results = 0, []
    # Programs mostly wait. A fork of this process has no threads, so it may fork ranks.
    with multiprocessing.get_context("fork").Pool(min(AT_ONCE, len(chosen))) as pool:
        for (fault, setup), outcome in zip(chosen, pool.imap(run, chosen), strict=True):
            results.append({"name": fault.name, "setup": setup, **dataclasses.asdict(outcome)})
            if given.json:
                continue
            good = right(fault, outcome)
            score += good
            print(f"{'right' if good else 'WRONG'}  {fault.name} on {setup}", flush=True)
            for report in reports_in(outcome):
                print("   ", report.replace("\n", "\n    "))
            if not good:
                print("    wanted:", fault.culprits, fault.line, *outcome.said, sep="\n")
    print(json.dumps(results) if given.json else f"{score} of {len(results)}")


def run(chosen: tuple[Fault, str]) -> Outcome:
    """Run one program in one setup, until its verdict is right."""
    fault, setup = chosen
    enough = functools.partial(right, fault)
    return run_program(fault.path, fault.ranks, setup, deadline_s=60, grace_s=15, enough=enough)


if __name__ == "__main__":
    main()
