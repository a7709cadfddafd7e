"""Reducing, gathering and broadcasting one tensor, for training loops; one process is enough."""

from __future__ import annotations

from typing import Any

from unisono.collectives import primitives


def reduce_tensor(tensor: Any, op: Any = "mean", group: Any = None) -> Any:
    """`tensor` combined over all ranks, on every rank; the input stays as it is."""
    return primitives.all_reduce(primitives.copy_of(tensor), op, group)


def gather_tensor(tensor: Any, dst: int = 0, group: Any = None) -> Any:
    """A list of every rank's tensor on rank `dst`, None elsewhere. Shapes may differ."""
    return primitives.gather(tensor, dst, group)


def broadcast_tensor(tensor: Any, src: int = 0, group: Any = None) -> Any:
    """Copy rank `src`'s tensor to every rank, in place, and return it."""
    return primitives.broadcast(tensor, src, group)
