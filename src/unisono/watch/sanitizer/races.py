"""Tensors of works that have not been waited for, and operators that read or write them.

The program learns that a work is over by `wait()`, by `is_completed()`, or by its Future; before
that, a tensor that the work writes must not be touched, and one that it reads must not be written.
Operators are seen by a dispatch mode, which is on only while such works exist.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from unisono.watch import torch_group
from unisono.watch.replacements import Replacements
from unisono.watch.sanitizer.calls import MESSAGES, WatchedCall, harmless, tensors_in
from unisono.watch.stacks import calling_line

_ENDS = ("wait", "is_completed", "get_future", "exception")


@dataclass(frozen=True)
class Span:
    """The bytes of a tensor: from and to, in its storage."""

    storage: int
    low: int
    high: int
    dense: bool

    def meets(self, other: Span) -> bool:
        """Whether they have a byte in common, for sure."""
        overlap = self.low < other.high and other.low < self.high
        return self.storage == other.storage and overlap and self.dense and other.dense


def span_of(tensor: torch.Tensor) -> Span | None:
    """None for tensors without a storage of their own."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.numel():
        return None
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((count - 1) * stride for count, stride in steps)
    low = int(tensor.storage_offset()) * tensor.element_size()
    storage = tensor.untyped_storage()._cdata
    is_dense = reach == tensor.numel()
    return Span(storage, low, low + reach * tensor.element_size(), is_dense)


@dataclass(frozen=True)
class _Pending:
    """A tensor of a work that has not been waited for; `tensor` keeps its storage. The work is held
    weakly: one that is dropped, and over, is forgotten."""

    call: WatchedCall
    work: ref[Any]
    tensor: torch.Tensor
    span: Span
    written: bool


Found = Callable[[str, str, str], object]
"""(verdict, detail, line)"""
After = Callable[[str, Any, tuple[Any, ...], Any], object]


