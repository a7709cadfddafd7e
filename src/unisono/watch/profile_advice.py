"""What a profile advises: at most three sentences, which its records support."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from unisono.watch.profiles import CallProfile, RankCalls, StepCall, StepProfile

_WORTH = 0.05
"""Less of a step is not worth a sentence."""
_BUCKETS_MIB = (1, 2, 4, 8, 16, 25, 50, 100, 200)


def advise(
    ranks: Sequence[RankCalls], typical: Sequence[StepProfile], calls: Sequence[CallProfile]
) -> Iterator[str]:
    """Which rank to look at, which line to make asynchronous, which bucket size to try."""
    wall_s = max((step.wall_s for step in typical), default=0.0)
    lost: Counter[int] = Counter()
    for step in typical:
        lost[step.lost_to] += step.lost_s / len(typical)  # type: ignore[assignment]
    for slow, lost_s in lost.most_common(1):
        if slow >= 0 and lost_s > _WORTH * wall_s:
            worst = max(calls, key=lambda call: (call.lost_to == slow) * call.lost_s)
            yield (
                f"Look at rank {slow}: a rank waits for it for {_ms(lost_s, wall_s)} on average, "
                f"most in {worst.operation} ({worst.line})."
            )
    blocking = [call for call in calls if call.is_blocking]
    for call in sorted(blocking, key=lambda call: call.lost_s - call.exposed_s)[:1]:
        moving_s = call.exposed_s - call.lost_s
        if moving_s > _WORTH * wall_s:
            yield (
                f"Make {call.operation} asynchronous at {call.line}: it blocks for "
                f"{_ms(moving_s, wall_s)}; with async_op=True it can run during computation that "
                "does not need its result."
            )
    for rank in ranks[:1]:
        yield from _bucket_size(rank, wall_s)


def _bucket_size(rank: RankCalls, wall_s: float) -> Iterator[str]:
    """The size of buckets that a simulation of this rank's own calls finds better."""
    exposed: dict[int, list[float]] = {}
    for begin_s, end_s in pairwise(rank.ends):
        kinds: dict[tuple[str, str], list[StepCall]] = {}
        for call in rank.between(begin_s, end_s):
            if not call.is_blocking and call.record.reduction and call.begin_s >= begin_s:
                kinds.setdefault((call.group.name, call.key()[4]), []).append(call)
        buckets = max(
            kinds.values(), key=lambda calls: sum(c.record.bytes for c in calls), default=[]
        )
        for size, tail_s in _simulate(buckets):
            exposed.setdefault(size, []).append(tail_s)
    means = {size: float(np.mean(found)) for size, found in exposed.items()}
    saved_s = means.pop(0, 0.0) - min(means.values(), default=0.0)
    if saved_s > _WORTH * wall_s:
        size = min(means, key=lambda size: means[size])
        yield (
            f"Try buckets of {size} MiB (DDP's bucket_cap_mb, GradientSync's bucket_bytes): in a "
            f"simulation with this run's calls they hide {_ms(saved_s, wall_s)} more."
        )


def _simulate(buckets: Sequence[StepCall]) -> Iterator[tuple[int, float]]:
    """Sizes in MiB, 0 for these buckets as they are, and how long after the last gradient the last
    call ends. Gradients become ready as in these calls; a call takes a constant time and one per
    byte, which calls of at least two sizes determine."""
    if len({call.record.bytes for call in buckets}) < 2:
        return
    sizes = np.array([call.record.bytes for call in buckets], np.float64)
    ready, ends, last = np.array([call[:3] for call in buckets], np.float64).T
    free = np.append(0.0, ends[:-1])
    took = ends - np.maximum(np.maximum(ready, last), free)
    per_byte_s, constant_s = np.polyfit(sizes, took, 1)
    total = np.cumsum(sizes)
    if min(per_byte_s, constant_s) < 0 or ready[-1] <= ready[0]:
        return
    begin_s = ready[0] - sizes[0] * (ready[-1] - ready[0]) / (total[-1] - total[0])
    for size in (0, *_BUCKETS_MIB):
        cuts: Any = (
            np.append(np.arange(size << 20, total[-1], size << 20), total[-1]) if size else total
        )
        end_s = 0.0
        at = np.interp(cuts, [0.0, *total], [begin_s, *ready])
        for at_s, size_bytes in zip(at, np.diff(cuts, prepend=0), strict=True):
            end_s = max(end_s, at_s) + constant_s + per_byte_s * size_bytes
        yield size, end_s - ready[-1]


def _ms(seconds: float, wall_s: float) -> str:
    return f"{seconds * 1e3:.3g} ms of a step ({seconds / wall_s:.0%})"
