"""Dataclasses out of what JSON brings; every field is checked, for a file may hold anything."""

from __future__ import annotations

import functools
import math
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Built = TypeVar("Built")


def build(kind: type[Built], value: Any) -> Built:
    """`value`, which `asdict` and JSON have made of one, as a `kind` again.

    Raises TypeError, ValueError, KeyError or AttributeError if it is something else.
    """
    built: Built = _build(kind, value)
    return built


@functools.cache
def _types(kind: Any) -> dict[str, Any]:
    """The type of each field of a dataclass; none of anything else."""
    return get_type_hints(kind) if is_dataclass(kind) else {}


def _build(kind: Any, value: Any) -> Any:
    if types := _types(kind):
        return kind(**{name: _build(types[name], found) for name, found in value.items()})
    arguments = get_args(kind)
    if get_origin(kind) is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_build(each, found) for each, found in zip(kinds, value, strict=True))
    if arguments:  # or None
        return None if value is None else _build(arguments[0], value)
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits or (kind is float and not math.isfinite(value)):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