class Races:
    """Calls `found` with each race. `after` sees every operator while `follows` is true."""

    def __init__(self, rank: Callable[[], int], found: Found, after: After) -> None:
        self._rank, self._found, self.after = rank, found, after
        self._pending: dict[int, list[_Pending]] = {}
        self._lock = threading.Lock()
        self._mode = _Mode(self)
        self._told: set[tuple[str, str]] = set()
        self._replacements = Replacements()
        self.follows = False
        self.is_over = False

    # -- works -----------------------------------------------------------------------------------

    def begin(self, call: WatchedCall) -> None:
        """A call is about to use its tensors. Calls on one group run in order."""
        if self._pending and call.by_user:
            for tensors, writes in ((call.reads, False), (call.writes, True)):
                for tensor in tensors:
                    self.touch(tensor, writes, f"by {call.name}", call)

    def submitted(self, call: WatchedCall, work: Any) -> None:
        """The call has returned this work."""
        if work is None or not call.by_user or not self._can_follow(type(work)):
            return
        both = [(tensor, True) for tensor in call.writes]
        both += [(tensor, False) for tensor in call.reads if not call.writes]
        if call.writes and call.reads and call.reads[0] is not call.writes[0]:
            both += [(tensor, False) for tensor in call.reads]
        weak = ref(work)
        with self._lock:
            for tensor, written in both:
                if span := span_of(tensor):
                    pending = _Pending(call, weak, tensor, span, written)
                    self._pending.setdefault(span.storage, []).append(pending)
        self.look()

    def ended(self, work: Any) -> None:
        """The program knows that this work is over."""
        with self._lock:
            for storage in list(self._pending):
                left = [each for each in self._pending[storage] if each.work() not in (work, None)]
                if left:
                    self._pending[storage] = left
                else:
                    del self._pending[storage]
        self.look()

    def _can_follow(self, kind: type) -> bool:
        """Whether the ends of works of this class are known."""
        try:
            for name in _ENDS:
                owner = next((each for each in kind.__mro__ if name in vars(each)), None)
                if owner is not None:
                    self._replacements.replace(owner, name, partial(self._followed, name))
        except TypeError:  # a class in C
            return False
        return True

    def _followed(self, name: str, method: Any) -> Callable[..., Any]:
        def followed(work: Any, *given: Any, **named: Any) -> Any:
            result = method(work, *given, **named)
            is_over = bool(result) or name != "is_completed"
            is_told = sys._getframe(1).f_code.co_filename != torch_group.__file__
            if self._pending and is_over and is_told:  # else only the watch has learned it
                self.ended(work)
            return result

        return followed

    def stop(self) -> None:
        """Follow nothing any more."""
        self._replacements.undo()
        self.is_over = True
        self.look()

    # -- operators -------------------------------------------------------------------------------

    def look(self) -> None:
        """Enter the mode if it is needed and no other is on; leave it if it is ours and on top."""
        depth = torch._C._len_torch_dispatch_stack()
        is_top = depth and torch._C._get_dispatch_stack_at(depth - 1) is self._mode
        if is_top and (self.is_over or not (self._pending or self.follows)):
            _pop_mode()
        elif not depth and not self.is_over and (self._pending or self.follows):
            _push_mode(self._mode)

    @harmless
    def before(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """An operator is about to run."""
        kind = _kind_of(func)
        if self._pending and not kind.is_view:
            for position, value in enumerate(args):
                for tensor in tensors_in(value):
                    self.touch(tensor, position in kind.writes, f"by {kind.name}")
            for name, value in named.items():
                for tensor in tensors_in(value):
                    self.touch(tensor, name in kind.writes, f"by {kind.name}")

    def touch(
        self, tensor: torch.Tensor, writes: bool, how: str, call: WatchedCall | None = None
    ) -> None:
        """Something reads or writes a tensor."""
        span = span_of(tensor)
        for each in list(self._pending.get(span.storage, ())) if span else ():
            assert span is not None
            if not (writes or each.written) or not span.meets(each.span) or not each.work():
                continue
            in_order = call and call.group == each.call.group and call.name not in MESSAGES
            if in_order and each.call.name not in MESSAGES:
                continue
            self._tell(each, writes, how, call)

    def _tell(self, pending: _Pending, writes: bool, how: str, call: WatchedCall | None) -> None:
        line = calling_line() if call is None else call.site
        if (pending.call.site, line) in self._told:
            return
        self._told.add((pending.call.site, line))
        name = {"send": "isend", "recv": "irecv"}.get(pending.call.name, pending.call.name)
        does = "writes" if writes else "reads"
        unfinished = "fills" if pending.written else "sends"
        self._found(
            f"rank {self._rank()} {does} the tensor of its {name} ({pending.call.site}) "
            f"before it has waited for it ({line}, {how})",
            f"the {name} {unfinished} that memory until its work's wait() returns: wait first, or "
            "use another tensor",
            line,
        )


_DispatchMode: Any = TorchDispatchMode


@dataclass(frozen=True)
class _Kind:
    """What an operator does: the positions and names of arguments that it writes."""

    name: str
    is_view: bool
    writes: frozenset[int | str]


@functools.cache
def _kind_of(func: Any) -> _Kind:
    writes: set[int | str] = set()
    aliases = False
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes |= {position, argument.name}
        elif argument.alias_info is not None:
            aliases = True
    name = func._schema.name.partition("::")[2]
    is_view = aliases and not writes
    return _Kind(name, is_view, frozenset(writes))


class _Mode(_DispatchMode):  # type: ignore[misc]
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as without us; we do not see into it."""
        return True

    def __init__(self, races: Races) -> None:
        super().__init__()
        self._races = races

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        races, named = self._races, kwargs or {}
        if races.is_over:
            return func(*args, **named)
        races.before(func, args, named)
        result = func(*args, **named)
        if races.follows:
            harmless(races.after)(_kind_of(func).name, result, args, named)
        return result
