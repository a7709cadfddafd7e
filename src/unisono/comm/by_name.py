"""The Communicators of this process by their names, which torch's operators take."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING

from unisono.comm.engine import native
from unisono.errors import GroupClosed

if TYPE_CHECKING:
    from unisono.comm.communicator import Communicator

_all: weakref.WeakSet[Communicator] = weakref.WeakSet()


def add_by_name(comm: Communicator) -> None:
    """A new one; operators no longer use an earlier one of this name unasked."""
    _all.add(comm)
    native.forget_operators(comm.name)


def communicator_named(name: str) -> Communicator:
    """The open Communicator of this name; if there is none, a closed one, whose calls say so.
    Raises ValueError if there is neither, or if several are open."""
    if len(_open(name)) > 1:
        gc.collect()  # one that the program has dropped does not count
    known, is_open = list(_all), _open(name)
    named = [comm for comm in known if comm.name == name]
    if len(is_open) > 1:
        raise ValueError(f"{len(is_open)} groups of this process are named {name!r}: close one")
    if not named:
        names = ", ".join(sorted({repr(comm.name) for comm in known})) or "none"
        raise ValueError(
            f"no group of this process is named {name!r}: pass the `name` of a Communicator that "
            f"the program still holds, of these: {names}"
        )
    return (is_open or named)[0]


def _open(name: str) -> list[Communicator]:
    named = [comm for comm in _all if comm.name == name]
    return [comm for comm in named if not isinstance(comm.errored, GroupClosed)]
