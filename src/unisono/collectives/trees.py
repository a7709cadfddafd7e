"""Taking structures apart and putting them together again.

A structure is children of dicts, lists, tuples, namedtuples and dataclasses, with tensors, arrays,
plain numbers and None at its ends, the *leaves*. Dicts are taken in the order of their keys, so
that ranks which filled theirs in different orders agree. A *skeleton* says how leaves hang
together; equal skeletons are equal tuples.
"""

from __future__ import annotations

import copy
import dataclasses
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import Any

import numpy
import torch

from unisono.comm.base import dtype_name
from unisono.comm.engine import describe_shapes
from unisono.comm.shared_memory.error_texts import dtype_code

_NUMBERS = frozenset((bool, int, float, complex))
_BRACKETS = frozenset(("dict", "list", "tuple"))
_leaf_type = attrgetter("dtype", "shape")
_TENSORS = (torch.Tensor, numpy.ndarray)


@dataclasses.dataclass(slots=True)
class Tree:
    """A structure taken apart: its tensors and arrays, its numbers, its skeleton, what stands for
    the dtypes and shapes of its tensors, which dtypes there are, and whether no tensor is there
    twice."""

    tensors: list[Any]
    numbers: list[Any]
    skeleton: Any = None
    shapes: bytes = b""
    dtypes: tuple[Any, ...] = ()
    are_distinct: bool = True

    @property
    def leaf_types(self) -> tuple[Any, ...]:
        """The dtype and the shape of each tensor."""
        return tuple(map(_leaf_type, self.tensors))


def take_apart(structure: Any) -> Tree:
    """Raises TypeError, with the path, for a leaf that is neither tensor, number nor None."""
    tree = Tree([], [])
    tree.skeleton = _walk(structure, tree, ())
    described = describe_shapes(tree.tensors)
    if described is not None:
        tree.shapes, places, tree.are_distinct = described
        tree.dtypes = tuple(tree.tensors[place].dtype for place in places)
    else:  # there are arrays, or tensors that the engine will refuse
        tree.shapes = b"".join(map(_describe_leaf, tree.tensors))
        tree.dtypes = tuple({leaf.dtype for leaf in tree.tensors})
        tree.are_distinct = len(set(map(id, tree.tensors))) == len(tree.tensors)
    return tree


