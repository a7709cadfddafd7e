"""`python -m faults [NAME ...]`: the score of the corpus, and docs/diagnosis.md's table."""

from __future__ import annotations

import sys

from faults.corpus import corpus, reports_in, right
from faults.play import play

if __name__ == "__main__":
    wanted = sys.argv[1:]
    score = played = 0
    for fault in corpus():
        if wanted and fault.name not in wanted:
            continue
        for make in fault.makes:
            outcome = play(fault.path, fault.ranks, make)
            good = right(fault, outcome)
            score, played = score + good, played + 1
            print(f"{'right' if good else 'WRONG'}  {fault.name} on {make}")
            for report in reports_in(outcome)[: 1 if good else 4]:
                print("   ", report.partition("\n")[0] if good else report)
            if not good:
                print("    wanted:", fault.culprits, fault.line)
                for rank, text in enumerate(outcome.said):
                    print(f"    [{rank}]", text[-300:].replace("\n", "\n        "))
    print(f"{score} of {played}")
