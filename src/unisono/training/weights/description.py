"""What each rank brings to an update, as the others are told, and how far it fits together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from unisono.collectives.encoding import torch_dtype
from unisono.comm.base import dtype_name
from unisono.training.weights import gpu_memory
from unisono.training.weights.shards import Box, HeldTensor, Lengths, Place

_MOST_ROWS = 40

Difference = tuple[str, str, str]
"""A name, what the trainer has, what an engine has."""


@dataclass(frozen=True)
class UpdateOptions:
    """How an update goes on, as its senders say."""

    transactional: bool
    checksum: bool
    convert: bool
    bucket_bytes: int


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor in a description: `first` is the name that it shares its memory with, or its own;
    `place` where it lies in memory that all ranks have mapped."""

    dtype: str
    whole: Lengths
    box: Box
    first: str
    place: Place | None = None

    def row(self) -> list[Any]:
        """As plain data."""
        place = None if self.place is None else list(vars(self.place).values())
        return [self.dtype, self.whole, self.box.offset, self.box.shape, self.first, place]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> DescribedTensor:
        """The other way."""
        dtype, whole, offset, shape, first, place = row
        found = None if place is None else Place(place[0], place[1], tuple(place[2]))
        return cls(dtype, tuple(whole), Box(tuple(offset), tuple(shape)), first, found)


@dataclass(frozen=True)
class Description:
    """What a rank brings to an update. An engine that `takes_all` has no weights of its own."""

    role: Literal["sender", "receiver"]
    weights: dict[str, DescribedTensor]
    options: UpdateOptions | None = None
    partial: bool = False
    alias: bool = False
    takes_all: bool = False
    gpu: str = ""
    """The one on which all of its weights lie, if there is one."""

    @classmethod
    def of(
        cls,
        role: Any,
        weights: Mapping[str, HeldTensor],
        ties: Mapping[str, str],
        place_of: Callable[[torch.Tensor], Place | None] = lambda tensor: None,
        **more: Any,
    ) -> Description:
        """The description of what a rank holds; `ties` are the `tied_names` of it."""
        entries = {
            name: DescribedTensor(
                *(dtype_name(held.tensor), held.whole, held.box),
                *(ties[name], place_of(held.tensor)),
            )
            for name, held in weights.items()
        }
        gpu = gpu_memory.gpu_of(held.tensor for held in weights.values())
        return cls(role, entries, gpu=gpu, **more)

    def text(self) -> str:
        """For the way to the others."""
        rows = {name: entry.row() for name, entry in self.weights.items()}
        options = None if self.options is None else asdict(self.options)
        return json.dumps(vars(self) | {"weights": rows, "options": options})

    @classmethod
    def from_text(cls, text: str) -> Description:
        """The other way."""
        made = cls(**json.loads(text))
        rows: Any = made.weights
        options: Any = made.options
        return replace(
            made,
            weights={name: DescribedTensor.from_row(row) for name, row in rows.items()},
            options=None if options is None else UpdateOptions(**options),
        )


@dataclass
class TrainerTensor:
    """A tensor of the trainer: who holds which boxes of it. `first` is the name that it is tied to
    on all senders, or its own."""

    dtype: str
    whole: Lengths
    boxes: dict[Box, list[int]]
    first: str
    travels_as: torch.dtype = torch.float32
    """Its type on the way, once `compare` has found it."""

    def __str__(self) -> str:
        return tensor_text(self.dtype, self.whole)

    def problem(self) -> str:
        """What is wrong with the boxes, if anything."""
        boxes = list(self.boxes)
        for index, box in enumerate(boxes):
            for other in boxes[:index]:
                if box.intersection(other):
                    ranks = self.boxes[other][0], self.boxes[box][0]
                    return f"the shards of ranks {ranks[0]} and {ranks[1]} overlap"
        missing = Box((), self.whole).count - sum(box.count for box in boxes)
        return f"{missing} elements are on no rank" if missing else ""


def trainer_tensors(
    senders: Mapping[int, Description], differences: list[Difference]
) -> dict[str, TrainerTensor]:
    """What all senders hold together."""
    found: dict[str, TrainerTensor] = {}
    for rank, sender in senders.items():
        for name, entry in sender.weights.items():
            ours = found.setdefault(name, TrainerTensor(entry.dtype, entry.whole, {}, entry.first))
            if (entry.dtype, entry.whole) != (ours.dtype, ours.whole):
                theirs = tensor_text(entry.dtype, entry.whole)
                differences.append((name, f"rank {rank}: {theirs}, others: {ours}", "-"))
                continue
            if entry.first != ours.first:
                ours.first = name  # not tied everywhere
            if entry.box.count:
                ours.boxes.setdefault(entry.box, []).append(rank)
    for name, ours in found.items():
        if ours.first in found and found[ours.first].first != ours.first:
            ours.first = name
        wrong = ours.problem()
        if wrong:
            differences.append((name, f"{ours}: {wrong}", "-"))
    return found


def compare(
    trainer: Mapping[str, TrainerTensor],
    engines: Mapping[int, Description],
    convert: bool,
    differences: list[Difference],
) -> None:
    """Find in which type each tensor travels, and what does not fit."""
    for name, ours in trainer.items():
        dtypes = {}
        for rank, engine in engines.items():
            entry = engine.weights.get(name)
            if entry is not None:
                dtypes[rank] = entry.dtype
                wrong = _misfit(ours, entry, trainer, convert)
            else:
                wrong = "" if engine.takes_all or engine.partial else "-"
            if wrong:
                differences.append((name, str(ours), f"rank {rank}: {wrong}"))
        if convert and len(set(dtypes.values())) > 1:
            texts = ", ".join(f"rank {rank}: {dtype}" for rank, dtype in dtypes.items())
            differences.append((name, ours.dtype, f"engines differ: {texts}"))
        ours.travels_as = torch_dtype(next(iter(dtypes.values()), ours.dtype))
    for rank, engine in engines.items():
        for name, entry in engine.weights.items():
            if name not in trainer:
                text = f"rank {rank}: {tensor_text(entry.dtype, entry.whole)}"
                differences.append((name, "-", text))


def _misfit(
    ours: TrainerTensor,
    entry: DescribedTensor,
    trainer: Mapping[str, TrainerTensor],
    convert: bool,
) -> str:
    """How an engine's tensor differs from the trainer's; nothing where it fits."""
    if entry.whole != ours.whole:
        return tensor_text(entry.dtype, entry.whole)
    if entry.dtype != ours.dtype:
        floats = all(torch_dtype(name).is_floating_point for name in (ours.dtype, entry.dtype))
        if not convert or not floats:
            remedy = " (convert=True on the sender converts)" if floats else ""
            return tensor_text(entry.dtype, entry.whole) + remedy
    first = trainer.get(entry.first)
    if first is None or first.first != ours.first:
        return f"tied to {entry.first}, on the trainer not"
    return ""


def tensor_text(dtype: str, whole: Sequence[int]) -> str:
    """ "float32 (8, 4)": a tensor in a table of differences."""
    return f"{dtype} {tuple(whole)}"


def differences_table(differences: Sequence[Difference]) -> str:
    """What does not fit, for people."""
    rows = [("weight", "trainer", "engine"), *differences[:_MOST_ROWS]]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    if len(differences) > _MOST_ROWS:
        lines.append(f"  and {len(differences) - _MOST_ROWS} more")
    head = f"trainer and engines differ in {len(differences)} weight(s); nothing was moved"
    return "\n".join([head, *lines])
