"""The native engine as Python sees it: the only module that touches `unisono._native`."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono import variables
from unisono.comm.engine.numbers import Note as Note
from unisono.comm.engine.numbers import Operation as Operation
from unisono.comm.engine.numbers import Status as Status
from unisono.errors import EngineUnavailable, SegmentError

if TYPE_CHECKING:
    from unisono.comm.engine.group_types import Group


class _Missing:
    """Stands in for the engine if it cannot be loaded: using it raises the reason. Checks, and
    settings of the engine itself, do nothing."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise EngineUnavailable(
            f"the native engine is not available ({self._reason}): it needs Linux on x86-64 or "
            "arm64 and a built package (`make native` in a source tree)"
        )

    def _do_nothing(self, *_: Any) -> None:
        return None

    def form(self, function: Any, answer: Any, method: type, most: int) -> Any:
        return function

    find_clash = overlaps_itself = describe_shapes = _do_nothing
    know_torch = keep_sites = compare_shapes = prepare_sites = hold_aborts = _do_nothing
    forget_operators = _do_nothing


native: Any
"""The engine: csrc/python/binding.c lists what it can do."""
works: tuple[type, ...] = ()
"""The classes of the works and messages that groups return."""
try:
    native = importlib.import_module("unisono._native")
    works = native.Work, native.Message
except ImportError as error:
    native = _Missing(str(error))


GPU_MARK = -2
"""Instead of a root, in descriptors of calls on GPU tensors: they match no call on CPU tensors."""


ABOUT_MESSAGES = 2**64 - 1
"""What a note is about if it is not about one call of the group."""

OF_PROGRAM, OF_SURVIVORS = 0, 1
"""Whose decisions: they have separate serials."""

ENDING_KNOWN = 1 << 32
"""In a failure's detail: the rest is the wait status of the process that ended."""

ENDING_SILENT = 1 << 33
"""In a failure's detail: the process no longer answers; it may not have ended."""


MOST_RANKS = 1024
"""Of a group: csrc/unisono.h's UN_MAX_RANKS."""


def create_segment(ranks: int, cores: int, nonce: int) -> int:
    try:
        return int(native.create_segment(ranks, cores, nonce))
    except OSError as error:
        raise SegmentError(
            f"cannot create shared memory for {ranks} ranks: {error.strerror}. Both memfd_create "
            "and an unnamed file in /dev/shm failed"
        ) from error


def engine_ns(seconds: float) -> int:
    """Seconds as the engine takes them; a century means forever."""
    return int(min(seconds, 3.2e9) * 1e9)


def open_group(descriptor: int, rank: int, ranks: int, nonce: int, timeout_s: float) -> Group:
    try:
        group: Group = native.Group(descriptor, rank, ranks, nonce, engine_ns(timeout_s))
    except OSError as error:
        raise SegmentError(f"cannot map the group's shared memory: {error.strerror}") from error
    return group


def tell_closing(group: Group) -> None:
    """Publish in a group, before this process leaves it, on which line of its program it does;
    unless it has given a reason already."""
    if at := native.site_of(sys._getframe(1)):
        group.write_note(Note.REASON, ABOUT_MESSAGES, f"closed the group at {at}")


# -- groups whose communicators are gone ---------------------------------------------------------

_abandoned_groups: list[Group] = []
"""A group ends with its last reference; works that were never waited for hold one, until they
are done and checked: whenever a communicator is made or dropped, in any thread, at any moment."""


def abandon_group(group: Group) -> None:
    """Let a group end once its works are done."""
    _abandoned_groups.append(group)
    end_abandoned_groups()


def end_abandoned_groups() -> None:
    for group in list(_abandoned_groups):
        if not group.release_works():
            with contextlib.suppress(ValueError):  # another thread was faster
                _abandoned_groups.remove(group)


# -- records and sites -------------------------------------------------------------------------


def compare_shapes(by_default: bool) -> None:
    """Whether groups of this process also compare tensor shapes, with ranks that do so too;
    UNISONO_CHECK_SHAPES overrides it."""
    asked = variables.CHECK_SHAPES.read_or_warn()
    native.compare_shapes(by_default if asked is None else asked)


def where_is_program() -> str:
    """The program's current line, for a peer whose wait for us fails."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename == threading.__file__:
        frame = frame.f_back  # a program that waits inside one of our calls, in Python
    return (frame is not None and native.site_of(frame)) or "an unknown line"


_hidden = [os.path.dirname(variables.__file__)]
_shown: list[str] = []
_WRAPPERS = "contextlib", "typing_extensions", "warnings"
"""Modules of Python that call what they wrap: their lines are not the program's."""


def hide_files(folder: str) -> None:
    """Never report a site in files of this folder: they are not the user's program."""
    _hidden.append(folder)
    _prepare_sites(where_is_program)


def show_files(folder: str) -> None:
    """Report sites in files of this folder of ours, which calls us as a user's program does."""
    if folder not in _shown:
        _shown.append(folder)
        _prepare_sites(where_is_program)


def _prepare_sites(where: Callable[[], str] | None) -> None:
    hidden, shown = ([folder + os.sep for folder in them] for them in (_hidden, _shown))
    hidden += [str(sys.modules[name].__file__) for name in _WRAPPERS if name in sys.modules]
    native.prepare_sites(tuple(hidden), tuple(shown), where)


_prepare_sites(where_is_program)
compare_shapes(by_default=False)
atexit.register(_prepare_sites, None)
