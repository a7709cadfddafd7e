"""From the outcomes of the parity matrix to a page."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch_parity.matrix import DTYPES, LAYOUTS, MOVING, OPS, REDUCING, Case


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case, one of MEANINGS, and its message."""

    what: str
    text: str = ""


MEANINGS = {
    "dies": "the process ends",
    "hangs": "no answer",
    "overwrites": "memory beside a strided view changes",
    "wrong": "the result is wrong, without an error",
    "accepts": "an invalid call is accepted",
    "refuses": "a valid call raises an exception",
    "scratches": "`reduce` changes the tensor of a rank that is not the root",
    "right": "a valid call gives the expected result; an invalid one raises an exception",
}
"""From the worst to the best."""

_HEAD = """# torch.distributed: what works on which backend

`make parity` wrote this page: {where}.

Each case is a collective with a reduction, a dtype and a memory layout. It is called through
`torch.distributed` on CPU tensors, and the result is compared, bit for bit, with Python's own
arithmetic (`tests/torch_parity`). Ranks that failed a case are not used for another. *mixed* is a
contiguous tensor on one rank and a transposed one on the other; *uneven* is a list of tensors of
different sizes; *expanded* is an input of stride 0, or such a result, which is invalid.

torch guarantees little of this for every backend. unisono guarantees that `reduce` does not change
the tensors of other ranks, and that tensors may have any memory layout.
"""


def page(every: Sequence[Case], outcomes: dict[str, list[Outcome]], where: str) -> str:
    """The whole page; a column for each backend."""
    lines = [_HEAD.format(where=where), _row("outcome", *outcomes, "meaning")]
    lines.append(_row(*["---"] * (len(outcomes) + 2)))
    counts = {
        backend: Counter(outcome.what for outcome in all_) for backend, all_ in outcomes.items()
    }
    for what, meaning in MEANINGS.items():
        found = [str(counts[backend][what]) for backend in outcomes]
        lines.append(_row(what, *found, meaning))
    for backend, all_ in outcomes.items():
        lines += ["", f"## {backend}", "", *_findings(every, all_)]
    return "\n".join(lines) + "\n"


def _findings(every: Sequence[Case], outcomes: list[Outcome]) -> list[str]:
    groups: dict[tuple[int, str], list[Case]] = defaultdict(list)
    for case, outcome in zip(every, outcomes, strict=True):
        if outcome.what != "right":
            groups[list(MEANINGS).index(outcome.what), _said(case, outcome)].append(case)
    if not groups:
        return [f"All {len(every)} cases are right."]
    lines = [_row("outcome", "cases", "said", "collectives", "reductions", "dtypes", "layouts")]
    lines.append(_row(*["---"] * 7))
    for (rank, said), cases in sorted(groups.items()):
        collectives = _listed((case.collective for case in cases), (*REDUCING, *MOVING))
        ops = _listed((case.op for case in cases if case.op), OPS)
        dtypes = _listed((_name(case.dtype) for case in cases), tuple(map(_name, DTYPES)))
        layouts = _listed((case.layout for case in cases), LAYOUTS)
        what = list(MEANINGS)[rank]
        lines.append(_row(what, str(len(cases)), said, collectives, ops, dtypes, layouts))
    return lines


def _said(case: Case, outcome: Outcome) -> str:
    """What distinguishes findings: the message, or else the layout."""
    if outcome.what not in ("refuses", "dies"):
        return "" if outcome.what == "accepts" else f"({case.layout})"
    text = re.sub(r"\[[^\]]*\]:?\d*", "", outcome.text.splitlines()[0])
    text = re.sub(r"\s*[\x00-\x1f]\s*", " this ", re.split(r" \(|\. ", text)[0])
    return re.sub(r"\s+", " ", text).replace("|", "/")


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(found: Iterable[str], known: Sequence[str]) -> str:
    """Names in the matrix's order; "all" or "all but" where that is shorter."""
    here = set(found)
    missing = [name for name in known if name not in here]
    if not missing:
        return "all"
    if len(missing) <= len(known) // 4:
        return "all but " + ", ".join(missing)
    return ", ".join(name for name in known if name in here)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
