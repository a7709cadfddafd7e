"""The period of a program's calls: a training step makes the calls of the step before."""

from __future__ import annotations

import codecs
import re
from collections.abc import Hashable, Sequence

_CODE = codecs.lookup("utf-16-le")  # now, for a failure may find no files to import it from
_EQUAL = re.compile("\0+")
_LONGEST = 500
_NEWEST = 4000
_TIMES = 3
"""A step is one that came so often in a row."""
_NEARLY = 0.9
"""A shorter period counts if it covers nearly as much: every multiple of a period is one."""


def find_steps(calls: Sequence[Hashable]) -> range:
    """Where each step begins: the indices of its first calls, and last the index after the last
    whole step. Empty if the calls do not repeat. A call is whatever is equal if it is the same
    call, such as its line, operation and bytes."""
    base = max(0, len(calls) - _NEWEST)
    numbers: dict[Hashable, int] = {}
    text = "".join(chr(numbers.setdefault(call, len(numbers))) for call in calls[base:])
    whole, count = int.from_bytes(_CODE.encode(text)[0], "little"), len(text)
    runs = {}
    for period in range(1, min(_LONGEST, count // _TIMES) + 1):
        # "\0" where a call is the one `period` later
        differs = (whole ^ whole >> 16 * period).to_bytes(2 * count, "little")
        differences = _CODE.decode(differs[: 2 * (count - period)])[0]
        if "\0" * (_TIMES - 1) * period not in differences:
            continue
        longest = max(_EQUAL.finditer(differences), key=lambda found: len(found[0]))
        runs[period] = longest.end() + period, len(longest[0]) + period
        if runs[period][1] >= _NEARLY * count:
            break
    most = max((length for _, length in runs.values()), default=0)
    for period, (stop, length) in runs.items():
        if length >= _NEARLY * most:
            first = base + stop - length
            return range(first, first + length // period * period + 1, period)
    return range(0)
