"""Summaries of records: what was called how often, how fast, and who was late.

A rank is late by its arrival, not by the length of its call: a late rank's own calls are short
because all others are there already. The rest of a call after the last arrival is the transfer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unisono.comm.shared_memory.records import GroupRecords, Record
from unisono.watch.calls import CREATIONS, by_number

# of the bytes that a record holds: what each rank gives, as nccl-tests counts (docs/diagnosis.md)
_WIDE = ("all_gather", "gather")
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


@dataclass(frozen=True)
class _CompleteCall:
    """A call that all ranks have finished."""

    first_s: float
    last_s: float
    before_last_s: float
    ended_s: float
    latest: int
    total_s: float
    record: Record


def summarise(groups: Iterable[GroupRecords]) -> Summary:
    """From the records of whole groups to their summary."""
    groups = list(groups)
    table: dict[tuple[str, str, str, int, int], list[_CompleteCall]] = {}
    for group in groups:
        if group.backend == CREATIONS:
            continue
        for records in by_number(group).values():
            call = _complete_call(group, records)
            if call is not None:
                operation, size_bytes = call.record.operation, call.record.bytes
                if operation in _WIDE:  # nccl-tests' size: the whole wide side
                    size_bytes *= group.size
                key = group.name, group.backend, operation, size_bytes, group.size
                table.setdefault(key, []).append(call)
    moments = [
        moment
        for calls in table.values()
        for call in calls
        for moment in (call.first_s, call.ended_s)
    ]
    wall_s = max(moments) - min(moments) if moments else 0.0
    summaries = [_summary(key, calls, wall_s) for key, calls in table.items()]
    return Summary(wall_s, tuple(sorted(summaries, key=lambda summary: -summary.total_s)))


def _complete_call(group: GroupRecords, records: dict[int, Record]) -> _CompleteCall | None:
    ended = [record.ended_s for record in records.values() if record.state == "finished"]
    known = [moment for moment in ended if moment is not None]
    if len(known) < group.size:
        return None
    arrivals = sorted((record.arrived_s, rank) for rank, record in records.items())
    return _CompleteCall(
        first_s=arrivals[0][0],
        last_s=arrivals[-1][0],
        before_last_s=arrivals[-2][0],
        ended_s=max(known),
        latest=arrivals[-1][1],
        total_s=sum(
            (record.ended_s or record.arrived_s) - record.arrived_s for record in records.values()
        )
        / group.size,
        record=max(records.values(), key=lambda record: record.bytes),
    )


def _summary(
    key: tuple[str, str, str, int, int], calls: list[_CompleteCall], wall_s: float
) -> CallSummary:
    name, backend, operation, size_bytes, ranks = key
    count = len(calls)
    transfer_s = sum(max(0.0, call.ended_s - call.last_s) for call in calls) / count
    late = [call for call in calls if _is_late(call)]
    lasts = [call.latest for call in late]
    latest = max(set(lasts), key=lasts.count) if lasts else -1
    gaps = [call.last_s - call.before_last_s for call in late if call.latest == latest]
    total_s = sum(call.total_s for call in calls)
    factor = _factor(operation, ranks)
    return CallSummary(
        group=name,
        backend=backend,
        operation=operation,
        bytes=size_bytes,
        ranks=ranks,
        count=count,
        total_s=total_s,
        share=total_s / wall_s if wall_s else 0.0,
        wait_s=sum(call.last_s - call.first_s for call in calls) / count,
        transfer_s=transfer_s,
        busbw=size_bytes * factor / transfer_s if transfer_s else 0.0,
        latest=latest,
        latest_count=lasts.count(latest),
        latest_by_s=sum(gaps) / len(gaps) if gaps else 0.0,
    )


def _is_late(call: _CompleteCall) -> bool:
    gap_s = call.last_s - call.before_last_s
    return gap_s > _LATE_S and gap_s > max(0.0, call.ended_s - call.last_s)


def _factor(operation: str, ranks: int) -> float:
    """From bytes per second to bus bandwidth."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in ("broadcast", "reduce", "barrier"):
        return 1.0
    return (ranks - 1) / ranks
