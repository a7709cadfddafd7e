"""Gradients in buckets: which travel together, in what form, and which ranks had none.

A bucket that is kept from step to step is a flat tensor, and the gradients become views of it as
they arrive: the memory in which backward made one is free for the next, which costs less than new
pages for all of them. One that is used once is, on unisono, a list of the gradients where they lie:
one call reduces them all, and nothing is copied but gradients in memory that is in use elsewhere.

Behind its gradients every bucket carries a number for each parameter: 1 from a rank that has no
gradient for it. So all ranks learn at the same moment what was missing where, and none waits for
one that has nothing to send.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from unisono.collectives.objects import all_gather_object
from unisono.collectives.refusals import refuse_type
from unisono.comm.base import Communicator, Work
from unisono.comm.work import FinishedWork
from unisono.errors import UnisonoError
from unisono.training.memory import shares_storage

Parameters: TypeAlias = (
    torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
)

HALVES = (torch.float16, torch.bfloat16)
_SCALED_BEFORE = (torch.float32, torch.float64)
UNUSED = ("error", "zero")
_OPS = {"mean": "avg", "avg": "avg", "sum": "sum"}


class Slot(NamedTuple):  # in a hurry to be made: models have many parameters
    """A parameter, its place in the model and its name."""

    number: int
    name: str
    parameter: torch.Tensor


@dataclass(frozen=True)
class Missing:
    """A parameter that had no gradient on so many ranks, and whether this is one of them."""

    slot: Slot
    ranks: int
    here: bool


def slots_of(parameters: Parameters) -> list[Slot]:
    """The parameters that want gradients, each once, in the model's order."""
    given: Iterable[Any]
    given = parameters.named_parameters() if isinstance(parameters, torch.nn.Module) else parameters
    named = [
        one if isinstance(one, tuple) else (f"parameter {number}", one)
        for number, one in enumerate(given)
    ]
    once = {id(parameter): (name, parameter) for name, parameter in reversed(named)}
    wanted = [one for one in reversed(once.values()) if one[1].requires_grad]
    return [Slot(number, name, parameter) for number, (name, parameter) in enumerate(wanted)]


def check_the_same_everywhere(comm: Communicator, slots: Sequence[Slot], options: str = "") -> None:
    """Raise ValueError on every rank if the ranks' options differ, or their parameters in name,
    dtype or shape."""
    mine = [
        f"{slot.name} of {str(slot.parameter.dtype).removeprefix('torch.')} "
        f"{tuple(slot.parameter.shape)}"
        for slot in slots
    ]
    digest = hashlib.sha256("\n".join([options, *mine]).encode()).digest()
    if len(set(all_gather_object(digest, comm))) == 1:
        return
    for rank, theirs in enumerate(said := all_gather_object(options, comm)):
        if theirs != said[0]:
            raise ValueError(f"rank 0 has {said[0]}, and rank {rank} {theirs}")
    everyone = all_gather_object(mine, comm)
    for rank, theirs in enumerate(everyone):
        for place in range(max(len(theirs), len(everyone[0]))):
            first, other = (
                one[place] if place < len(one) else "no more" for one in (everyone[0], theirs)
            )
            if first != other:
                raise ValueError(
                    f"the ranks' parameters differ: number {place} is {first} on rank 0, "
                    f"{other} on rank {rank}"
                )


