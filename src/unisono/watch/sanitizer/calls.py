"""The calls of all groups, torch's and ours, with what each reads and writes."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from unisono.comm.communicator import Communicator
from unisono.comm.shared_memory.torch_reductions import reductions_by_hash
from unisono.torch_support import never_compiled
from unisono.watch.replacements import Replacements
from unisono.watch.stacks import calling_line, is_users
from unisono.watch.torch_group import COLLECTIVES

_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_PASSED_ON = (
    *(_OURS + folder for folder in ("watch", "collectives", "torch_backend", "comm")),
    *(
        os.path.join(os.path.dirname(dist.__file__), name)
        for name in ("distributed_c10d.py", "c10d_logger.py", "nn/functional.py")
    ),
)
"""Files through which a user's call passes before it comes here."""

_IN_PLACE = ("all_reduce", "broadcast", "reduce")
_Method = tuple[str, int | None, int | None]
"""The call's name, the position of what it writes, and of what it reads."""
_OF_COMMUNICATORS: dict[str, _Method] = {
    **{name: (name, 0, 0) for name in ("all_reduce", "broadcast")},
    **{name: (name, 0, 1) for name in ("all_gather", "reduce_scatter", "all_to_all")},
    "isend": ("isend", None, 0),
    "irecv": ("irecv", 0, None),
}
_METHODS: dict[str, _Method] = {
    **{
        method: (name, 0, 0 if name in _IN_PLACE else 1)
        for method, (operation, at) in COLLECTIVES.items()
        if (name := operation.name.lower()) and at >= 0
    },
    "send": ("send", None, 0),
    "recv": ("recv", 0, None),
    "recv_anysource": ("recv", 0, None),
}
"""The same by torch's names."""
_OPS = reductions_by_hash()
_SUMS = ("sum", "avg", "mean")
MESSAGES = ("send", "recv", "isend", "irecv")
_logger = logging.getLogger("unisono")


def harmless(look: Callable[..., Any]) -> Callable[..., Any]:
    """Return None where `look` raises: looking must never change what the program does."""

    @functools.wraps(look)
    def looked(*given: Any, **named: Any) -> Any:
        try:
            return look(*given, **named)
        except Exception:
            _logger.debug("unisono.watch: the sanitizer failed", exc_info=True)
            return None

    return looked


@dataclass(frozen=True)
class WatchedCall:
    """One call: `members` are global ranks, empty if unknown; `sums` says that it adds or averages.
    `by_user` is False for calls of DDP, of FSDP and of other libraries."""

    name: str
    group: int
    members: tuple[int, ...]
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]
    sums: bool
    site: str
    by_user: bool


class Listener(Protocol):
    """What is told of calls."""

    def begin(self, call: WatchedCall) -> None:
        """A call is about to start."""

    def submitted(self, call: WatchedCall, work: Any) -> None:
        """It has returned; `work` is None if it has finished."""


class WatchedCalls:
    """Tells a listener of the calls of groups of the followed classes."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._inside = threading.local()
        self._replacements, self._kinds = Replacements(), {dist.ProcessGroup}
        self.stop = self._replacements.undo
        self._members: dict[int, tuple[int, ...]] = {}
        self._follow(Communicator, _OF_COMMUNICATORS)

    def follow(self, group: Any) -> None:
        """Follow the groups of this one's class; those of torch's own classes cannot be."""
        kind = type(group)
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._follow(kind, _METHODS)

    def _follow(self, kind: type, methods: dict[str, _Method]) -> None:
        for name, what in methods.items():
            if vars(kind).get(name) is not None:
                self._replacements.replace(kind, name, partial(self._followed, what))
        if kind is not Communicator:
            never_compiled(kind)

    def _followed(self, what: _Method, method: Any) -> Callable[..., Any]:
        inside = self._inside

        def call(group: Any, *given: Any, **named: Any) -> Any:
            if getattr(inside, "a_call", False) or torch.compiler.is_compiling():
                return method(group, *given, **named)
            inside.a_call = True
            try:
                found = self._describe(group, what, given, named)
                if found is not None:
                    self._listener.begin(found)
                work = method(group, *given, **named)
                if found is not None:
                    self._listener.submitted(found, work)
                return work
            finally:
                inside.a_call = False

        return call

    @harmless
    def _describe(
        self, group: Any, what: _Method, given: tuple[Any, ...], named: dict[str, Any]
    ) -> WatchedCall | None:
        name, writes, reads = what
        if len(given) <= max(writes or 0, reads or 0):  # tensors by name: rare, and not worth it
            return None
        read = () if reads is None else tuple(tensors_in(given[reads]))
        written = () if writes is None else tuple(tensors_in(given[writes]))
        sums = False
        if name == "all_reduce":
            options = given[-1] if len(given) > 1 else named.get("op", "sum")
            op = getattr(options, "reduceOp", options)
            sums = (op if isinstance(op, str) else _OPS.get(hash(op), "")) in _SUMS
        elif name == "broadcast":  # whoever has it reads only; for others it is the same hazard
            given_root = given[1] if len(given) > 1 else named.get("src", 0)
            root = getattr(given_root, "rootRank", given_root)
            mine = group.rank if isinstance(group, Communicator) else group.rank()
            if root == mine:
                written = ()
        site, by_user = _origin(sys._getframe(3))
        return WatchedCall(name, id(group), self._ranks(group), read, written, sums, site, by_user)

    def _ranks(self, group: Any) -> tuple[int, ...]:
        if isinstance(group, Communicator):
            return group.global_ranks or ()
        if id(group) not in self._members:
            try:
                found = tuple(dist.get_process_group_ranks(group))
            except (ValueError, KeyError, RuntimeError):
                return ()
            self._members[id(group)] = found
        return self._members[id(group)]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a tensor, or in nested lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)


def _origin(frame: FrameType | None) -> tuple[str, bool]:
    """The user's line, and whether the call was made there and not by a library."""
    caller = frame
    while caller is not None and caller.f_code.co_filename.startswith(_PASSED_ON):
        caller = caller.f_back
    return calling_line(frame), caller is not None and is_users(caller.f_code.co_filename)
