"""Methods that are replaced while somebody watches: several may, and stop in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Around = Callable[[Any], Any]
"""What to call instead of a method."""


class _Replaced:
    """A method of a class that is replaced."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name
        self._usual, self._is_own = getattr(owner, name), name in vars(owner)
        self.around: list[Around] = []

    def put(self, around: list[Around]) -> None:
        """Have these called instead, each around those before it; the usual one if there are none.
        Raises TypeError for a class in C."""
        method = self._usual
        for each in around:
            method = functools.wraps(method)(each(method))
        if around or self._is_own:
            setattr(self._owner, self._name, method)
        else:
            delattr(self._owner, self._name)
        self.around = around


_all: dict[tuple[Any, str], _Replaced] = {}


class Replacements:
    """The methods that one who watches has replaced."""

    def __init__(self) -> None:
        self._mine: dict[tuple[Any, str], Around] = {}

    def replace(self, owner: Any, name: str, around: Around) -> None:
        """Call `around(method)` instead of a method, once. Raises TypeError for a class in C."""
        key = owner, name
        if key not in self._mine:
            replaced = _all.get(key) or _Replaced(owner, name)
            replaced.put([*replaced.around, around])
            _all[key], self._mine[key] = replaced, around

    def undo(self) -> None:
        """Replace nothing any more."""
        while self._mine:
            key, around = self._mine.popitem()
            _all[key].put([each for each in _all[key].around if each is not around])
            if not _all[key].around:
                del _all[key]