class Bucket:
    """Gradients of one dtype and device that are reduced together; `kept`: in many steps."""

    def __init__(
        self, slots: Sequence[Slot], comm: Communicator, op: str, kept: bool, wide: bool
    ) -> None:
        first = slots[0].parameter
        self.slots = slots
        self.wide = wide and first.dtype in HALVES
        self.dtype = torch.float32 if self.wide else first.dtype
        elements = sum(slot.parameter.numel() for slot in slots)
        self.nbytes = elements * self.dtype.itemsize
        self.waiting_for = len(slots)
        self.arrived = [False] * len(slots)
        self.begun = False
        self._comm, self._op = comm, op
        self._views: list[torch.Tensor] = []
        self._flat: torch.Tensor | None = None
        self._lacking: dict[int, torch.Tensor] = {}  # zeros in place of gradients
        self._summed: set[int] = set()  # of a wide one: what was added to its sums
        self._copied: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # gradient, what travels
        extra = len(slots)
        if kept or comm.backend != "unisono":
            self._flat = torch.zeros(elements + extra, dtype=self.dtype, device=first.device)
            *views, self._absent = torch.split(
                self._flat, [slot.parameter.numel() for slot in slots] + [extra]
            )
            self._views = [
                view.view(slot.parameter.shape) for view, slot in zip(views, slots, strict=True)
            ]
        else:
            self._absent = torch.zeros(extra, dtype=self.dtype, device=first.device)
        # What DDP does, too: a sum of scaled gradients needs no pass over the result.
        self._scales_before = (
            op == "avg"
            and self._flat is not None
            and comm.backend != "unisono"
            and self.dtype in _SCALED_BEFORE
        )

    def take(self, place: int) -> None:
        """A gradient is there: move it in, or add it to the sum in float32, and drop it."""
        if not self.wide:
            self._row(place)
            return
        gradient = self._gradient(place)
        assert gradient is not None
        self._views[place].add_(gradient)
        self._summed.add(place)
        self.slots[place].parameter.grad = None

    @torch.no_grad()
    def take_over(self, others: Iterable[Bucket]) -> None:
        """Move in the gradients that are views of other buckets, which are not used any more."""
        theirs = {id(view) for other in others for view in other._views}
        for slot, view in zip(self.slots, self._views, strict=True):
            gradient = slot.parameter.grad
            if gradient is not None and id(gradient) in theirs:
                slot.parameter.grad = view.copy_(gradient)

    def begin(self) -> Work:
        """Start reducing. A parameter without a gradient counts as zero, and is marked."""
        self.begun = True
        self._absent.zero_()
        rows = [self._row(place) for place in range(len(self.slots))]
        if self._flat is None:
            return self._begin([*rows, self._absent], self._op)
        if self._scales_before:
            self._flat[: -len(self.slots)].mul_(1 / self._comm.size)
            return self._begin(self._flat, "sum")
        return self._begin(self._flat, self._op)

    def _row(self, place: int) -> torch.Tensor:
        """What travels for one parameter."""
        if place in self._summed:
            return self._views[place]
        parameter = self.slots[place].parameter
        if self._views and parameter.grad is self._views[place]:
            return self._views[place]
        gradient = self._gradient(place)
        if gradient is None:
            self._absent[place] = 1
            zeros = self._views[place].zero_() if self._views else torch.zeros_like(parameter)
            self._lacking[place] = zeros
            return zeros
        if not self._views:
            if not shares_storage(gradient):
                return gradient
            copy = gradient.clone()  # torch leaves views of what backward still needs
            self._copied[place] = gradient, copy
            return copy
        view = self._views[place]
        if gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
            view.copy_(gradient)
            if shares_storage(gradient):  # it stays, for whoever looks at it there
                self._copied[place] = gradient, view
            else:
                parameter.grad = None if self.wide else view
        return view

    def _begin(self, travelling: torch.Tensor | list[torch.Tensor], op: str) -> Work:
        return self._comm.all_reduce(travelling, op, async_op=True) or FinishedWork()

    def _gradient(self, place: int) -> torch.Tensor | None:
        """The gradient; raises TypeError, here and on the other ranks, if it has no plain
        memory."""
        slot = self.slots[place]
        gradient = slot.parameter.grad
        if gradient is None:
            return None
        if gradient.layout is not torch.strided:
            kind = str(gradient.layout).removeprefix("torch.")
            why = f"the gradient of {slot.name} is {kind}, and only dense ones are reduced"
            refuse_type(self._comm, "all_reduce", f"{why}: use sparse=False")
        return gradient.detach() if gradient.requires_grad else gradient

    def end(self) -> list[Missing]:
        """After the work has finished: give the parameters their gradients. Returns which were
        missing, and on how many ranks. Where every rank lacked one, the parameter has none."""
        without = self._ranks_without() if bool(self._absent.any()) else {}
        nobody = {place for place, ranks in without.items() if ranks == self._comm.size}
        for place, slot in enumerate(self.slots) if self.wide else ():
            if place not in nobody:
                slot.parameter.grad = self._views[place].to(slot.parameter.dtype)
        for place, zeros in self._lacking.items() if not self.wide else ():
            if place not in nobody:
                self.slots[place].parameter.grad = zeros
        for gradient, copy in self._copied.values():
            gradient.copy_(copy)
        missing = [
            Missing(self.slots[place], ranks, place in self._lacking)
            for place, ranks in without.items()
        ]
        self._start_over()
        return missing

    def _ranks_without(self) -> dict[int, int]:
        is_share = self._op == "avg" and not self._scales_before
        scale = self._comm.size if is_share else 1
        counts = [round(abs(number) * scale) for number in self._absent.tolist()]
        return {place: ranks for place, ranks in enumerate(counts) if ranks}

    def _start_over(self) -> None:
        self._lacking = {}
        self._copied = {}
        self._summed.clear()
        self.begun = False
        self.waiting_for = len(self.slots)
        self.arrived = [False] * len(self.slots)
        if self.wide and self._flat is not None:
            self._flat.zero_()

    def forget(self) -> None:
        """Drop what this bucket's parameters have, reduced or not."""
        for slot in self.slots:
            slot.parameter.grad = None
        self._start_over()


