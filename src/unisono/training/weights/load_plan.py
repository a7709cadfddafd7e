"""Which parts of a checkpoint's tensors a loader reads on this rank, so that only those are sent.

The loader runs on stand-ins: tensors without data, on meta, of which torch keeps what every view
is: sizes, strides and an offset in one memory. A dispatch mode sees each operator that reads one.
While it records, it notes the part; later it gives the operator this part of what was received.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from unisono.collectives.ragged import flat_bytes
from unisono.errors import WeightUpdateError
from unisono.training.weights.shards import (
    Box,
    HeldTensor,
    Known,
    Lengths,
    WeightShard,
    check_memory,
    check_writable,
    part_key,
)
from unisono.training.weights.transfers import writing_to

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Fetch = Callable[[str, Box], torch.Tensor]
"""A box of a tensor, by name."""
Step = partial[object]
Write = Callable[[Step], object]
"""Takes an operator that would write to the loader's own tensors."""

_aten = torch.ops.aten
_SAMPLES = 1_000_003  # a prime: rows of a tensor are not multiples of it
_TRIMMED_BYTES = 16 << 20
"""Of how many bytes of samples glibc may keep the memory: by chance it would keep all."""


class LoadPlan:
    """Which parts of a checkpoint's tensors `load` reads on this rank. A `WeightReceiver` with this
    plan as its weights receives those alone, and lets `load` put them where they belong.

    `load` gets pairs of names and tensors, as a checkpoint's reader yields them, and copies what
    this rank needs to its weights: rows for tensor parallelism, layers for pipeline parallelism,
    several tensors into one. `checkpoint` has the tensors by name, of which only shape and dtype
    matter: they may be on meta. Parts are received on `device`.

    The loader runs here on tensors without data, and twice on sample values: on whole tensors, and
    on their parts. What it writes to where must be equal, bit for bit. It is not written.

    - `parts`: what this rank receives of each tensor, and `bytes`, how much that is
    - `whole`: the names of tensors that are sent whole because nobody knows which parts are read:
      all, if the loader looks at values of more than one element, otherwise none

    Raises what `load` raises, and WeightUpdateError if the results differ.

    >>> served = torch.zeros(2, 2)  # this rank's rows of "w"
    >>> def load(pairs):
    ...     for name, tensor in pairs:
    ...         served.copy_(tensor.chunk(2)[0])
    >>> plan = unisono.training.LoadPlan(load, {"w": torch.empty(4, 2, device="meta")})
    >>> plan.bytes, plan.whole
    (16, ())
    """

    def __init__(
        self,
        load: Load,
        checkpoint: Mapping[str, torch.Tensor],
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self._load = load
        self._kinds = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in checkpoint.items()
        }
        self._device = device
        self._shows_values = False
        """Whether the loader gets whole tensors with data instead of stand-ins."""
        self.steps: list[Step] = []
        """What the last `prepare` has left to `commit`."""
        self._writable: set[Known] = set()  # of what the loader writes to
        self.parts, self.whole = self._record()
        self.bytes = sum(
            box.count * self._kinds[name].element_size()
            for name, boxes in self.parts.items()
            for box in boxes
        )
        self._check()

    @property
    def weights(self) -> dict[str, list[WeightShard]]:
        """What a receiver describes: of tensors that are not read, an empty part.

        >>> plan = unisono.training.LoadPlan(dict, {"w": torch.empty(4, 2, device="meta")})
        >>> [part.tensor.shape for part in plan.weights["w"]]
        [torch.Size([0, 2])]
        """
        found = {}
        for name, kind in self._kinds.items():
            # one element for all: only dtype, shape and device matter
            one = torch.empty((), dtype=kind.dtype, device=self._device)
            nothing = Box((0,) * kind.dim(), (0, *kind.shape[1:]) if kind.dim() else ())
            found[name] = [
                WeightShard(one.expand(box.shape), tuple(kind.shape), box.offset)
                for box in self.parts[name] or [nothing]
            ]
        return found

    def prepare(self, received: Mapping[str, torch.Tensor]) -> None:
        """Run the loader on the parts that a receiver has `received`, and keep what it writes for
        `commit`. Raises what the loader raises, and WeightUpdateError if it reads other parts.

        >>> unisono.training.LoadPlan(dict, {}).prepare({})
        """
        self.steps = []
        self._run(self._fetch_from(received), self.steps.append)

    def commit(self) -> None:
        """Write what the last `prepare` has kept.

        >>> unisono.training.LoadPlan(dict, {}).commit()
        """
        steps, self.steps = self.steps, []
        with writing_to(each for step in steps for each in _written_by(step)):
            deque((step() for step in steps), maxlen=0)

    def replay(self, received: Mapping[str, torch.Tensor]) -> None:
        """Run the loader on the parts that a receiver has `received`, and write at once: for a
        `commit` of your own. Raises what `prepare` raises.

        >>> unisono.training.LoadPlan(dict, {}).replay({})
        """
        self._run(self._fetch_from(received), None)

    # -- running the loader ------------------------------------------------------------------------

    def _run(self, fetch: Fetch, write: Write | None, shows_values: bool = False) -> None:
        """Run the loader on stand-ins for what `fetch` returns, or on that itself."""
        at = ""
        written: list[tuple[str, torch.Tensor]] = []

        def keep(step: Step) -> None:
            written.extend((at, each) for each in _written_by(step) if not each.is_meta)
            assert write is not None
            write(step)

        mode = _StandIns(fetch, write and keep)

        def pairs() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal at
            for name, kind in self._kinds.items():
                at = name
                if shows_values or self._shows_values:
                    yield name, mode.own(fetch(name, _whole(kind.shape)))
                else:
                    # not by empty_like, for which torch imports SymPy: half a second and 40 MB
                    like = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
                    yield name, mode.register(like, name)

        with torch.no_grad(), mode:
            self._load(pairs())
        check_memory(written)
        check_writable(written, self._writable)

    def _record(self) -> tuple[dict[str, list[Box]], tuple[str, ...]]:
        """What the loader reads of each tensor, and what it needs whole."""
        found: dict[str, list[Box]] = {name: [] for name in self._kinds}

        def note(name: str, box: Box) -> torch.Tensor:
            found[name].append(box)
            return torch.empty(box.shape, dtype=self._kinds[name].dtype, device="meta")

        try:
            self._run(note, lambda step: None)
        except _NeedsValues:
            self._shows_values = True
            everything = {name: [_whole(kind.shape)] for name, kind in self._kinds.items()}
            return everything, tuple(self._kinds)
        return {name: _apart(boxes) for name, boxes in found.items()}, ()

    def _fetch_from(self, received: Mapping[str, torch.Tensor]) -> Fetch:
        def fetch(name: str, box: Box) -> torch.Tensor:
            for index, part in enumerate(self.parts[name]):
                if part.intersection(box) == box:
                    return HeldTensor(received[part_key(name, index)], (), part).part(box)
            if not box.count:
                return torch.empty(box.shape, dtype=self._kinds[name].dtype, device=self._device)
            raise WeightUpdateError(
                f"the loader reads {box.shape} at {box.offset} of {name!r}, unlike when its plan "
                "was made: make a new LoadPlan"
            )

        return fetch

    def _check(self) -> None:
        """Raise WeightUpdateError if the loader writes something else with parts."""
        samples = _Samples(self._device)

        def whole_of(name: str, box: Box) -> torch.Tensor:
            return samples.of(name, self._kinds[name])

        def part_of(name: str, box: Box) -> torch.Tensor:
            held = HeldTensor(whole_of(name, box), (), _whole(self._kinds[name].shape))
            parts = enumerate(self.parts[name])
            keyed = {part_key(name, index): held.part(part) for index, part in parts}
            return self._fetch_from(keyed)(name, box).clone()

        expected: list[str] = []
        found: list[str] = []

        def attempt(step: Step) -> None:
            expected.append(_digest(step))
            if step.func is _aten.copy_.default:
                return  # its shapes are known to fit
            into = {id(each) for each in _written_by(step)}
            args, kwargs = tree_map_only(
                torch.Tensor,
                lambda each: each.clone() if id(each) in into else each,
                (step.args, step.keywords),
            )
            step.func(*args, **kwargs)  # after a vote it would be too late to raise

        self._run(whole_of, attempt, shows_values=True)
        self._run(part_of, lambda step: found.append(_digest(step)))
        if expected != found:
            equal = sum(a == b for a, b in zip(expected, found, strict=False))
            raise WeightUpdateError(
                "the loader writes something else if it gets only the parts that it reads: of "
                f"{len(expected)} writes {equal} are equal. Does it depend on more than the "
                "tensors?"
            )


