"""Engines whose tensors are the trainer's memory (`alias=True`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from unisono.torch_autograd import outlasting_inference_mode
from unisono.training.memory import shares_storage
from unisono.training.weights.shards import HeldTensor
from unisono.training.weights.staging import Step, do_all_or_none


def serve_there(
    mine: Mapping[str, HeldTensor], views: Mapping[str, torch.Tensor], then: Step
) -> None:
    """Let an engine's tensors be the trainer's memory from now on, and do `then`: all or none."""
    steps: list[Step] = []
    returns: list[Step] = []
    with outlasting_inference_mode():
        for name, own in _to_be_moved(mine, views):
            steps.append(partial(setattr, own, "data", views[name]))
            returns.append(partial(setattr, own, "data", own.data))
    do_all_or_none([*steps, then], returns)


def check_can_alias(
    mine: Mapping[str, HeldTensor], views: Mapping[str, torch.Tensor], served: Mapping[str, int]
) -> None:
    """ValueError for tensors whose memory cannot be exchanged. `served` are the addresses of those
    that are a trainer's already, by name: all of its shared tensors are one storage."""
    for name, own in _to_be_moved(mine, views):
        was_put_there = own.device.type == "cpu" and served.get(name) == own.data_ptr()
        if own.is_inference() or (shares_storage(own) and not was_put_there):
            why = "made in inference mode" if own.is_inference() else "seen by other tensors, too"
            raise ValueError(
                f"alias=True: the memory of {name!r} cannot be exchanged for the trainer's, for it "
                f"is {why}"
            )


def _to_be_moved(
    mine: Mapping[str, HeldTensor], views: Mapping[str, torch.Tensor]
) -> Sequence[tuple[str, torch.Tensor]]:
    moved = {}
    for name, view in views.items():
        own = mine[name].tensor
        if own.data_ptr() != view.data_ptr() or own.stride() != view.stride():
            moved[id(own)] = name, own  # tied names may be one tensor
    return list(moved.values())
