"""What a process holds under each name: a whole tensor, or a box of one that is spread over
ranks."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any

import torch

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class WeightShard:
    """A part of a tensor: `tensor` is at `offset` in a whole of `shape`. A rank that holds several
    parts of a tensor has a list of them under its name. See also `WeightSender`.

    >>> whole = torch.zeros(4) if comm.rank == 1 else None  # an engine
    >>> half = unisono.training.WeightShard(torch.ones(2), shape=(4,), offset=(2,))
    >>> half.shape
    (4,)
    """

    tensor: torch.Tensor
    shape: Lengths
    offset: Lengths


@dataclass(frozen=True)
class Box:
    """A part of a tensor: its offset and its length in every dimension."""

    offset: Lengths
    shape: Lengths

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """The elements that two boxes share; None if there are none."""
        begins = tuple(map(max, self.offset, other.offset))
        ends = map(min, self._ends(), other._ends())
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return None if any(length <= 0 for length in shape) else Box(begins, shape)

    def union(self, other: Box) -> Box:
        """The smallest box with the elements of both."""
        begins = tuple(map(min, self.offset, other.offset))
        ends = map(max, self._ends(), other._ends())
        return Box(begins, tuple(end - begin for begin, end in zip(begins, ends, strict=True)))

    def split(self, most: int) -> Iterable[Box]:
        """The same elements in boxes of at most `most` elements, cut along the first dimensions."""
        if self.count <= most:
            yield self
            return
        dim = next(dim for dim, length in enumerate(self.shape) if length > 1)
        rows = max(1, most // (self.count // self.shape[dim]))
        for begin in range(0, self.shape[dim], rows):
            offset, shape = list(self.offset), list(self.shape)
            offset[dim] += begin
            shape[dim] = min(rows, self.shape[dim] - begin)
            yield from Box(tuple(offset), tuple(shape)).split(most)

    def _ends(self) -> Lengths:
        return tuple(a + b for a, b in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True)
class HeldTensor:
    """One of a process's tensors, and its box of the whole."""

    tensor: torch.Tensor
    whole: Lengths
    box: Box

    def part(self, box: Box) -> torch.Tensor:
        """The elements of a box inside this one: a view of the tensor."""
        view = self.tensor.detach() if self.tensor.requires_grad else self.tensor
        if box != self.box:
            for dim, (begin, length) in enumerate(zip(box.offset, box.shape, strict=True)):
                view = view.narrow(dim, begin - self.box.offset[dim], length)
        return view


class Held(Mapping[str, HeldTensor]):
    """What a process holds under each key: the name, or for a name of several parts `part_key`.
    Most updates need only the `tensors`; the entries with their `boxes` are created when they are
    asked for."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], boxes: Mapping[str, tuple[Lengths, Box]]
    ) -> None:
        self.tensors, self.boxes = tensors, boxes

    def key(self, name: str, box: Box) -> str:
        """The key of what holds this box of a tensor."""
        if name in self.boxes:
            return name
        keys = itertools.takewhile(
            self.boxes.__contains__, (part_key(name, i) for i in itertools.count())
        )
        return next(key for key in keys if self.boxes[key][1].intersection(box) == box)

    def part(self, name: str, box: Box) -> torch.Tensor:
        """The elements of a box: a view of the tensor that holds them."""
        return self[self.key(name, box)].part(box)

    def __getitem__(self, name: str) -> HeldTensor:
        return HeldTensor(self.tensors[name], *self.boxes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def all_are_on(self, device: torch.device) -> bool:
        """Whether all tensors are on devices of this type."""
        devices = {tensor.device for tensor in self.tensors.values()}
        return all(each.type == device.type for each in devices)


Known = tuple[int, bool]
"""The address of a tensor's memory, and whether there is a stride of 0."""


