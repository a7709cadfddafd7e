"""Collectives on structures: dicts, lists, tuples, namedtuples and dataclasses of tensors, arrays,
plain numbers and None, the *leaves*, in few messages. The *skeleton* is the structure without its
leaves.

Every rank first sends a 16-byte digest of its structure. If two differ, all ranks raise, and the
group stays usable. Numbers travel as float64, int64, complex128 or bool.
"""

from __future__ import annotations

import copy
import dataclasses
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy
import torch

from unisono.collectives.arguments import reduction, refuse_type, result_or_work
from unisono.collectives.objects import all_gather_object
from unisono.collectives.ragged import all_gather_integers, device_of
from unisono.comm.communicator import Communicator
from unisono.comm.engine import native
from unisono.comm.reductions import NamedReduction as Op
from unisono.comm.reductions import PremulSum, has_meaning
from unisono.comm.shared_memory.error_texts import dtype_code
from unisono.comm.tensors import dtype_name, name_of_dtype

if TYPE_CHECKING:
    from unisono.plan.schedule import Schedule

_DTYPES: dict[type, torch.dtype] = {
    float: torch.float64,
    int: torch.int64,
    complex: torch.complex128,
    bool: torch.bool,
}
_NUMBERS = frozenset((bool, int, float, complex))
_BRACKETS = frozenset(("dict", "list", "tuple"))
_TENSORS = (torch.Tensor, numpy.ndarray)


def all_reduce(
    comm: Communicator,
    structure: Any,
    op: Any,
    async_op: bool,
    algorithm: str | Schedule | None = None,
    reproducible: bool | None = None,
) -> Any:
    known = reduction(op, comm, "all_reduce")
    tree = _take_apart_alike(comm, "all_reduce", structure, known)
    options: Any = {"algorithm": algorithm, "reproducible": reproducible}
    call = partial(comm.all_reduce, op=known, async_op=async_op, **options)
    return _call_in_place(comm, structure, tree, async_op, call)


def broadcast(comm: Communicator, structure: Any, src: int, async_op: bool) -> Any:
    tree = _take_apart_alike(comm, "broadcast", structure, None)
    return _call_in_place(
        comm, structure, tree, async_op, lambda row: comm.broadcast(row, src, async_op=async_op)
    )


def _take_apart_alike(comm: Communicator, operation: str, structure: Any, op: Op | None) -> Tree:
    """The structure taken apart, after checking that all ranks have the same one."""
    tree = _take_apart(comm, operation, structure)
    if op is not None:
        _check_meaning(comm, operation, tree, op)
    mine = struct.unpack("=2q", signature(tree))
    everyone = all_gather_integers(comm, mine, device_of(comm))
    if everyone.count(mine) < comm.size:
        found = difference(all_gather_object(description(tree), comm))
        raise ValueError(f"{operation} on group {comm.name}: the ranks' structures differ: {found}")
    return tree


def _take_apart(comm: Communicator, operation: str, structure: Any) -> Tree:
    try:
        tree = take_apart(structure)
    except TypeError as error:
        refuse_type(comm, operation, str(error))
    for number in tree.numbers:
        if type(number) is int and not -(2**63) <= number < 2**63:
            comm.reject_call(operation, f"{number} does not fit into 64 bits: pass a float")
    return tree


def _check_meaning(comm: Communicator, operation: str, tree: Tree, op: Op) -> None:
    name = "premul_sum" if isinstance(op, PremulSum) else op
    for dtype in map(name_of_dtype, tree.dtypes):
        if not has_meaning(name, dtype):
            where = paths_of(tree, dtype)
            reduction(op, comm, operation, *tree.tensors, where=where)
    for kind in {type(number) for number in tree.numbers}:
        sample = torch.empty(0, dtype=_DTYPES[kind])
        if not has_meaning(name, dtype_name(sample)):
            where = paths_of(tree, kind.__name__)
            reduction(op, comm, operation, sample, where=where)


