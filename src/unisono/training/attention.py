"""Attention over a sequence that is cut over the ranks of a group, by a ring or a double ring.

Softmaxes of parts of the keys are combined by their maxima and sums, which is exact (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). Queries, keys and values have the
shape (..., heads, positions, width); all work is done in float32 at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from unisono.collectives.ragged import all_gather_integers
from unisono.comm.communicator import Communicator, Group
from unisono.comm.work import Message, Work
from unisono.errors import name_number
from unisono.math import widen
from unisono.training.sequence import ORDERS, spans_of, unknown_order, visible
from unisono.world.world import resolve

_KEYS, _SLOPES, _OUTER_KEYS, _OUTER_SLOPES = range(4)
"""Tags: what goes round in backward are keys and values, and their gradients behind them."""


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Group = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    order: str = "contiguous",
    inner_size: int | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to all ranks' keys and values, with gradients.

    A rank of `group` (None: the world) has `query`, `key` and `value` of its own positions, and
    gets the result for them. In contiguous `order` the sequence is cut in rank order, into shards
    of any lengths; in "zigzag" order as `shard_positions` says. Keys and values go round in a ring
    (Liu, Zaharia and Abbeel, 2023): in each of `size` steps a rank works on the block that it has
    while it sends it on and receives the next. Cost: each rank sends keys and values `size - 1`
    times; in backward again, and their gradients `size` times.

    `causal` hides later positions; what is hidden whole is passed on and not computed. In
    contiguous order the last rank then computes `size` blocks and rank 0 one; in zigzag order each
    rank computes half of every block.

    `inner_size` makes two rings of one (Gu et al., LoongTrain, 2024): ranks 0 to `inner_size - 1`
    and so on, such as those of one host, form inner rings. A block goes round an inner ring while a
    copy is on its way to the next one, so that a slow link between them has `inner_size` steps of
    computing to hide behind, instead of one. Backward sends the gradients `size / inner_size` times
    more.

    There may be more query heads than key heads, in groups of consecutive heads that share one
    (Ainslie et al., GQA, 2023). `scale` is 1 / sqrt(width) unless given. Backward is collective, as
    in `unisono.differentiable`: all ranks' inputs want gradients, or none. Raises ValueError for
    shapes and options that do not fit, or that differ from rank to rank.

    >>> query = key = torch.zeros(3, 4)  # three positions of six
    >>> value = torch.full((3, 4), float(comm.rank))
    >>> unisono.training.ring_attention(query, key, value)[0]
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    comm = resolve(group)
    share = check_shapes(comm, "all_gather", query, key, value)
    check_ring(comm, order, inner_size)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    options = _Options(causal, scale, order, inner_size or comm.size)
    if share == 1:
        return _Ring.apply(query, key, value, comm, options)  # type: ignore[no-any-return, no-untyped-call]
    query = torch.unflatten(query, -3, (-1, share))
    result = _Ring.apply(query, key.unsqueeze(-3), value.unsqueeze(-3), comm, options)  # type: ignore[no-untyped-call]
    return result.flatten(-4, -3)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Options:
    causal: bool
    scale: float
    order: str
    inner_size: int


def check_shapes(
    comm: Communicator, operation: str, *three: torch.Tensor, same_positions: bool = True
) -> int:
    """How many query heads share a key head; shapes that do not fit are refused."""
    query, key, value = three
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in three)
    if min(tensor.dim() for tensor in three) < 2:
        comm.reject_call(operation, f"shapes {shapes} must end with positions and width")
    if same_positions and query.shape[-2] != key.shape[-2]:
        comm.reject_call(
            operation,
            f"this rank's query has {name_number(query.shape[-2], 'position')}, its key "
            f"{key.shape[-2]:,}: ring_attention and ulysses_attention take query, key and value of "
            "the same positions. If every rank has the same query, as in decoding, use "
            "unisono.training.tree_attention",
        )
    fits = query.shape[-1] == key.shape[-1] and key.shape[:-1] == value.shape[:-1]
    if fits and query.shape[:-2] == key.shape[:-2]:
        return 1
    fits = fits and query.dim() == key.dim() > 2 and query.shape[:-3] == key.shape[:-3]
    if not fits or key.shape[-3] == 0 or query.shape[-3] % key.shape[-3]:
        comm.reject_call(operation, f"query, key and value of shapes {shapes} do not fit together")
    return int(query.shape[-3] // key.shape[-3])


def check_ring(comm: Communicator, order: str, inner_size: int | None) -> None:
    """Refuse an unknown order and inner rings that are not equally large."""
    if order not in ORDERS:
        comm.reject_call("all_gather", unknown_order(order))
    if inner_size is not None and (inner_size < 1 or comm.size % inner_size):
        fits = ", ".join(str(n) for n in range(1, comm.size + 1) if comm.size % n == 0)
        comm.reject_call(
            "all_gather", f"inner_size {inner_size} does not divide {comm.size} ranks: use {fits}"
        )


def _gather_lengths(comm: Communicator, query: torch.Tensor, options: _Options) -> list[int]:
    """How many positions each rank has; raises ValueError on every rank where options differ."""
    mine = (int(options.causal), ORDERS.index(options.order), options.inner_size)
    everyone = all_gather_integers(comm, (query.shape[-2], *mine), query.device)
    for rank, (_, causal, order, inner_size) in enumerate(everyone):
        if everyone[0][1:] != (causal, order, inner_size):
            theirs = f"causal={bool(causal)}, order={ORDERS[order]!r}, inner_size={inner_size}"
            raise ValueError(
                f"rank {rank} of group {comm.name} calls ring_attention with {theirs}, rank 0 with "
                "other options: pass the same on every rank"
            )
    return [length for length, *_ in everyone]


def exp_less(scores: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """exp(scores - top), where minus infinity less itself is minus infinity: nothing has no
    weight. What is not a number stays so."""
    return (scores - top.masked_fill(top == -torch.inf, 0)).exp()


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, is_cut: bool) -> torch.Tensor:
    scores = query @ key.mT * scale
    if is_cut:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(later, -torch.inf)
    return scores


class _Lane:
    """One tensor that goes round a ring: what we have is sent on while the next one comes."""

    def __init__(self, comm: Communicator, peers: tuple[int, int], lengths: list[int], tag: int):
        self._comm, self._lengths, self._tag = comm, lengths, tag
        self._next, self._prev = peers
        self._works: list[Work] = []

    def pass_on(self, mine: torch.Tensor, next_source: int) -> torch.Tensor:
        """Start sending `mine`; after `wait`, the result holds what the previous rank sent."""
        if self._next == self._comm.rank:
            return mine
        coming = mine.new_empty([*mine.shape[:-2], self._lengths[next_source], mine.shape[-1]])
        send = Message("send", mine, self._next, self._tag)
        recv = Message("recv", coming, self._prev, self._tag)
        self._works = self._comm.batch_isend_irecv([send, recv])
        return coming

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class _Rings:
    """Where this rank stands in its inner ring and in the outer one, which joins ranks with the
    same place in theirs. In turn t, step s it has the block of `source(t, s)`."""

    def __init__(self, comm: Communicator, lengths: list[int], inner_size: int) -> None:
        self.comm, self.lengths = comm, lengths
        self.steps, self.turns = inner_size, comm.size // inner_size
        self._ring, self._place = divmod(comm.rank, inner_size)

    def source(self, turn: int, step: int) -> int:
        ring, place = (self._ring - turn) % self.turns, (self._place - step) % self.steps
        return ring * self.steps + place

    def inner_lane(self, tag: int) -> _Lane:
        return _Lane(self.comm, (self.source(0, -1), self.source(0, 1)), self.lengths, tag)

    def outer_lane(self, tag: int) -> _Lane:
        return _Lane(self.comm, (self.source(-1, 0), self.source(1, 0)), self.lengths, tag)

    def blocks(self, mine: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Turn, step and the current block; the next ones arrive while the caller works on it."""
        inner, outer = self.inner_lane(_KEYS), self.outer_lane(_OUTER_KEYS)
        first = mine
        for turn in range(self.turns):
            block = first
            if turn < self.turns - 1:
                first = outer.pass_on(block, self.source(turn + 1, 0))
            for step in range(self.steps):
                coming = block
                if step < self.steps - 1:
                    coming = inner.pass_on(block, self.source(turn, step + 1))
                yield turn, step, block
                inner.wait()
                block = coming
            outer.wait()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        comm: Communicator,
        options: _Options,
    ) -> torch.Tensor:
        lengths = _gather_lengths(comm, query, options)
        spans = spans_of(comm, lengths, options.order)
        rings = _Rings(comm, lengths, options.inner_size)
        wide = widen(query)
        top = wide.new_full((*query.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(top)
        result = wide.new_zeros(*query.shape[:-1], value.shape[-1])
        both = torch.cat([key, value], dim=-1).contiguous()  # one message instead of two
        for turn, step, block in rings.blocks(both):
            source = rings.source(turn, step)
            keys, values = widen(block).split_with_sizes([key.shape[-1], value.shape[-1]], -1)
            pairs = visible(spans[comm.rank], spans[source], options.causal)
            for here, there, is_cut in pairs:
                scores = _scores(wide[here], keys[there], options.scale, is_cut)
                highest = torch.maximum(top[here], scores.amax(-1, keepdim=True))
                old, weights = exp_less(top[here], highest), exp_less(scores, highest)
                total[here].mul_(old).add_(weights.sum(-1, keepdim=True))
                result[here].mul_(old).add_(weights @ values[there])
                top[here] = highest
        result /= total
        ctx.save_for_backward(query, key, value, result, top + total.log())
        ctx.options, ctx.rings, ctx.spans = options, rings, spans
        return result.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, result, log_sum = ctx.saved_tensors
        options: _Options = ctx.options
        rings: _Rings = ctx.rings
        wide, slope = widen(query), widen(gradient)
        widths = [key.shape[-1], value.shape[-1]]
        own = (slope * result).sum(-1, keepdim=True)
        query_slope = torch.zeros_like(wide)
        both = torch.cat([key, value], dim=-1).contiguous()
        # The slopes of the current block: those of the inner ring's ranks before us, and in the
        # outer ring, of the inner rings before ours.
        slopes = ring_slopes = both
        inner, outer = rings.inner_lane(_SLOPES), rings.outer_lane(_OUTER_SLOPES)
        for turn, step, block in rings.blocks(both):
            source = rings.source(turn, step)
            keys, values = widen(block).split_with_sizes(widths, -1)
            ours = torch.zeros_like(widen(block))
            key_slope, value_slope = ours.split_with_sizes(widths, -1)
            pairs = visible(ctx.spans[rings.comm.rank], ctx.spans[source], options.causal)
            for here, there, is_cut in pairs:
                scores = _scores(wide[here], keys[there], options.scale, is_cut)
                weights = (scores - log_sum[here]).exp()
                inner_slope = weights * (slope[here] @ values[there].mT - own[here]) * options.scale
                query_slope[here] += inner_slope @ keys[there]
                # Heads that share a key head add up.
                shape = keys[there].shape[:-1]
                key_slope[there] += (inner_slope.mT @ wide[here]).sum_to_size(*shape, widths[0])
                value_slope[there] += (weights.mT @ slope[here]).sum_to_size(*shape, widths[1])
            inner.wait()  # what the ranks before us found came while we computed
            slopes = ours if step == 0 else slopes.add_(ours)
            slopes = inner.pass_on(slopes, rings.source(turn, step + 1))
            if step == rings.steps - 1:
                inner.wait()
                outer.wait()
                ring_slopes = slopes if turn == 0 else ring_slopes.add_(slopes)
                ring_slopes = outer.pass_on(ring_slopes, rings.source(turn + 1, 0))
        outer.wait()
        three = (query_slope, *ring_slopes.split_with_sizes(widths, -1))
        given = (query, key, value)
        return *(one.to(x.dtype) for one, x in zip(three, given, strict=True)), None, None