def check_memory(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError, with the name, for a tensor whose memory was freed, as FSDP does: to look
    there would kill the process."""
    for name, tensor in weights:
        if not tensor.data_ptr() and tensor.numel():
            raise ValueError(f"the weight {name_of(name)!r} has no memory: its storage was freed")


def check_writable(weights: Iterable[tuple[str, torch.Tensor]], known: set[Known]) -> None:
    """Raise ValueError, with the name, for a tensor that cannot be written to: its elements share
    memory, or it is mapped read-only, and to write there would kill the process. Later only
    tensors that are not `known` are looked up."""
    memory = [(name, t, t.untyped_storage()) for name, t in weights if t.is_cpu]
    where = {(storage.data_ptr(), 0 in tensor.stride()) for _, tensor, storage in memory}
    if where <= known:
        return
    with open("/proc/self/maps") as maps:  # a millisecond
        lines = [line.split(maxsplit=2) for line in maps]
    places = [place.split("-") for place, access, _ in lines if "w" not in access]
    spans = [(int(begin, 16), int(end, 16)) for begin, end in places]
    for name, tensor, storage in memory:
        why = ""
        before = bisect_left(spans, (storage.data_ptr() + storage.nbytes(),))
        if before and spans[before - 1][1] > storage.data_ptr():
            why = "is in read-only memory, such as that of a file mapped with mode 'r'"
        elif any(n > 1 and not by for n, by in zip(tensor.shape, tensor.stride(), strict=True)):
            why = "is expanded: its elements share memory"
        if why:
            raise ValueError(f"the weight {name_of(name)!r} {why}: pass a copy, tensor.clone()")
    if len(known) > 2 * len(where):  # an engine has two copies of its weights
        known.clear()
    known |= where


@dataclass(frozen=True)
class MappedPlace:
    """The position of a tensor that all ranks of a group have mapped: `offset` bytes into its
    rank's part of the shared memory `number`."""

    number: int
    offset: int
    strides: Lengths

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, int]], tensor: torch.Tensor) -> MappedPlace | None:
        """The place of one of this rank's tensors in `parts`, its own parts of the group's shared
        memories, sorted by address; None if others do not have it mapped."""
        if not parts or tensor.device.type != "cpu" or not tensor.numel():
            return None
        address = tensor.data_ptr()
        before = bisect_right(parts, address, key=itemgetter(1))
        number, start, size = parts[before - 1] if before else (0, address, 0)
        if address - start >= size:
            return None
        return cls(number, address - start, tuple(tensor.stride()))


_PART = "\0part "


def part_key(name: str, index: int) -> str:
    """The key of one of several parts of a tensor."""
    return f"{name}{_PART}{index}"


def name_of(key: str) -> str:
    """The name of the tensor of which something is a part."""
    return key.partition(_PART)[0]


def held_tensors(weights: Any) -> Held:
    """What is in a module, a mapping or pairs of names and tensors.

    A value is a tensor, a DTensor, a `WeightShard` or a list of those. Raises TypeError or
    ValueError, with the name, for any other value.
    """
    tensors: dict[str, torch.Tensor] = {}
    boxes: dict[str, tuple[Lengths, Box]] = {}
    names = set()
    for name, given in pairs_of(weights):
        if not isinstance(name, str):
            raise TypeError(f"weights have names, and {name!r} is a {type(name).__name__}")
        if name in names:
            raise ValueError(f"there are two weights named {name!r}")
        names.add(name)
        values = {name: given}
        if isinstance(given, (list, tuple)):
            values = {part_key(name, index): part for index, part in enumerate(given)}
            if not values:
                raise ValueError(f"the weight {name!r} has no parts")
        for key, value in values.items():
            held = held_tensor(name, value)
            tensors[key], boxes[key] = held.tensor, (held.whole, held.box)
        _check_apart(name, [boxes[key] for key in values])
    return Held(tensors, boxes)


def _check_apart(name: str, parts: Sequence[tuple[Lengths, Box]]) -> None:
    """Raise ValueError for parts that are not parts of one tensor, or overlap."""
    for (whole, one), (other_whole, other) in itertools.combinations(parts, 2):
        if whole != other_whole or one.intersection(other) is not None:
            raise ValueError(
                f"the weight {name!r}: the parts {one.shape} at {one.offset} of {whole} and "
                f"{other.shape} at {other.offset} of {other_whole} overlap, or differ in the whole"
            )