def _call_in_place(
    comm: Communicator,
    structure: Any,
    tree: Tree,
    async_op: bool,
    call: Callable[[list[Any]], Any],
) -> Any:
    """Make the call on all leaves at once; returns the resulting structure."""
    rows = tree.tensors
    if not tree.are_distinct:  # each one once
        rows = list({id(tensor): tensor for tensor in rows}.values())
    if not tree.numbers:
        return result_or_work(call(rows) if rows else None, async_op, structure)
    device = device_of(comm)
    packed = {
        kind: torch.tensor(
            [number for number in tree.numbers if type(number) is kind], dtype=dtype, device=device
        )
        for kind, dtype in _DTYPES.items()
        if kind in map(type, tree.numbers)
    }
    work = call([*rows, *packed.values()])

    def finish() -> Any:
        queues = {kind: iter(row.tolist()) for kind, row in packed.items()}
        numbers = [next(queues[type(number)]) for number in tree.numbers]
        return _rebuild(structure, iter(tree.tensors), iter(numbers))

    return result_or_work(work, async_op, None, finish)


# -- taking structures apart, and putting them together again ------------------------------------


@dataclasses.dataclass(slots=True)
class Tree:
    """A structure taken apart: its tensors and arrays, its numbers, its skeleton, a digest of the
    dtypes and shapes, the set of dtypes, and whether no tensor occurs twice."""

    tensors: list[Any]
    numbers: list[Any]
    skeleton: Any = None
    shapes: bytes = b""
    dtypes: tuple[Any, ...] = ()
    are_distinct: bool = True


def take_apart(structure: Any) -> Tree:
    """Raises TypeError, with the path, for a leaf that is neither tensor, number nor None."""
    tree = Tree([], [])
    tree.skeleton = _walk(structure, tree, ())
    described = native.describe_shapes(tree.tensors)
    if described is not None:
        tree.shapes, places = described
        tree.dtypes = tuple(tree.tensors[place].dtype for place in places)
    else:  # there are arrays, or tensors that the engine rejects
        tree.shapes = b"".join(map(_describe_leaf, tree.tensors))
        tree.dtypes = tuple({leaf.dtype for leaf in tree.tensors})
    tree.are_distinct = len(set(map(id, tree.tensors))) == len(tree.tensors)
    return tree


def signature(tree: Tree) -> bytes:
    """16 bytes that are the same on two ranks if and only if skeletons, dtypes and shapes are."""
    return _digest(tree.skeleton, tree.shapes)


def _describe_leaf(leaf: Any) -> bytes:
    """Like `describe_shapes`, for a single tensor or array."""
    shape = tuple(leaf.shape)
    return struct.pack(f"={2 + len(shape)}q", dtype_code(dtype_name(leaf)), len(shape), *shape)


@lru_cache(maxsize=32)
def _digest(skeleton: Any, shapes: bytes) -> bytes:
    return blake2b(repr(skeleton).encode() + shapes, digest_size=16).digest()


def description(tree: Tree) -> list[list[str]]:
    """[path, what is there] for each node, outer ones first."""
    leaves = iter(tree.tensors)

    def nodes(skeleton: Any, path: str) -> Iterator[list[str]]:
        if isinstance(skeleton, str):
            what = skeleton
            if skeleton in ("tensor", "array"):
                leaf = next(leaves)
                what = f"{skeleton} of {dtype_name(leaf)} {tuple(leaf.shape)}"
            yield [path, what]
            return
        name, keys, below = skeleton
        if name in ("list", "tuple"):
            yield [path, f"{name} of {len(keys)}"]
        else:
            yield [path, f"{name} with {', '.join(map(repr, keys)) or 'nothing'}"]
        for key, child in zip(keys, below, strict=True):
            yield from nodes(child, path + _step(name, key))

    return list(nodes(tree.skeleton, ""))


def difference(descriptions: Sequence[Sequence[Sequence[str]]]) -> str | None:
    """The first path at which the ranks' structures differ, as text; None if they are equal."""
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
    if set(map(type, values)) == {torch.Tensor}:  # the usual case, and much faster than one by one
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


def _rebuild(node: Any, tensors: Iterator[Any], numbers: Iterator[Any]) -> Any:
    """A structure like this one, with other leaves."""
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


def paths_of(tree: Tree, dtype: str) -> str:
    """Where a structure has tensors or numbers of this dtype, for a message."""
    wanted = (dtype, f"tensor of {dtype}", f"array of {dtype}")
    found = [
        path or "the structure"
        for path, what in description(tree)
        if what.partition(" (")[0] in wanted
    ]
    return ", ".join(found[:3]) + (" and others" if len(found) > 3 else "")