class _NeedsValues(Exception):
    """The loader does something that stand-ins cannot take part in."""


class _StandIn(NamedTuple):
    """What a tensor on meta stands for: a tensor of the checkpoint, by its name, or what the
    operator `copy` makes of a `view` of another stand-in. `memory` is kept: it identifies it."""

    memory: Any
    shape: Lengths
    dtype: torch.dtype
    name: str
    view: torch.Tensor | None = None
    copy: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def is_single(self) -> bool:
        """Whether it is one number."""
        return math.prod(self.shape) == 1


class _StandIns(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives operators what stand-ins stand for. Operators that write to tensors which were not made
    within the mode are passed to `write`, if given."""

    def __init__(self, fetch: Fetch, write: Write | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fetch, self._write = fetch, write
        self._known: dict[int, _StandIn] = {}
        self._made: set[int] = set()
        """The memory of tensors that were made within the mode, also of those that are gone: only
        others that are made here can have it again."""
        self._hollow: set[int] = set()
        """The memory of those that have no values because they come from tensors without."""
        self._changed: set[int] = set()
        """Where a kept operator would write."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip it, torch imports it, which takes seconds and 100 MB."""
        return False

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor; it counts as made within the mode."""
        self._made.add(_memory(tensor))
        return tensor

    def register(self, tensor: torch.Tensor, name: str, *more: Any) -> torch.Tensor:
        """Make it a stand-in: for a tensor of the checkpoint by its name, or see `_StandIn`."""
        memory, shape = tensor.untyped_storage(), tuple(tensor.shape)
        self._known[_memory(tensor)] = _StandIn(memory, shape, tensor.dtype, name, *more)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        written = _written(func, args, kwargs)
        reads = any(_memory(each) in self._known for each in given)
        if reads and func.is_view:
            return func(*args, **kwargs)
        if any(_memory(each) in self._known for each in written):
            raise _NeedsValues("the loader writes to the checkpoint's tensors")
        if reads and func in (_aten._to_copy.default, _aten.clone.default):
            return self._copy(func, args[0], kwargs)
        is_single = reads and len(given) == 1 and self._known[_memory(given[0])].is_single
        if reads:
            args, kwargs = tree_map_only(torch.Tensor, self._resolve, (args, kwargs))
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if func is _aten._local_scalar_dense.default and given[0].is_meta and is_single:
            return 1  # a scale, which the loader writes by `fill_`
        is_hollow = any(each.is_meta or _memory(each) in self._hollow for each in given)
        if is_hollow and func is _aten._local_scalar_dense.default:
            raise _NeedsValues("the loader looks at a value")
        if func is _aten.copy_.default:
            args[1].expand(args[0].shape)  # it raises, if later is too late
        if self._write is not None and not func.is_view:
            if any(_memory(each) not in self._made for each in written):
                return self._keep(func, args, kwargs, given, written)
            if any(_memory(each) in self._changed for each in given):
                raise WeightUpdateError(f"the loader reads by {func} what it has written before")
        if is_hollow and not all(each.is_meta for each in written):
            self._hollow |= {_memory(each) for each in written}
            return written[0]
        try:
            made = func(*args, **kwargs)
        except NotImplementedError as error:
            if is_hollow:
                raise _NeedsValues("the loader looks at values") from error
            raise
        if self._write is not None and not func.is_view:
            for each in tree_leaves(made):
                if isinstance(each, torch.Tensor) and not any(each is other for other in given):
                    self.own(each)
                    if is_hollow:
                        self._hollow.add(_memory(each))
        return made

    def _keep(
        self, func: Any, args: Any, kwargs: Any, given: list[Any], written: list[Any]
    ) -> torch.Tensor:
        """Keep an operator that writes to the loader's own tensors."""
        assert self._write is not None
        into = {_memory(each) for each in written}
        read = [each for each in given if not any(each is other for other in written)]
        if any(_memory(each) in self._changed for each in read):
            raise WeightUpdateError(f"the loader reads by {func} what it has written before")
        self._changed |= into
        self._write(partial(func, *args, **kwargs))
        first: torch.Tensor = written[0]
        return first

    def _copy(self, func: Any, view: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        """A stand-in for a copy, perhaps of another dtype: what is read of it will show."""
        named = {key: each for key, each in kwargs.items() if key != "memory_format"}
        device = named.pop("device", None)
        like = torch.empty(view.shape, dtype=named.get("dtype") or view.dtype, device="meta")

        def copy(part: torch.Tensor) -> torch.Tensor:
            at = {"device": device} if device is not None and not part.is_meta else {}
            made: torch.Tensor = func(part, **named, **at)
            return made

        return self.register(like, "", view, copy)

    def _resolve(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a view of a stand-in stands for."""
        known = self._known.get(_memory(tensor))
        if known is None:
            return tensor
        if tensor.is_conj() or tensor.is_neg():
            raise _NeedsValues("the loader conjugates")
        is_same_size = tensor.dtype.itemsize == known.dtype.itemsize or not tensor.numel()
        found = _box_of(tensor, known.shape) if is_same_size else None
        box, steps = found or (_rows_of(tensor, known), None)
        if known.copy is None:
            part = self._fetch(known.name, box)
        else:
            assert known.view is not None
            part = known.copy(
                self._resolve(HeldTensor(known.view, (), _whole(known.shape)).part(box))
            )
        if not tensor.numel():
            return part.new_empty(tensor.shape, dtype=tensor.dtype)
        if steps is None:
            part = part.contiguous().view(-1).view(tensor.dtype)
            before = box.offset[0] * math.prod(known.shape[1:]) * known.dtype.itemsize
            begin = tensor.storage_offset() - before // tensor.dtype.itemsize
            strides = list(tensor.stride())
        else:
            part, begin = part.view(tensor.dtype), 0
            strides = [step * part.stride(dim) if step else 0 for dim, step in steps]
        return part.as_strided(tensor.shape, strides, part.storage_offset() + begin)


def _rows_of(view: torch.Tensor, known: _StandIn) -> Box:
    """The rows that contain a view of a contiguous tensor, perhaps as another dtype."""
    row = math.prod(known.shape[1:]) * known.dtype.itemsize
    begin = view.storage_offset()
    last = begin + sum((n - 1) * by for n, by in zip(view.shape, view.stride(), strict=True))
    first = begin * view.dtype.itemsize // row
    end = -(-(last + 1) * view.dtype.itemsize // row)
    rest = known.shape[1:]
    return Box((first, *(0 for _ in rest)), (end - first, *rest))


def _box_of(view: torch.Tensor, whole: Lengths) -> tuple[Box, list[tuple[int, int]]] | None:
    """The box of a contiguous tensor that a view reads, and for each dimension of the view along
    which one of the whole it goes, in which steps. None if it does not go along one."""
    sizes, strides, offset = tuple(view.shape), view.stride(), view.storage_offset()
    if 0 in sizes:
        return Box((0,) * len(whole), (0,) * len(whole)), [(0, 0)] * len(sizes)
    lengths = [1]
    for length in reversed(whole[1:]):
        lengths.insert(0, lengths[0] * length)
    begin = []
    for dim, length in enumerate(lengths[: len(whole)]):
        begin.append(offset // length)
        offset -= begin[dim] * length
    along: list[tuple[int, int]] = []
    reach = [1] * len(whole)
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1 or stride == 0:
            along.append((0, 0))
            continue
        dims = [dim for dim, n in enumerate(whole) if n > 1 and lengths[dim] <= stride]
        if not dims or stride % lengths[dims[0]]:
            return None
        dim, step = dims[0], stride // lengths[dims[0]]
        reach[dim] += (size - 1) * step
        along.append((dim, step))
    if any(at + far > most for at, far, most in zip(begin, reach, whole, strict=True)):
        return None
    return Box(tuple(begin), tuple(reach)), along


def _apart(boxes: Iterable[Box]) -> list[Box]:
    """Boxes that have these elements and do not overlap: what overlaps or fits is united."""
    found: list[Box] = []
    for box in boxes:
        if not box.count:
            continue
        united = True
        while united:
            united = False
            for other in found:
                both = box.union(other)
                if both.count <= box.count + other.count or box.intersection(other):
                    found.remove(other)
                    box, united = both, True
                    break
        found.append(box)
    return sorted(found, key=lambda box: box.offset)


def _whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def _memory(tensor: torch.Tensor) -> int:
    """What identifies the memory of a tensor, also on meta."""
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors to which an operator writes."""
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return found


def _written_by(step: Step) -> list[torch.Tensor]:
    return _written(step.func, step.args, step.keywords)


# -- checking ----------------------------------------------------------------------------------


@dataclass
class _Samples:
    """Tensors of values that differ from place to place; only the last one is kept."""

    device: torch.device | str
    _name: str = ""
    _last: torch.Tensor | None = None
    _freed_bytes: int = 0

    def of(self, name: str, kind: torch.Tensor) -> torch.Tensor:
        if self._last is None or self._name != name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            row = torch.rand(min(_SAMPLES, kind.numel()), generator=generator) * 200 - 100
            row = (row > 0) if kind.dtype == torch.bool else row.to(kind.dtype)
            copies = -(-kind.numel() // _SAMPLES)
            filled = row.repeat(copies)[: kind.numel()] if copies > 1 else row
            self._name, self._last = name, filled.view(kind.shape).to(self.device)
            self._freed_bytes += filled.nbytes
            if self._freed_bytes > _TRIMMED_BYTES:
                self._freed_bytes = 0
                if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
                    libc.malloc_trim(0)
        return self._last


def _digest(step: Step) -> str:
    """What an operator would write, and to where."""
    digest = hashlib.blake2b(str(step.func).encode(), digest_size=16)
    written = _written_by(step)
    for each in tree_leaves((step.args, step.keywords)):
        if any(each is other for other in written):
            where = _memory(each), tuple(each.shape), each.stride(), each.storage_offset()
            digest.update(repr(where).encode())
        elif isinstance(each, torch.Tensor):
            digest.update(repr((each.dtype, tuple(each.shape))).encode())
            digest.update(flat_bytes(each).cpu().numpy().data)
        else:
            digest.update(repr(each).encode())
    return digest.hexdigest()
