"""Stacks of this process, as reports have them."""

from __future__ import annotations

import gc
import weakref

from unisono.watch.stacks import own_stacks


class Thing:
    pass


def look_with_something() -> tuple[weakref.ref[Thing], str]:
    thing = Thing()
    return weakref.ref(thing), own_stacks()[0].frames[1].function


def test_looking_at_stacks_keeps_nothing_alive() -> None:
    """A group ends when its last reference goes: none may stay in a frame until it is collected."""
    gc.collect()
    gc.disable()
    try:
        known, function = look_with_something()
        assert function == "look_with_something"
        assert known() is None
    finally:
        gc.enable()