def put_together(structure: Any, tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """A structure like this one, with other leaves instead of its own."""
    return _rebuild(structure, iter(tensors), iter(numbers))


def signature(tree: Tree, *, shapes: bool = True) -> bytes:
    """16 bytes that are the same on two ranks if and only if skeletons and, with `shapes`, dtypes
    and shapes are."""
    return _digest(tree.skeleton, tree.shapes if shapes else b"")


def _describe_leaf(leaf: Any) -> bytes:
    """What `describe_shapes` says of one tensor, for any tensor or array."""
    shape = tuple(leaf.shape)
    return struct.pack(f"={2 + len(shape)}q", dtype_code(dtype_name(leaf)), len(shape), *shape)


@lru_cache(maxsize=32)
def _digest(skeleton: Any, shapes: bytes) -> bytes:
    return blake2b(repr(skeleton).encode() + shapes, digest_size=16).digest()


def description(tree: Tree, *, shapes: bool = True) -> list[list[str]]:
    """[path, what is there] for each node, outer ones first."""
    return _describe(tree.skeleton, tree.leaf_types, shapes)


def difference(descriptions: Sequence[Sequence[Sequence[str]]]) -> str | None:
    """The first path at which ranks have different things, as text; None where there is none."""
    for rank, theirs in enumerate(descriptions):
        for (path, first), (_, other) in zip(descriptions[0], theirs, strict=False):
            if first != other:
                return f"{path or 'the structure'}: {first} on rank 0, {other} on rank {rank}"
    return None


def _walk(node: Any, tree: Tree, path: tuple[str, ...]) -> Any:
    kind = type(node)
    if kind is torch.Tensor or isinstance(node, _TENSORS):
        tree.tensors.append(node)
        return "array" if isinstance(node, numpy.ndarray) else "tensor"
    if kind in _NUMBERS:
        tree.numbers.append(node)
        return kind.__name__
    if node is None:
        return "None"
    name, keys, values = _open_node(node, path)
    if set(map(type, values)) == {torch.Tensor}:  # often, and much faster than one by one
        tree.tensors.extend(values)
        return (name, keys, ("tensor",) * len(keys))
    below = [
        _walk(value, tree, (*path, _step(name, key)))
        for key, value in zip(keys, values, strict=True)
    ]
    return (name, keys, tuple(below))


def _open_node(node: Any, path: tuple[str, ...]) -> tuple[str, tuple[Any, ...], Any]:
    """What a node is, its keys and its values."""
    if isinstance(node, dict):
        keys = _in_order(node)
        return "dict", keys, [node[key] for key in keys]
    if isinstance(node, (list, tuple)):
        if hasattr(node, "_fields"):
            return type(node).__name__, node._fields, node
        return "list" if isinstance(node, list) else "tuple", tuple(range(len(node))), node
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        names = tuple(field.name for field in dataclasses.fields(node))
        return type(node).__name__, names, [getattr(node, name) for name in names]
    where = "".join(path)
    raise TypeError(
        f"{f'{where}: ' if where else ''}{type(node).__name__} is neither a tensor, a number, None "
        "nor a structure of them"
    )


def _in_order(keys: dict[Any, Any]) -> tuple[Any, ...]:
    try:
        return tuple(sorted(keys))
    except TypeError:
        return tuple(sorted(keys, key=lambda key: (type(key).__name__, repr(key))))


def _step(name: str, key: Any) -> str:
    return f"[{key!r}]" if name in _BRACKETS else f".{key}"


def _describe(skeleton: Any, leaf_types: tuple[Any, ...], shapes: bool = True) -> list[list[str]]:
    rest = iter(leaf_types)

    def nodes(skeleton: Any, path: str) -> Iterator[list[str]]:
        if isinstance(skeleton, str):
            what = skeleton
            if skeleton in ("tensor", "array") and shapes:
                dtype, shape = next(rest)
                what = f"{skeleton} of {str(dtype).removeprefix('torch.')} {tuple(shape)}"
            yield [path, what]
            return
        name, keys, below = skeleton
        if name in ("list", "tuple"):
            yield [path, f"{name} of {len(keys)}"]
        else:
            yield [path, f"{name} with {', '.join(map(repr, keys)) or 'nothing'}"]
        for key, child in zip(keys, below, strict=True):
            yield from nodes(child, path + _step(name, key))

    return list(nodes(skeleton, ""))


def _rebuild(node: Any, tensors: Iterator[Any], numbers: Iterator[Any]) -> Any:
    if isinstance(node, _TENSORS):
        return next(tensors)
    if type(node) in _NUMBERS:
        return next(numbers)
    if node is None:
        return None
    name, keys, values = _open_node(node, ())
    children = [_rebuild(value, tensors, numbers) for value in values]
    if name in ("list", "tuple"):
        return children if name == "list" else tuple(children)
    if isinstance(node, tuple):
        return type(node)(*children)
    twin = copy.copy(node)
    for key, value in zip(keys, children, strict=True):
        if isinstance(node, dict):
            twin[key] = value
        else:
            object.__setattr__(twin, key, value)  # it may be frozen
    return twin


def paths_of(tree: Tree, dtypes: Sequence[str]) -> str:
    """Where a structure has tensors or numbers of these dtypes, for a message."""
    leaves = iter(tree.tensors)
    found = []
    for path, what in description(tree, shapes=False):
        if what in ("tensor", "array"):
            what = dtype_name(next(leaves))
        if what in dtypes:
            found.append(path or "the structure")
    return ", ".join(found[:3]) + (" and others" if len(found) > 3 else "")
