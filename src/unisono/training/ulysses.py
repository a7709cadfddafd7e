"""Sequence parallelism: an all_to_all gives each rank some of the heads of the whole sequence, and
another one gives each rank all heads of its positions (Jacobs et al., DeepSpeed Ulysses, 2023).

Beside it a ring may cut the sequence further: heads first, context second (Gu et al., LoongTrain's
2D-Attention, 2024).
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from unisono.collectives.ragged import all_gather_integers
from unisono.comm.communicator import Communicator, Group
from unisono.training.attention import check_ring, check_shapes, ring_attention
from unisono.training.exchange import exchange_rows
from unisono.world.world import resolve


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Group = None,
    *,
    context: Group = None,
    causal: bool = False,
    scale: float | None = None,
    order: str = "contiguous",
    inner_size: int | None = None,
) -> torch.Tensor:
    """Attention of this rank's queries to all ranks' keys and values, with gradients.

    `query`, `key` and `value` have the shape (..., heads, positions, width). The ranks of `group`
    (None: the world) have consecutive positions in rank order, any number each, and all heads; a
    rank gets the result for its positions. In between it has `heads / size` heads of all positions,
    on which torch's scaled_dot_product_attention works with its fastest kernel. Cost: of the
    elements of query, key, value and result each rank sends (size - 1) / size once, in two calls,
    in backward again; by a ring it sends key and value size - 1 times. But there are no more ranks
    than heads.

    `context` is a group of ranks that differ in their positions, not in their heads: among them
    `ring_attention` works, with `order` and `inner_size` as there. With the two groups of
    `ProcessGroupManager(tp_size=2, cp_size=4)`, `manager.tp` and `context=manager.cp`, all_to_all
    stays between neighbours. `shard_positions` says which positions a rank has. None is no ring.

    `causal`, `scale`, heads that share a key head and backward are as in `ring_attention`. Raises
    ValueError where heads cannot be cut evenly or shapes do not fit, before anything moves.

    >>> value = torch.arange(2.0).reshape(2, 1, 1) + 10 * comm.rank  # two heads, one position each
    >>> unisono.training.ulysses_attention(torch.zeros(2, 1, 1), torch.zeros(2, 1, 1), value)
    tensor([[[5.]], [[6.]]])
    """
    comm = resolve(group)
    ring = None if context is None else resolve(context)
    call = "all_to_all"
    check_shapes(comm, call, query, key, value)
    if query.dim() < 3:
        comm.reject_call(call, "heads are needed: shapes are (..., heads, positions, width)")
    for name, heads in (("query", query.shape[-3]), ("key", key.shape[-3])):
        if heads % comm.size:
            comm.reject_call(
                call,
                f"{heads} {name} heads cannot be cut evenly over {comm.size} ranks: use fewer "
                "ranks here and more in a ring (context=), or repeat the heads of key and value",
            )
    if ring is None and (order != "contiguous" or inner_size is not None):
        comm.reject_call(call, "order and inner_size are for a ring: pass its ranks as context=")
    if ring is not None:
        check_ring(ring, order, inner_size)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    lengths = [query.shape[-2]]
    if comm.size > 1:
        rows = all_gather_integers(comm, (query.shape[-2],), query.device)
        lengths = [length for (length,) in rows]
        query, key, value = _to_heads(comm, lengths, query, key, value)
    if ring is None or ring.size == 1:
        share = query.shape[-3] != key.shape[-3]
        seen = scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=share
        )
    else:
        seen = ring_attention(
            query, key, value, ring, causal=causal, scale=scale, order=order, inner_size=inner_size
        )
    return seen if comm.size == 1 else _to_positions(comm, lengths, seen)


def _to_heads(comm: Communicator, lengths: list[int], *three: torch.Tensor) -> list[torch.Tensor]:
    """From all heads of our positions to our heads of all positions, in one all_to_all."""
    shapes = [(tensor.shape[-3] // comm.size, tensor.shape[-1]) for tensor in three]
    leaving = [  # (rank, position, ..., heads x width)
        torch.unflatten(tensor, -3, (comm.size, heads)).movedim((-4, -2), (0, 1)).flatten(-2)
        for tensor, (heads, _) in zip(three, shapes, strict=True)
    ]
    rows = torch.cat(leaving, -1).flatten(0, 1)
    arrived = exchange_rows(comm, rows, [lengths[comm.rank]] * comm.size, lengths)
    parts = arrived.split_with_sizes([heads * width for heads, width in shapes], -1)
    return [
        torch.unflatten(part, -1, shape).movedim(0, -2)
        for part, shape in zip(parts, shapes, strict=True)
    ]


def _to_positions(comm: Communicator, lengths: list[int], seen: torch.Tensor) -> torch.Tensor:
    """From our heads of all positions to all heads of our positions."""
    mine = lengths[comm.rank]
    rows = seen.movedim(-2, 0).contiguous()
    arrived = exchange_rows(comm, rows, lengths, [mine] * comm.size)
    by_rank = torch.unflatten(arrived, 0, (comm.size, mine))
    return by_rank.movedim((0, 1), (-4, -2)).flatten(-4, -3)
