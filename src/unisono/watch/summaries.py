"""Summaries of records: what was called how often, how fast, and who was late.

A rank is late by its arrival, not by the length of its call: a late rank's own calls are short
because all others are there already. The rest of a call after the last arrival is the transfer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from unisono.cases.primitives import primitive_of
from unisono.comm.shared_memory.records import GroupRecords, Record
from unisono.watch.calls import CREATIONS, by_number

_LATE_S = 0.001
"""An arrival counts as late from this delay on, if the delay is also longer than the transfer."""


@dataclass(frozen=True)
class CallSummary:
    """All calls of one operation and size of one group, over all ranks. Times in seconds.

    `wait_s` is from the first arrival to the last, `transfer_s` from there to the end, both means;
    `share` is the part of the wall time that a rank spends in them, `busbw` bytes per second as
    nccl-tests counts them, by transfer time; `latest` is the rank that was last most often, with
    how often, and by how much on average.
    """

    group: str
    backend: str
    operation: str
    bytes: int
    ranks: int
    count: int
    total_s: float
    share: float
    wait_s: float
    transfer_s: float
    busbw: float
    latest: int
    latest_count: int
    latest_by_s: float


@dataclass(frozen=True)
class Summary:
    """What `unisono.watch.summary()` returns; printing it shows a table.

    `wall_s` is the time from the first call to the last, `calls` has an entry for each operation
    and size of each group.

    >>> comm.all_reduce(torch.ones(1000))
    >>> print(unisono.watch.summary())
    group ...
    """

    wall_s: float
    calls: tuple[CallSummary, ...]

    def __str__(self) -> str:
        head = (
            f"{'group':<14}{'call':<16}{'bytes':>12}{'ranks':>6}{'count':>7}{'total s':>9}"
            f"{'share':>7}{'wait ms':>9}{'move ms':>9}{'GB/s':>7}  late"
        )
        lines = [head]
        for call in self.calls:
            late = (
                f"rank {call.latest}: {call.latest_count}x by {call.latest_by_s * 1e3:.1f} ms"
                if call.latest >= 0
                else ""
            )
            lines.append(
                f"{call.group[:13]:<14}{call.operation:<16}{call.bytes:>12,}{call.ranks:>6}"
                f"{call.count:>7}{call.total_s:>9.3f}{call.share:>7.1%}{call.wait_s * 1e3:>9.2f}"
                f"{call.transfer_s * 1e3:>9.2f}{call.busbw / 1e9:>7.2f}  {late}"
            )
        return "\n".join(lines)


class _CompleteCall:
    """A call that all ranks have finished: its records, and when they ended."""

    def __init__(self, records: Mapping[int, Record], ended: Sequence[float]) -> None:
        arrivals = sorted((record.arrived_s, rank) for rank, record in records.items())
        self.first_s = arrivals[0][0]
        self.last_s, self.latest = arrivals[-1]
        self.ended_s = max(ended)
        self.total_s = (sum(ended) - sum(at_s for at_s, _ in arrivals)) / len(records)
        self.transfer_s = max(0.0, self.ended_s - self.last_s)
        self.late_s = self.last_s - arrivals[-2:][0][0]
        self.is_late = self.late_s > max(_LATE_S, self.transfer_s)


def summarise(groups: Iterable[GroupRecords]) -> Summary:
    """From the records of whole groups to their summary."""
    table: dict[tuple[str, str, str, int, int], list[_CompleteCall]] = {}
    for group in groups:
        for records in by_number(group).values() if group.backend != CREATIONS else ():
            finished = [record for record in records.values() if record.state == "finished"]
            ended = [record.ended_s for record in finished if record.ended_s is not None]
            if len(ended) == group.size:
                record = max(finished, key=lambda record: record.bytes)
                primitive = primitive_of(record.operation)
                # A record has what each rank gives, nccl-tests counts all (docs/diagnosis.md).
                wide = group.size if primitive.wide == ("output",) else 1
                key = group.name, group.backend, record.operation, record.bytes * wide, group.size
                table.setdefault(key, []).append(_CompleteCall(records, ended))
    calls = [call for several in table.values() for call in several]
    end_s = max((call.ended_s for call in calls), default=0.0)
    wall_s = end_s - min((call.first_s for call in calls), default=0.0)
    summaries = [_summary(key, several, wall_s) for key, several in table.items()]
    return Summary(wall_s, tuple(sorted(summaries, key=lambda summary: -summary.total_s)))


def _summary(
    key: tuple[str, str, str, int, int], calls: list[_CompleteCall], wall_s: float
) -> CallSummary:
    _, _, operation, size_bytes, ranks = key
    count = len(calls)
    transfer_s = sum(call.transfer_s for call in calls) / count
    late = [call for call in calls if call.is_late]
    latest, latest_count = next(iter(Counter(call.latest for call in late).most_common(1)), (-1, 0))
    factor = float(primitive_of(operation).bus_factor(ranks))
    late_s = sum(call.late_s for call in late if call.latest == latest)
    total_s = sum(call.total_s for call in calls)
    return CallSummary(
        *key,
        count=count,
        total_s=total_s,
        share=total_s / wall_s if wall_s else 0.0,
        wait_s=sum(call.last_s - call.first_s for call in calls) / count,
        transfer_s=transfer_s,
        busbw=size_bytes * factor / transfer_s if transfer_s else 0.0,
        latest=latest,
        latest_count=latest_count,
        latest_by_s=late_s / max(1, latest_count),
    )