def pairs_of(weights: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(weights, torch.nn.Module):
        weights = weights.state_dict(keep_vars=True)
    return weights.items() if isinstance(weights, Mapping) else weights


class WeightReader:
    """Reads what a process holds, repeatedly: fast if only contents and, outside of shared memory,
    addresses have changed."""

    def __init__(self) -> None:
        self._marks: tuple[Any, ...] | None = None
        self._boxes: Mapping[str, tuple[Lengths, Box]] = {}
        self.ties: dict[str, str] = {}
        """The `tied_names` of what was read last."""

    def read(self, weights: Any, parts: Sequence[Any] = ()) -> tuple[Held, bool]:
        """Like `held_tensors`; also whether it is unchanged since the last time. `parts` are the
        parts of shared memory in which weights may be."""
        pairs = list(pairs_of(weights))
        marks = _marks_of(pairs, parts)
        if marks is not None and marks == self._marks:
            return Held(dict(pairs), self._boxes), True
        self._marks = None
        held = held_tensors(pairs)
        self._boxes = held.boxes
        self.ties = tied_names(held)
        self._marks = marks
        return held, False


_PLAIN = {torch.Tensor, torch.nn.Parameter}


_kind_of = attrgetter("layout", "dtype", "shape", "device")


def _marks_of(pairs: Sequence[tuple[str, Any]], parts: Sequence[Any]) -> tuple[Any, ...] | None:
    """Everything that a description of plain tensors contains; None if there are others."""
    names, tensors = [name for name, _ in pairs], [value for _, value in pairs]
    if not set(map(type, tensors)) <= _PLAIN:
        return None
    kinds = list(map(_kind_of, tensors))
    layouts, dtypes = {kind[0] for kind in kinds}, {kind[1] for kind in kinds}
    lazy = [torch.Tensor.is_neg, *[torch.Tensor.is_conj for each in dtypes if each.is_complex]]
    if layouts - {torch.strided} or any(any(map(is_lazy, tensors)) for is_lazy in lazy):
        return None
    where = list(map(torch.Tensor.data_ptr, tensors))
    if not parts:  # only which are tied
        first = {address: index for index, address in reversed(list(enumerate(where)))}
        where = [] if len(first) == len(where) else [first[address] for address in where]
    return names, kinds, list(map(torch.Tensor.stride, tensors)), where, list(parts)


def tied_names(weights: Mapping[str, HeldTensor]) -> dict[str, str]:
    """For names of the same memory: each name -> the alphabetically first of them."""
    firsts: dict[Any, str] = {}
    first: dict[str, str] = {}
    for name in sorted(weights):
        held, tensor = weights[name], weights[name].tensor
        memory = (tensor.data_ptr(), tensor.dtype, tensor.stride(), held.whole, held.box)
        first[name] = firsts.setdefault(memory, name) if held.box.count else name
    return first


def held_tensor(name: str, value: Any) -> HeldTensor:
    if isinstance(value, WeightShard):
        tensor, whole, offset = value.tensor, tuple(value.shape), tuple(value.offset)
    elif hasattr(value, "placements") and hasattr(value, "to_local"):
        tensor, whole, offset = _local(name, value)
    elif isinstance(value, torch.Tensor):
        tensor, whole, offset = value, tuple(value.shape), (0,) * value.dim()
    else:
        raise TypeError(f"the weight {name!r} is a {type(value).__name__}, not a tensor")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"the weight {name!r} is not dense")
    if tensor.is_meta or tensor.is_conj() or tensor.is_neg():
        what = "on meta, without memory" if tensor.is_meta else "a lazy conjugate or negative"
        raise TypeError(f"the weight {name!r} is {what}")
    box = Box(offset, tuple(tensor.shape))
    if tensor is value:
        return HeldTensor(tensor, whole, box)
    ends = [a + b for a, b in zip(offset, box.shape, strict=False)]
    inside = len(whole) == len(offset) == len(box.shape) and all(
        begin >= 0 and end <= length for begin, end, length in zip(offset, ends, whole, strict=True)
    )
    if not inside:
        raise ValueError(
            f"the weight {name!r}: {box.shape} at {offset} is not inside a whole of {whole}"
        )
    return HeldTensor(tensor, whole, box)


def _local(name: str, value: Any) -> tuple[torch.Tensor, Lengths, Lengths]:
    """This rank's part of a DTensor."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for placement in value.placements:
        if type(placement) not in (Shard, Replicate):
            raise TypeError(
                f"the weight {name!r} has the placement {placement}: only Shard and Replicate can "
                "be sent; redistribute it first"
            )
    mesh = value.device_mesh
    _, offset = compute_local_shape_and_global_offset(value.shape, mesh, value.placements)
    with torch.no_grad():
        local = value.to_local()
    whole = tuple(value.shape)
    if not local.numel():  # empty: torch gives an offset beyond the end
        offset = tuple(map(min, offset, whole))
    return local, whole, tuple(offset)
