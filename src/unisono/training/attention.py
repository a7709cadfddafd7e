"""Attention over a sequence that is cut over the ranks of a group, by a ring.

Softmaxes of parts of the keys are combined by their maxima and sums, which is exact (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). Queries, keys and values have the
shape (..., positions, width); all work is done in float32 at least.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from unisono.collectives.ragged import all_gather_integers
from unisono.comm.communicator import Communicator, Group
from unisono.comm.work import Message, Work
from unisono.math import widen
from unisono.world.world import resolve

_KEYS, _SLOPES = 0, 1
"""Tags: what goes round in backward are keys and values, and their gradients behind them."""


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Group = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to all ranks' keys and values, with gradients.

    The sequence is cut in rank order, into shards of any lengths; a rank of `group` (None: the
    world) has `query`, `key` and `value` of its own positions, and gets the result for them. Keys
    and values go round in a ring (Liu, Zaharia and Abbeel, 2023): in each of `size` steps a rank
    works on the block that it has while it sends it on and receives the next. Each rank sends its
    keys and values `size - 1` times; in backward again, and their gradients `size` times.

    `causal` hides later positions; blocks that are hidden whole are passed on and not computed.
    `scale` is 1 / sqrt(width) unless given. Backward is collective, as in `unisono.differentiable`:
    all ranks' inputs want gradients, or none. Raises ValueError for shapes that do not fit.

    >>> query = key = torch.zeros(3, 4)  # three positions of six
    >>> value = torch.full((3, 4), float(comm.rank))
    >>> unisono.training.ring_attention(query, key, value)[0]
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    comm = resolve(group)
    width = _width(comm, query, key, value)
    if query.shape[-2] != key.shape[-2]:
        comm.reject_call(
            "all_gather", f"{query.shape[-2]} queries and {key.shape[-2]} keys on one rank"
        )
    scale = width**-0.5 if scale is None else scale
    return _Ring.apply(query, key, value, comm, causal, scale)  # type: ignore[no-any-return, no-untyped-call]


def _width(comm: Communicator, *three: torch.Tensor) -> int:
    query, key, value = three
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in three)
    if min(tensor.dim() for tensor in three) < 2:
        comm.reject_call("all_gather", f"shapes {shapes}: positions and width are needed")
    fits = query.shape[-1] == key.shape[-1] and key.shape[:-1] == value.shape[:-1]
    if not fits or query.shape[:-2] != key.shape[:-2]:
        comm.reject_call("all_gather", f"query, key and value of shapes {shapes} do not fit")
    return int(query.shape[-1])


def _exp(scores: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """exp(scores - top), where minus infinity less itself is minus infinity: nothing has no
    weight. What is not a number stays so."""
    return (scores - top.masked_fill(top == -torch.inf, 0)).exp()


def _summary(scores: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Of each row its maximum, the sum of exp(score - maximum), and the values weighted so."""
    if scores.shape[-1] == 0:
        top = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    else:
        top = scores.amax(-1, keepdim=True)
    weights = _exp(scores, top)
    return [top, weights.sum(-1, keepdim=True), weights @ value]


class _Block:
    """Where a block of keys lies beside this rank's queries."""

    def __init__(self, lengths: list[int], rank: int, source: int, causal: bool) -> None:
        self.is_hidden = (causal and source > rank) or 0 in (lengths[rank], lengths[source])
        self._is_cut = causal and source == rank

    def scores(self, query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
        scores = query @ key.transpose(-1, -2) * scale
        if self._is_cut:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores.masked_fill_(later, -torch.inf)
        return scores


class _Carrier:
    """One tensor that goes round the ring: what we have is sent on while the next one comes."""

    def __init__(self, comm: Communicator, lengths: list[int], tag: int) -> None:
        self._comm, self._lengths, self._tag = comm, lengths, tag
        self._works: list[Work] = []

    def pass_on(self, mine: torch.Tensor, next_source: int) -> torch.Tensor:
        """Start sending `mine`; after `wait`, the result holds what the previous rank sent."""
        shape = [*mine.shape[:-2], self._lengths[next_source], mine.shape[-1]]
        coming = mine.new_empty(shape)
        if self._comm.size == 1:
            return mine
        self._works = self._comm.batch_isend_irecv(
            [
                Message("send", mine, self._comm.next, self._tag),
                Message("recv", coming, self._comm.prev, self._tag),
            ]
        )
        return coming

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        comm: Communicator,
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        lengths = [
            length for (length,) in all_gather_integers(comm, (query.shape[-2],), query.device)
        ]
        wide = widen(query)
        top = wide.new_full((*query.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(top)
        result = wide.new_zeros(*query.shape[:-1], value.shape[-1])
        both = torch.cat([key, value], dim=-1).contiguous()  # one message instead of two
        carrier = _Carrier(comm, lengths, _KEYS)
        for step in range(comm.size):
            source = (comm.rank - step) % comm.size
            is_last = step == comm.size - 1
            coming = both if is_last else carrier.pass_on(both, (source - 1) % comm.size)
            block = _Block(lengths, comm.rank, source, causal)
            if not block.is_hidden:
                keys, values = widen(both).split_with_sizes([key.shape[-1], value.shape[-1]], -1)
                found = _summary(block.scores(wide, keys, scale), values)
                highest = torch.maximum(top, found[0])
                old, new = _exp(top, highest), _exp(found[0], highest)
                total = total * old + found[1] * new
                result = result * old + found[2] * new
                top = highest
            carrier.wait()
            both = coming
        result = result / total
        ctx.save_for_backward(query, key, value, result, top + total.log())
        ctx.comm, ctx.causal, ctx.scale, ctx.lengths = comm, causal, scale, lengths
        return result.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value, result, log_sum = ctx.saved_tensors
        comm: Communicator = ctx.comm
        wide, slope = widen(query), widen(gradient)
        widths = [key.shape[-1], value.shape[-1]]
        own = (slope * result).sum(-1, keepdim=True)
        query_slope = torch.zeros_like(wide)
        both = torch.cat([key, value], dim=-1).contiguous()
        slopes: torch.Tensor | None = None  # of the block at hand, from the ranks before us
        keys_carrier = _Carrier(comm, ctx.lengths, _KEYS)
        slopes_carrier = _Carrier(comm, ctx.lengths, _SLOPES)
        for step in range(comm.size):
            source = (comm.rank - step) % comm.size
            is_last = step == comm.size - 1
            coming = both if is_last else keys_carrier.pass_on(both, (source - 1) % comm.size)
            block = _Block(ctx.lengths, comm.rank, source, ctx.causal)
            ours = torch.zeros_like(widen(both))
            if not block.is_hidden:
                keys, values = widen(both).split_with_sizes(widths, -1)
                weights = (block.scores(wide, keys, ctx.scale) - log_sum).exp()
                inner = weights * (slope @ values.transpose(-1, -2) - own) * ctx.scale
                query_slope += inner @ keys
                ours = torch.cat([inner.mT @ wide, weights.mT @ slope], dim=-1)
            slopes_carrier.wait()  # what the ranks before us found came while we computed
            slopes = ours if slopes is None else slopes.add_(ours)
            slopes = slopes_carrier.pass_on(slopes.contiguous(), (source - 1) % comm.size)
            keys_carrier.wait()
            both = coming
        slopes_carrier.wait()
        assert slopes is not None
        key_slope, value_slope = slopes.split_with_sizes(widths, -1)
        return (
            query_slope.to(query.dtype),
            key_slope.to(key.dtype),
            value_slope.to(value.dtype),
            None,
            None,
            None,
        )