def buckets_of(
    slots: Sequence[Slot],
    comm: Communicator,
    bucket_bytes: int,
    op: str,
    *,
    kept: bool,
    wide: bool = False,
) -> list[Bucket]:
    """These parameters, in this order, cut into buckets of about so many bytes; each holds one
    dtype on one device. They stand in the order in which they become full."""
    filling: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    full: list[list[int]] = []
    for place, slot in enumerate(slots):
        kind = (slot.parameter.dtype, slot.parameter.device)
        size = slot.parameter.numel() * slot.parameter.dtype.itemsize
        if kind in filling and sizes[kind] + size > bucket_bytes:
            full.append(filling.pop(kind))
        if kind not in filling:
            filling[kind], sizes[kind] = [], 0
        filling[kind].append(place)
        sizes[kind] += size
    full = sorted([*full, *filling.values()], key=lambda places: places[-1])
    return [Bucket([slots[place] for place in places], comm, op, kept, wide) for places in full]


def check_used(missing: Iterable[Missing], comm: Communicator) -> None:
    """Raise UnisonoError if anybody lacked a gradient: on every rank, for all know it."""
    named = [
        f"{one.slot.name} (on {one.ranks} of {comm.size} ranks{', this one too' * one.here})"
        for one in sorted(missing, key=lambda one: one.slot.number)
    ]
    if named:
        raise UnisonoError(
            f"no gradient for {', '.join(named)}: the loss does not depend on it there. Freeze "
            'it, or pass unused="zero"'
        )


def check_options(bucket_bytes: int, unused: str, op: str) -> str:
    """The Communicator's name of `op`. Raises ValueError for what nobody knows."""
    if unused not in UNUSED:
        raise ValueError(f"unused is {unused!r}: use {' or '.join(map(repr, UNUSED))}")
    if bucket_bytes < 1:
        raise ValueError(f"a bucket of {bucket_bytes} bytes holds nothing")
    if op not in _OPS:
        raise ValueError(f"gradients are combined by 'mean' or 'sum', not by {op!r}")
    return _OPS[op]
