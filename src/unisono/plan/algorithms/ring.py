"""Rings: every rank talks only to its two neighbours.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
The tensor is cut into n chunks. In reduce_scatter partial sums travel around the ring and arrive at
their owners complete; in all_gather the owners' chunks travel around the ring.

One ring leaves a node through one network card. `channels` rings run at once, as in NCCL, each with
its share of the tensor. Each enters and leaves the nodes at its own ranks: with a channel for each
card, all cards are busy. If the number of ranks per node is a power of two, each channel visits
them in its own order. Every second node is visited backwards, so that a message stays on its rail:
what leaves through card j arrives through card j (except for one hop if m is odd).

| collective     | steps    | a rank sends    | a card sends, k channels on k cards, m nodes |
|----------------|----------|-----------------|----------------------------------------------|
| reduce_scatter | n - 1    | (n - 1) / n     | (n - 1) / (n k)                              |
| all_gather     | n - 1    | (n - 1) / n     | (n - 1) / (n k)                              |
| all_reduce     | 2(n - 1) | 2(n - 1) / n    | 2(n - 1) / (n k)                             |
"""

import numpy as np
from numpy.typing import NDArray

from unisono.plan.catalog import algorithm, check_nodes
from unisono.plan.schedule import Action, Phase, Schedule, Step

MOST_RANKS_IN_CHANNELS = 1024
"""The most ranks for several channels where their steps do not repeat regularly."""

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
    """The ranks of each channel, in the order of its ring."""
    if channels < 1:
        raise ValueError(f"channels must be at least 1, not {channels}")
    position = np.arange(ranks)
    if channels == 1:
        return position[None, :]
    check_nodes("channels need", ranks, node_size)
    node, passed = np.divmod(position, node_size)
    first = (np.arange(channels) * node_size // channels)[:, None]
    # Odd strides visit all ranks of such a node, and end at as many ranks as they begin at.
    stride = 2 * first + 1 if node_size.bit_count() == 1 else 1
    last = first - stride
    local = np.where(node % 2 == 0, first + passed * stride, last - passed * stride) % node_size
    order: Ranks = node * node_size + local
    return order


def check_size(name: str, ranks: int) -> None:
    if ranks > MOST_RANKS_IN_CHANNELS:
        most = f"{MOST_RANKS_IN_CHANNELS:,} ranks"
        raise ValueError(f"{name} with channels has too large a schedule beyond {most}")


def far_first(step: Step, node_size: int) -> Step:
    """The same step with the transfers that leave a node first, because they take longest."""
    stays = step.source // node_size == step.destination // node_size
    listed = np.argsort(stays, kind="stable")
    columns = (step.source, step.destination, step.chunk, step.reduces, step.count)
    return Step.of(*(column[listed] for column in columns))


def _step(order: Ranks, chunk: Ranks, action: Action, node_size: int) -> Step:
    """The source and destination of each transfer: every rank of every ring sends to the next."""
    to = np.roll(order, -1, axis=1)
    step = Step.of(order.ravel(), to.ravel(), chunk.ravel(), action)
    return step if len(order) == 1 else far_first(step, node_size)


def _around(order: Ranks, first: int, action: Action, node_size: int) -> Phase:
    """Each rank sends the chunk of the rank `first` places further on, then what it received last.
    Chunks are numbered by channel, then by position, so that steps repeat."""
    channels, ranks = order.shape
    chunk = (np.arange(ranks) + first) % ranks + np.arange(channels)[:, None] * ranks
    return Phase(_step(order, chunk, action, node_size), ranks - 1, -1, ranks)


def _owned(
    ranks: int, node_size: int, channels: int, first: int, action: Action
) -> list[Phase] | list[Step]:
    """The same with chunks numbered by owner, then by channel."""
    order = _orders(ranks, node_size, channels)
    if channels == 1:
        return [_around(order, first, action, node_size)]
    check_size("ring", ranks)
    channel = np.arange(channels)[:, None]
    owners = (np.roll(order, time - first, axis=1) for time in range(ranks - 1))
    return [_step(order, owner * channels + channel, action, node_size) for owner in owners]
