"""Attention of the same queries, on every rank, to keys and values that are sharded over ranks.

What decoding needs: one new position attends to a long cache. Instead of keys and values, which a
ring sends around, only the parts of the softmax travel, in two all_reduces whatever the length of
the sequence (Shyam et al., "Tree Attention", 2024, arXiv 2408.04093).
"""

from __future__ import annotations

import torch

from unisono.comm.communicator import Communicator, Group
from unisono.math import widen
from unisono.training.attention import check_shapes, exp_less
from unisono.world.world import resolve

_CALL = "all_reduce"


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Group = None,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of one `query`, the same on every rank, to all ranks' keys and values; the same
    result on every rank. Without gradients.

    Every rank of `group` (None: the world) passes the same query, of one position or several, and
    the `key` and `value` of its own positions, any number or none. The shapes are (..., heads,
    positions, width); there may be more query heads than key heads, as in `ring_attention`. Every
    query sees every key. The ranks first find the largest score of each query, by an all_reduce;
    another one adds up what each has of the sum of exponentials and of the weighted values. Cost:
    (value width + 2) numbers for each query and head, however long the sequence is. All work is
    done in float32 at least. `scale` is 1 / sqrt(width) unless given.

    Raises ValueError on every rank if no rank has a key, or if the ranks' queries or scales differ;
    for shapes or dtypes that do not fit, and for inputs that require a gradient outside
    `torch.no_grad()`, ValueError on the rank that passed them and CollectiveMismatch on the others.

    >>> query = torch.zeros(1, 4)  # one position
    >>> key = torch.zeros(3, 4)  # three positions of six
    >>> value = torch.full((3, 4), float(comm.rank))
    >>> unisono.training.tree_attention(query, key, value)
    tensor([[0.5000, 0.5000, 0.5000, 0.5000]])
    """
    comm = resolve(group)
    share = check_shapes(comm, _CALL, query, key, value, same_positions=False)
    dtypes = [str(x.dtype).removeprefix("torch.") for x in (query, key, value)]
    if len({*dtypes}) > 1 or not query.dtype.is_floating_point:
        comm.reject_call(
            _CALL,
            "tree_attention takes query, key and value of one floating-point dtype, "
            f"not {', '.join(dtypes)}",
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        comm.reject_call(
            _CALL,
            "tree_attention has no gradients: call it under torch.no_grad(), or use ring_attention",
        )
    shape = (*query.shape[:-1], value.shape[-1])
    wide, keys, values = (widen(x) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if share > 1:
        wide, keys, values = (
            torch.unflatten(wide, -3, (-1, share)),
            keys.unsqueeze(-3),
            values.unsqueeze(-3),
        )
    scores = wide @ keys.mT * scale
    top = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if key.shape[-2]:
        top = scores.amax(-1, keepdim=True)
    top = _highest(comm, top, wide, scale, key.shape[-2])
    weights = exp_less(scores, top)
    sums = torch.cat([weights @ values, weights.sum(-1, keepdim=True)], -1)
    comm.all_reduce(sums)
    return (sums[..., :-1] / sums[..., -1:]).reshape(shape).to(query.dtype)


def _highest(
    comm: Communicator, top: torch.Tensor, query: torch.Tensor, scale: float, keys: int
) -> torch.Tensor:
    """The ranks' largest scores. The same message compares what must not differ: the largest of x
    and of -x over the ranks are opposite only if x is the same on all."""
    ends = query.aminmax() if query.numel() else (query.new_zeros(()),) * 2
    same = torch.stack([*ends, query.new_tensor(scale)]).nan_to_num()
    packed = torch.cat([top.flatten(), same, -same, query.new_tensor([keys])])
    comm.all_reduce(packed, "max")
    tops, highest, lowest, most = packed.split_with_sizes([top.numel(), len(same), len(same), 1])
    if not torch.equal(highest, -lowest):
        raise ValueError(
            f"the ranks of group {comm.name} call tree_attention with different queries or scales: "
            "every rank passes the same query; if each has queries of its own, use ring_attention"
        )
    if not most:
        raise ValueError(f"no rank of group {comm.name} passed a key to tree_attention")
    return tops.view_as(top)
