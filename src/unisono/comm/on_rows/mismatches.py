"""Ranks that made different calls: which ones differ from the others, in the call or in the sizes
of one pair of ranks, and the text of the exception.

The sizes are those of gather, scatter and all_to_all, which may differ from pair to pair.
"""

from __future__ import annotations

import contextlib
import re
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeVar

from unisono.errors import CollectiveMismatch, name_ranks

Value = TypeVar("Value", bound=Hashable)

_MOST_SHOWN = 8


def find_majority(values: Sequence[Value | None]) -> Value | None:
    """The value of more than half of them. A None is no vote, but counts in the total."""
    counts = Counter(value for value in values if value is not None)
    value, times = counts.most_common(1)[0] if counts else (None, 0)
    return value if 2 * times > len(values) else None


def find_minority(values: Sequence[Hashable | None]) -> list[int]:
    """The ranks that differ from a strict majority; none if there is no majority."""
    usual = find_majority(values)
    if usual is None:
        return []
    return [rank for rank, value in enumerate(values) if value not in (None, usual)]


def algorithm_mark(algorithm: str, most: int = 0x7FFF) -> int:
    """A small number, not 0, for an algorithm's name, in place of a root or a reduction."""
    return 1 + zlib.crc32(algorithm.encode()) % most


def algorithm_of(collective: str, mark: int, most: int = 0x7FFF) -> str:
    """The algorithm of this mark: one of plan's, or one that this program registered."""
    named: list[str] = []
    with contextlib.suppress(ImportError, OSError):  # after a failure files may be unreachable
        from unisono.plan.catalog import catalog

        names = (each.name for each in catalog(collective))
        named = [name for name in names if algorithm_mark(name, most) == mark]
    return named[0] if named else "a schedule of its own"


class UnequalPair(NamedTuple):
    giver: int
    taker: int
    given: int
    wanted: int

    def __str__(self) -> str:
        return (
            f"rank {self.giver} sends {self.given} element{'' if self.given == 1 else 's'} to rank "
            f"{self.taker}, which expects {self.wanted}"
        )


Sizes = Sequence[Sequence[int | None]]
"""Of each rank, for each rank; None where it does not matter."""


def abbreviate_sizes(sizes: Sequence[int]) -> str:
    """Sizes on one line: one number if all are equal."""
    if len(set(sizes)) == 1 and len(sizes) > 1:
        return f"{sizes[0]} each"
    text = ", ".join(map(str, sizes[:_MOST_SHOWN]))
    return text + (", ..." if len(sizes) > _MOST_SHOWN else "")


class PairwiseSizes(NamedTuple):
    """What each rank sends to and expects from each, in elements."""

    gives: Sizes
    wants: Sizes

    def unequal_pairs(self) -> list[UnequalPair]:
        found = []
        for giver, given_to in enumerate(self.gives):
            for taker, given in enumerate(given_to):
                wanted = self.wants[taker][giver]
                if given is not None and wanted is not None and given != wanted:
                    found.append(UnequalPair(giver, taker, given, wanted))
        return found

    def culprits(self) -> list[int]:
        """The ranks with wrong sizes: if most ranks have one size, those with another; else the
        rank at one end of all mismatched pairs. None if that is not clear."""
        pairs = self.unequal_pairs()
        votes = []
        for own in zip(self.gives, self.wants, strict=True):
            sizes = Counter(size for side in own for size in side if size)  # 0: nothing is sent
            votes.append(sizes.most_common(1)[0][0] if sizes else None)
        usual = find_majority(votes)
        if usual is not None:
            odd = {pair.giver for pair in pairs if pair.given != usual}
            odd |= {pair.taker for pair in pairs if pair.wanted != usual}
            if 2 * len(odd) < len(votes):
                return sorted(odd)
        ends = [{pair.giver, pair.taker} for pair in pairs]
        common = set.intersection(*ends) if ends else set()
        return sorted(common) if len(common) == 1 else []

    def verdict(self) -> str:
        pairs = self.unequal_pairs()
        if not pairs:
            return "the sizes that ranks send and expect differ"
        odd = self.culprits()
        first = next((pair for pair in pairs if {pair.giver, pair.taker} & set(odd)), pairs[0])
        more = f" (and {len(pairs) - 1} more pairs differ)" if len(pairs) > 1 else ""
        return f"{first}{more}"

    def of_rank(self, rank: int) -> str:
        parts = []
        for verb, sizes in (("sending", self.gives[rank]), ("expecting", self.wants[rank])):
            known = [size for size in sizes if size is not None]
            if known:
                parts.append(f"{verb} {abbreviate_sizes(known)}")
        return ", ".join(parts)


