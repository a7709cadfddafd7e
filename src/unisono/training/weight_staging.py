"""Where an engine receives new weights, and how they take the place of the old ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from unisono.training.memory import shares_storage
from unisono.training.weight_plan import Plan
from unisono.training.weight_shards import Held, tied


class Staging:
    """A second copy of an engine's weights. After a change-over the old memory is the next one's:
    to take 2 GB from the system anew costs as much as to fill them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """By name; names that are tied share one."""
        self._firsts: Mapping[str, str] = {}  # which one

    def prepare(self, plan: Plan, mine: Mapping[str, Held] | None, device: torch.device) -> None:
        """Have a tensor for every name that will come."""
        spare, self.tensors = self.tensors, {}
        if mine is None:
            for name, one in plan.tensors.items():
                if one.first == name:
                    self.tensors[name] = torch.empty(one.whole, dtype=one.dtype, device=device)
            self._name_twins({name: one.first for name, one in plan.tensors.items()})
            return
        firsts = tied(mine)
        for name, held in mine.items():
            old = spare.pop(name, None)
            if firsts[name] != name:
                continue
            if old is None or not _is_like(old, held.tensor, device) or not is_alone(old):
                old = torch.empty_like(held.tensor.detach(), device=device)
            self.tensors[name] = old
        self._name_twins(firsts)

    def _name_twins(self, firsts: Mapping[str, str]) -> None:
        self._firsts = firsts
        self.tensors = {name: self.tensors[first] for name, first in firsts.items()}

    def hand_over(self) -> dict[str, torch.Tensor]:
        """Give the tensors to a commit, which may keep them."""
        tensors, self.tensors = self.tensors, {}
        return tensors

    @torch.no_grad()
    def swap(self, mine: Mapping[str, Held]) -> None:
        """Put the new weights into the engine's tensors, and keep the old memory."""
        for name in set(self._firsts.values()):
            own, new = mine[name].tensor, self.tensors[name]
            if own.device == new.device and is_alone(own):
                self.tensors[name] = own.data
                own.data = new
            else:  # somebody looks at this memory by another name: it must change there, too
                own.detach().copy_(new)
        self._name_twins(self._firsts)


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor, nor another process, looks at this one's memory."""
    if tensor.device.type == "cpu" and tensor.untyped_storage().is_shared():
        return False
    return not shares_storage(tensor)


def _is_like(old: torch.Tensor, own: torch.Tensor, device: torch.device) -> bool:
    return (old.shape, old.dtype, old.device.type) == (own.shape, own.dtype, device.type)
