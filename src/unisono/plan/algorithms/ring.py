"""Rings: every rank talks to its two neighbours only.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
The tensor is cut into n chunks. In reduce_scatter partial sums travel around the ring and end,
complete, at their owners; in all_gather the owners' chunks travel around it once more.

One ring leaves a node through one network card. `channels` rings run at once, as in NCCL, each with
its share of the tensor, and each enters and leaves the nodes at ranks of its own: with a channel
for each card, all cards are busy. Where a node has a power of two of ranks, each channel passes
them in an order of its own. Every second node is passed backwards, so that a message stays on its
rail: what leaves through card j arrives through card j (but for one hop where m is odd).

| collective     | steps    | a rank sends    | a card sends, k channels on k cards, m nodes |
|----------------|----------|-----------------|----------------------------------------------|
| reduce_scatter | n - 1    | (n - 1) / n     | (n - 1) / (n k)                              |
| all_gather     | n - 1    | (n - 1) / n     | (n - 1) / (n k)                              |
| all_reduce     | 2(n - 1) | 2(n - 1) / n    | 2(n - 1) / (n k)                             |
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono.plan.catalog import algorithm
from unisono.plan.schedule import Action, Phase, Schedule, Step

MOST_RANKS_IN_CHANNELS = 1024
"""Where the steps of several channels do not repeat regularly."""

Ranks = NDArray[np.int64]


@algorithm("reduce_scatter", "ring")
def reduce_scatter(ranks: int, node_size: int = 1, channels: int = 1) -> Schedule:
    steps = _owned(ranks, node_size, channels, -1, "reduce")
    return Schedule.from_steps("reduce_scatter", "ring", ranks, ranks * channels, steps)


@algorithm("all_gather", "ring")
def all_gather(ranks: int, node_size: int = 1, channels: int = 1) -> Schedule:
    steps = _owned(ranks, node_size, channels, 0, "copy")
    return Schedule.from_steps("all_gather", "ring", ranks, ranks * channels, steps)


@algorithm("all_reduce", "ring")
def all_reduce(ranks: int, node_size: int = 1, channels: int = 1) -> Schedule:
    order = _orders(ranks, node_size, channels)
    phases = [_around(order, -1, "reduce", node_size), _around(order, 0, "copy", node_size)]
    return Schedule.from_steps("all_reduce", "ring", ranks, ranks * channels, phases)


def _orders(ranks: int, node_size: int, channels: int) -> Ranks:
    """For each channel the ranks in the order of its ring."""
    if channels < 1:
        raise ValueError(f"a ring has at least one channel, not {channels}")
    position = np.arange(ranks)
    if channels == 1:
        return position[None, :]
    if node_size < 1 or ranks % node_size:
        raise ValueError(
            f"channels need nodes of equal size: {ranks} ranks do not fill nodes of {node_size}"
        )
    node, passed = np.divmod(position, node_size)
    first = (np.arange(channels) * node_size // channels)[:, None]
    # Odd strides pass all ranks of such a node, and end in as many places as they begin in.
    stride = 2 * first + 1 if node_size.bit_count() == 1 else 1
    last = first - stride
    local = np.where(node % 2 == 0, first + passed * stride, last - passed * stride) % node_size
    order: Ranks = node * node_size + local
    return order


def check_size(name: str, ranks: int) -> None:
    if ranks > MOST_RANKS_IN_CHANNELS:
        most = f"{MOST_RANKS_IN_CHANNELS:,} ranks"
        raise ValueError(f"{name} with channels is too large to write down beyond {most}")


def far_first(step: Step, node_size: int) -> Step:
    """The same step with what leaves a node listed, and so sent, first, for it takes longest."""
    stays = step.source // node_size == step.destination // node_size
    listed = np.argsort(stays, kind="stable")
    columns = (step.source, step.destination, step.chunk, step.reduces, step.count)
    return Step.of(*(column[listed] for column in columns))


def _step(order: Ranks, chunk: Ranks, action: Action, node_size: int) -> Step:
    """Every rank of every ring sends to the next one."""
    to = np.roll(order, -1, axis=1)
    step = Step.of(order.ravel(), to.ravel(), chunk.ravel(), action)
    return step if len(order) == 1 else far_first(step, node_size)


def _around(order: Ranks, first: int, action: Action, node_size: int) -> Phase:
    """Each rank sends the chunk of the rank `first` places on, then what it got last. Chunks are
    numbered by channel, then by position, so that steps repeat."""
    channels, ranks = order.shape
    chunk = (np.arange(ranks) + first) % ranks + np.arange(channels)[:, None] * ranks
    return Phase(_step(order, chunk, action, node_size), ranks - 1, -1, ranks)


def _owned(
    ranks: int, node_size: int, channels: int, first: int, action: Action
) -> list[Phase] | list[Step]:
    """The same where chunks are numbered by their owners, then by channel."""
    order = _orders(ranks, node_size, channels)
    if channels == 1:
        return [_around(order, first, action, node_size)]
    check_size("ring", ranks)
    channel = np.arange(channels)[:, None]
    owners = (np.roll(order, time - first, axis=1) for time in range(ranks - 1))
    return [_step(order, owner * channels + channel, action, node_size) for owner in owners]
