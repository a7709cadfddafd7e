"""From what trainer and engines hold to what travels: differences, lanes and buckets.

Every rank describes what it holds; from all descriptions every rank makes the same plan, or finds
the same differences, so that nothing about the way of the bytes has to be agreed upon later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from unisono.collectives.encoding import torch_dtype
from unisono.comm.base import dtype_name
from unisono.errors import WeightMismatch
from unisono.training.weights.shards import Box, Held, Lengths, tied

ALIGNMENT_BYTES = 256
_MOST_ROWS = 40


@dataclass(frozen=True)
class Terms:
    """How an update goes on, as its senders say."""

    transactional: bool
    checksum: bool
    convert: bool
    bucket_bytes: int


@dataclass(frozen=True)
class Entry:
    """A tensor in a description: `first` is the name that it shares its memory with, or its own."""

    dtype: str
    whole: Lengths
    box: Box
    first: str


@dataclass(frozen=True)
class Description:
    """What a rank brings to an update. An engine without `weights` takes whatever comes."""

    role: Literal["sender", "receiver"]
    weights: dict[str, Entry] | None
    terms: Terms | None = None
    partial: bool = False

    @classmethod
    def of(cls, role: Any, weights: Mapping[str, Held] | None, **more: Any) -> Description:
        """The description of what a rank holds."""
        if weights is None:
            return cls(role, None, **more)
        firsts = tied(weights)
        entries = {
            name: Entry(dtype_name(one.tensor), one.whole, one.box, firsts[name])
            for name, one in weights.items()
        }
        return cls(role, entries, **more)

    def plain(self) -> dict[str, Any]:
        """As plain data, for the way to the others."""
        weights = self.weights
        lines = None
        if weights is not None:
            lines = [
                [name, one.dtype, one.whole, one.box.offset, one.box.shape, one.first]
                for name, one in weights.items()
            ]
        terms = None if self.terms is None else asdict(self.terms)
        return vars(self) | {"weights": lines, "terms": terms}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Description:
        """The other way."""
        weights = None
        if data["weights"] is not None:
            weights = {
                name: Entry(dtype, tuple(whole), Box(tuple(offset), tuple(shape)), first)
                for name, dtype, whole, offset, shape, first in data["weights"]
            }
        terms = None if data["terms"] is None else Terms(**data["terms"])
        return cls(**(data | {"weights": weights, "terms": terms}))


@dataclass(frozen=True)
class Unit:
    """A part of a tensor that travels in one piece."""

    name: str
    dtype: torch.dtype
    box: Box

    @property
    def bytes(self) -> int:
        """Its size on the way."""
        return self.box.count * self.dtype.itemsize


@dataclass
class Bucket:
    """Units that travel together; `offsets` is where each lies where they have to be packed."""

    units: list[Unit] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    bytes: int = 0
    """What it moves."""
    room_bytes: int = 0
    """How long it is, packed."""

    def add(self, unit: Unit) -> None:
        """Put a unit behind the others."""
        self.units.append(unit)
        self.offsets.append(self.room_bytes)
        self.bytes += unit.bytes
        aligned = -(-unit.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self.room_bytes += aligned


@dataclass(frozen=True)
class Lane:
    """A sender and those receivers that take the same from it, and what."""

    sender: int
    receivers: tuple[int, ...]
    buckets: list[Bucket] = field(default_factory=list)

    @property
    def members(self) -> tuple[int, ...]:
        """All of them; the sender is the first."""
        return (self.sender, *self.receivers)


@dataclass(frozen=True)
class Tensor:
    """A tensor as it travels. `first` is the one that it is tied to on the trainer, or itself."""

    dtype: torch.dtype
    whole: Lengths
    first: str


@dataclass(frozen=True)
class Plan:
    """What an update moves."""

    terms: Terms
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    tensors: dict[str, Tensor]
    lanes: list[Lane]
    version: int = -1

    def steps(self, rank: int) -> list[tuple[Lane, int]]:
        """The lanes and buckets in which a rank takes part, in the order that all ranks keep."""
        lanes = [lane for lane in self.lanes if rank in lane.members]
        longest = max((len(lane.buckets) for lane in lanes), default=0)
        return [(lane, i) for i in range(longest) for lane in lanes if i < len(lane.buckets)]

    def bytes(self, rank: int) -> int:
        """How many bytes a rank sends or receives."""
        return sum(lane.buckets[index].bytes for lane, index in self.steps(rank))


@dataclass
class _Whole:
    """A tensor of the trainer: who holds which boxes of it."""

    dtype: str
    whole: Lengths
    boxes: dict[Box, list[int]]
    first: str


def make_plan(everyone: Sequence[Description]) -> Plan:
    """The plan for ranks that hold what these descriptions say.

    Raises WeightMismatch, the same on every rank, if the tensors do not fit.
    """
    senders = tuple(rank for rank, one in enumerate(everyone) if one.role == "sender")
    receivers = tuple(rank for rank, one in enumerate(everyone) if one.role == "receiver")
    if not senders or not receivers:
        raise WeightMismatch(
            f"a weight update needs senders and receivers: of {len(everyone)} rank(s) "
            f"{len(senders)} send(s) and {len(receivers)} receive(s)"
        )
    terms = everyone[senders[0]].terms
    assert terms is not None
    for rank in senders[1:]:
        if everyone[rank].terms != terms:
            raise WeightMismatch(
                f"senders differ in their options: rank {senders[0]} has {terms}, rank {rank} "
                f"{everyone[rank].terms}"
            )
    differences: list[tuple[str, str, str]] = []
    trainer = _wholes(everyone, senders, differences)
    wanted = {rank: _wanted(everyone[rank], trainer) for rank in receivers}
    engines = {rank: everyone[rank] for rank in receivers}
    tensors = _compare(trainer, engines, terms, differences)
    if differences:
        raise WeightMismatch(_table(differences), differences=differences)
    lanes = _lanes(trainer, tensors, wanted, terms.bucket_bytes, senders)
    return Plan(terms, senders, receivers, tensors, lanes)


# -- comparing -----------------------------------------------------------------------------------


def _wholes(
    everyone: Sequence[Description], senders: Sequence[int], differences: list[Any]
) -> dict[str, _Whole]:
    found: dict[str, _Whole] = {}
    for rank in senders:
        for name, one in (everyone[rank].weights or {}).items():
            whole = found.setdefault(name, _Whole(one.dtype, one.whole, {}, one.first))
            if (one.dtype, one.whole) != (whole.dtype, whole.whole):
                text = f"rank {rank}: {_text(one.dtype, one.whole)}, others: "
                differences.append((name, text + _text(whole.dtype, whole.whole), "-"))
                continue
            if one.first != whole.first:
                whole.first = name  # not tied everywhere
            if one.box.count:
                whole.boxes.setdefault(one.box, []).append(rank)
    for name, whole in found.items():
        if whole.first in found and found[whole.first].first != whole.first:
            whole.first = name
        wrong = _hole(whole)
        if wrong:
            differences.append((name, f"{_text(whole.dtype, whole.whole)}: {wrong}", "-"))
    return found


def _hole(whole: _Whole) -> str:
    """What is wrong with the boxes of which a tensor consists, if anything."""
    boxes = list(whole.boxes)
    for index, box in enumerate(boxes):
        for other in boxes[:index]:
            if box.and_(other):
                ranks = whole.boxes[other][0], whole.boxes[box][0]
                return f"the shards of ranks {ranks[0]} and {ranks[1]} overlap"
    missing = Box((), whole.whole).count - sum(box.count for box in boxes)
    return f"{missing} elements are on no rank" if missing else ""


def _wanted(engine: Description, trainer: Mapping[str, _Whole]) -> dict[str, Box]:
    """The boxes that an engine receives: names that both sides have tied come once."""
    if engine.weights is None:
        return {
            name: Box((0,) * len(one.whole), one.whole)
            for name, one in trainer.items()
            if one.first == name
        }
    return {name: one.box for name, one in engine.weights.items() if one.first == name}


def _compare(
    trainer: Mapping[str, _Whole],
    engines: Mapping[int, Description],
    terms: Terms,
    differences: list[tuple[str, str, str]],
) -> dict[str, Tensor]:
    """The tensors as they travel, and what does not fit."""
    tensors: dict[str, Tensor] = {}
    for name, one in trainer.items():
        dtypes = {}
        for rank, engine in engines.items():
            entry = (engine.weights or {}).get(name)
            if entry is not None:
                dtypes[rank] = entry.dtype
                wrong = _misfit(one, entry, trainer, terms.convert)
                if wrong:
                    ours = _text(one.dtype, one.whole)
                    differences.append((name, ours, f"rank {rank}: {wrong}"))
            elif engine.weights is not None and not engine.partial:
                differences.append((name, _text(one.dtype, one.whole), f"rank {rank}: -"))
        if terms.convert and len(set(dtypes.values())) > 1:
            texts = ", ".join(f"rank {rank}: {dtype}" for rank, dtype in dtypes.items())
            differences.append((name, one.dtype, f"engines differ: {texts}"))
        dtype = next(iter(dtypes.values()), one.dtype)
        tensors[name] = Tensor(torch_dtype(dtype), one.whole, one.first)
    for rank, engine in engines.items():
        for name, entry in (engine.weights or {}).items():
            if name not in trainer:
                text = f"rank {rank}: {_text(entry.dtype, entry.whole)}"
                differences.append((name, "-", text))
    return tensors


def _misfit(one: _Whole, entry: Entry, trainer: Mapping[str, _Whole], convert: bool) -> str:
    """How an engine's tensor differs from the trainer's; nothing where it fits."""
    if entry.whole != one.whole:
        return _text(entry.dtype, entry.whole)
    if entry.dtype != one.dtype:
        floats = all(torch_dtype(name).is_floating_point for name in (one.dtype, entry.dtype))
        if not convert or not floats:
            remedy = " (convert=True on the sender converts)" if floats else ""
            return _text(entry.dtype, entry.whole) + remedy
    first = trainer.get(entry.first)
    if first is None or first.first != one.first:
        return f"tied to {entry.first}, on the trainer not"
    return ""


def _text(dtype: str, whole: Lengths) -> str:
    return f"{dtype} {tuple(whole)}"


def _table(differences: Sequence[tuple[str, str, str]]) -> str:
    rows = [("weight", "trainer", "engine"), *differences[:_MOST_ROWS]]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows]
    if len(differences) > _MOST_ROWS:
        lines.append(f"  and {len(differences) - _MOST_ROWS} more")
    head = f"trainer and engines differ in {len(differences)} weight(s); nothing was moved"
    return "\n".join([head, *lines])


# -- lanes and buckets -----------------------------------------------------------------------------


def _lanes(
    trainer: Mapping[str, _Whole],
    tensors: Mapping[str, Tensor],
    wanted: Mapping[int, Mapping[str, Box]],
    bucket_bytes: int,
    senders: Sequence[int],
) -> list[Lane]:
    lanes: dict[tuple[int, tuple[int, ...]], Lane] = {}
    load = dict.fromkeys(senders, 0)
    for name, one in trainer.items():
        dtype = tensors[name].dtype
        for piece, holders in one.boxes.items():
            sender = min(holders, key=lambda rank: (load[rank], rank))
            for box, takers in _shared_parts(piece, name, wanted):
                load[sender] += box.count * dtype.itemsize
                lane = lanes.setdefault((sender, takers), Lane(sender, takers))
                for cut in box.cut(max(1, bucket_bytes // dtype.itemsize)):
                    _put(lane.buckets, Unit(name, dtype, cut), bucket_bytes)
    return [lanes[key] for key in sorted(lanes)]


def _shared_parts(
    piece: Box, name: str, wanted: Mapping[int, Mapping[str, Box]]
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """What is wanted of a piece, and by whom: equal parts once."""
    parts: dict[Box, list[int]] = {}
    for rank, boxes in wanted.items():
        part = piece.and_(boxes[name]) if name in boxes else None
        if part is not None:
            parts.setdefault(part, []).append(rank)
    for part, ranks in parts.items():
        yield part, tuple(ranks)


def _put(buckets: list[Bucket], unit: Unit, bucket_bytes: int) -> None:
    if not buckets or buckets[-1].room_bytes + unit.bytes > bucket_bytes:
        buckets.append(Bucket())
    buckets[-1].add(unit)