# -- texts -----------------------------------------------------------------------------------------

_HASH = re.compile(r", (\w+) with hash [0-9a-f]{8}")


def describe_collective(
    name: str, dtype: str, elements: int | None, reduction: str | None, root: int | None, *more: str
) -> str:
    """What must be equal on every rank: without `elements` for sizes that may differ."""
    details = [
        dtype,
        "" if elements is None else f"{elements} elements",
        reduction or "",
        "" if root is None else f"root {root}",
        *more,
    ]
    return f"{name} of {', '.join(filter(None, details))}"


class Mismatch(NamedTuple):
    """What each rank called, None if it has not arrived, and at which line. `culprits` differ from
    the others: in `pairs`, the sizes, if not in the calls. With the name of each rank's host, ""
    if there is only one, ranks that made the same call share a line of the text."""

    calls: Sequence[str | None]
    sites: Sequence[str | None]
    culprits: Sequence[int]
    pairs: PairwiseSizes | None = None
    hosts: Sequence[str] = ()

    def verdict(self) -> str:
        who = name_on_hosts(self.culprits, self.hosts)
        if self.pairs is not None:
            return (f"{who} passed other sizes: " if self.culprits else "") + self.pairs.verdict()
        odd = f"{who} made a different call than the others"
        return odd if self.culprits else "the ranks made different calls"

    def numbered(self, call: int, group: str) -> str:
        """The text for a call that has a number, with all that tells the ranks' calls apart."""
        first, calls = f"{self.verdict()} in call #{call} of group {group}", self.calls
        if self.pairs is not None:
            first = f"call #{call} of group {group}: {self.verdict()}"
            calls = [f"{what}, {self.pairs.of_rank(rank)}" for rank, what in enumerate(calls)]
        plain = [text and _HASH.sub("", text) for text in calls]
        if len(set(plain)) == len(set(calls)):  # the hashes tell nothing more
            calls = plain
        return self._replace(calls=calls).text(first, "call")

    def text(self, first: str, verb: str = "") -> str:
        """The first line, a line for each call, and advice if there is a `verb` for it."""
        sides: dict[tuple[object, ...], list[int]] = {}
        for rank, side in enumerate(zip(self.calls, self.sites, strict=True)):
            sides.setdefault((*side, self.hosts[rank] if self.hosts else rank), []).append(rank)
        lines = [
            f"  {name_on_hosts(ranks, self.hosts)}: {text or 'has not arrived'}"
            + (f" at {site}" if site else "")
            for (text, site, _), ranks in sides.items()
        ]
        if verb:
            lines.append(f"No data was moved. Make every rank {verb} the same, in the same order.")
        return "\n".join([first, *lines])

    def error(self, text: str, rank: int, group: str, call: int = 0) -> CollectiveMismatch:
        return CollectiveMismatch(
            text,
            rank=rank,
            group=group,
            call=call,
            calls=self.calls,
            sites=self.sites,
            culprits=self.culprits,
        )


def name_on_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """ "ranks 2 and 3 on node7"; without a host if there is only one."""
    names = filter(None, dict.fromkeys(hosts[rank] for rank in ranks)) if hosts else ()
    return " on ".join(filter(None, [name_ranks(ranks), " and ".join(names)]))
