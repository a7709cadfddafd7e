"""Give a newcomer the training state of a rank that has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unisono.collectives.objects import all_gather_object, broadcast_object
from unisono.comm.communicator import Group
from unisono.errors import name_ranks
from unisono.training.sharded import ShardedOptimizer
from unisono.world.world import resolve

_TENSOR = "\0tensor"


def catch_up(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | ShardedOptimizer | None = None,
    *,
    step: int = 0,
    group: Group = None,
) -> int:
    """Give every rank of `group` (None: the world) the state of the rank with the highest step:
    parameters and buffers of the `model`, in place, and the state of the `optimizer`. `step` is
    this rank's step, 0 on a newcomer; returns the step that all ranks have now. If several ranks
    have it, the first one sends. A rank changes nothing before it has received everything: if a
    rank dies meanwhile, every other rank has the old state or the new one, never a mix.

    Raises ValueError on every rank if the models differ; TypeError for a ShardedOptimizer, because
    no other rank has a dead rank's part of its state. Cost: a broadcast of the whole state.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> unisono.training.catch_up(model, optimizer, step=7 if comm.rank == 1 else 0)
    7
    """
    if isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            "catch_up: the state of a ShardedOptimizer is sharded, and a dead rank's part is "
            "lost: load a checkpoint instead, the list of all ranks' states"
        )
    comm = resolve(group)
    steps = all_gather_object(step, comm)
    source = steps.index(max(steps))
    mine = [model.state_dict(), optimizer.state_dict() if optimizer and comm.rank == source else {}]
    outline = _replace(mine, torch.is_tensor, _outline)
    outlines = broadcast_object(outline, source, comm)
    alike = all_gather_object(outlines[0] == outline[0], comm)
    if not all(alike):
        other = [rank for rank, is_alike in enumerate(alike) if not is_alike]
        raise ValueError(f"the models of {name_ranks(other)} differ from that of rank {source}")
    state = mine if comm.rank == source else _replace(outlines, _is_outline, _empty)
    tensors: list[torch.Tensor] = []
    _replace(state, torch.is_tensor, tensors.append)
    for kind in sorted({tensor.device.type for tensor in tensors}):
        comm.broadcast([tensor for tensor in tensors if tensor.device.type == kind], source)
    comm.barrier()  # a rank that gets here has everything; the others keep their old state
    if comm.rank != source:
        model.load_state_dict(state[0])
        if optimizer:
            optimizer.load_state_dict(state[1])
    return max(steps)


def _replace(state: Any, is_leaf: Callable[[Any], bool], change: Callable[[Any], Any]) -> Any:
    """The state, with each leaf replaced by `change(leaf)`."""
    if is_leaf(state):
        return change(state)
    if isinstance(state, dict):
        return {key: _replace(value, is_leaf, change) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_replace(value, is_leaf, change) for value in state)
    return state


def _outline(tensor: torch.Tensor) -> list[Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [_TENSOR, dtype, list(tensor.shape), tensor.device.type]


def _is_outline(state: Any) -> bool:
    return isinstance(state, list) and state[:1] == [_TENSOR]


def _empty(outline: list[Any]) -> torch.Tensor:
    _, dtype, shape, device = outline
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
