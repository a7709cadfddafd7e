"""Structures of tensors and numbers: reduced and broadcast whole."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch

import unisono
from unisono.comm.communicator import Communicator

RANKS = [1, 2, 3, 4, 8]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Batch:
    ids: Any
    mask: Any = None
    notes: Any = field(default_factory=dict)


def model(rank: int) -> dict[str, Any]:
    """A structure with every kind of node; every leaf is rank + 1 times a constant."""
    one = rank + 1.0
    return {
        "layers": [torch.full((3,), one), torch.full((2, 2), 2 * one, dtype=torch.float64)],
        "pair": Pair(torch.tensor(one), (torch.full((1,), rank + 1), None)),
        "batch": Batch(torch.full((4,), one)[::2], notes={3: numpy.full(2, one), 1: torch.ones(0)}),
        "loss": 0.5 * one,
        "steps": rank + 1,
        "weird": complex(0, one),
    }


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.ranks(RANKS)
def test_every_leaf_is_reduced(comm: Communicator, async_op: bool) -> None:
    mine = model(comm.rank)
    result = unisono.all_reduce(mine, group=comm, async_op=async_op)
    result = result.wait() if async_op else result
    total = comm.size * (comm.size + 1) / 2
    assert list(result) == list(mine)
    assert result["layers"][0] is mine["layers"][0]
    assert result["layers"][0].tolist() == [total] * 3
    assert result["layers"][1].tolist() == [[2 * total] * 2] * 2
    assert isinstance(result["pair"], Pair)
    assert result["pair"].left.item() == total
    assert result["pair"].right[0].tolist() == [int(total)]
    assert result["pair"].right[1] is None
    assert isinstance(result["batch"], Batch)
    assert result["batch"].ids.tolist() == [total] * 2
    assert result["batch"].notes[3].tolist() == [total] * 2
    assert list(result["batch"].notes) == [3, 1]
    assert (result["loss"], result["steps"], result["weird"]) == (0.5 * total, total, total * 1j)
    assert type(result["steps"]) is int
    assert (mine["loss"], mine["steps"]) == (0.5 * (comm.rank + 1), comm.rank + 1)


@pytest.mark.ranks(2)
def test_a_structure_without_numbers_comes_back_itself(comm: Communicator) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.ones(2).requires_grad_()]
    assert unisono.all_reduce(parameters, "mean") is parameters
    assert parameters[0].tolist() == [1] * 3
    assert unisono.all_reduce([]) == []
    assert unisono.all_reduce({"a": None}) == {"a": None}


@pytest.mark.ranks(2)
def test_a_tensor_that_appears_twice_is_reduced_once(comm: Communicator) -> None:
    tied = torch.ones(3)
    result = unisono.all_reduce({"in": tied, "out": tied, "n": 1})
    assert tied.tolist() == [2] * 3
    assert result["in"] is result["out"] is tied


@pytest.mark.ranks([2, 3])
def test_dicts_agree_whatever_order_they_were_filled_in(comm: Communicator) -> None:
    keys = ["b", "a", "c"] if comm.rank else ["c", "b", "a"]
    for kind in (dict, OrderedDict, lambda pairs: defaultdict(list, pairs)):
        mine = kind([(key, torch.tensor(float(ord(key)))) for key in keys])
        result = unisono.all_reduce(mine, "mean")
        assert {key: value.item() for key, value in result.items()} == {
            key: ord(key) for key in keys
        }
        assert type(result) is type(mine)
    assert unisono.all_reduce({1: 1, "1": 2, None: 3}) == {
        1: comm.size,
        "1": 2 * comm.size,
        None: 3 * comm.size,
    }


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.ranks(RANKS)
def test_broadcast_fills_every_leaf(comm: Communicator, async_op: bool) -> None:
    src = comm.size - 1
    mine = model(comm.rank)
    result = unisono.broadcast(mine, src, comm, async_op=async_op)
    result = result.wait() if async_op else result
    theirs = model(src)
    assert mine["layers"][1].equal(theirs["layers"][1])
    assert result["pair"].right[0].equal(theirs["pair"].right[0])
    assert (result["loss"], result["steps"]) == (theirs["loss"], theirs["steps"])


def differing(rank: int) -> dict[str, tuple[Any, str]]:
    """Structures of which the last rank's differs, with the error's text."""
    last = rank == 2
    two = torch.ones(2)
    return {
        "shape": (
            {"layer": [1.0, two, torch.ones(3 if last else 2)]},
            r"\['layer'\]\[2\]: tensor of float32 \(2,\) on rank 0, tensor of float32 \(3,\) on ra",
        ),
        "dtype": (
            {"a": two.double() if last else two},
            r"\['a'\]: tensor of float32 \(2,\) on rank 0, tensor of float64 \(2,\) on rank 2",
        ),
        "key": (
            {"a": two, "b" if last else "c": two},
            r"the structure: dict with 'a', 'c' on rank 0, dict with 'a', 'b' on rank 2",
        ),
        "length": ([two] * (4 if last else 3), "the structure: list of 3 on rank 0, list of 4 on"),
        "kind": (Pair(two, [two] if last else (two,)), r"\.right: tuple of 1 on rank 0, list of 1"),
        "number": ({"n": [1 if last else 1.0]}, r"\['n'\]\[0\]: float on rank 0, int on rank 2"),
        "none": ((None if last else two,), r"\[0\]: tensor of float32 \(2,\) on rank 0, None on r"),
    }


@pytest.mark.ranks(3)
def test_structures_that_differ_are_an_error_everywhere_with_the_path(comm: Communicator) -> None:
    for structure, text in differing(comm.rank).values():
        with pytest.raises(ValueError, match=text):
            unisono.all_reduce(structure)
        with pytest.raises(ValueError, match=text):
            unisono.broadcast(structure)
    assert unisono.all_reduce([1]) == [3]  # the group stays usable


@pytest.mark.ranks([1, 2])
def test_leaves_that_cannot_be_reduced_are_named(comm: Communicator) -> None:
    with pytest.raises(TypeError, match=r"\['a'\]\[1\]: str is neither a tensor, a number"):
        unisono.all_reduce({"a": [1, "x"]})
    with pytest.raises(TypeError, match=r"\.mask: object is neither"):
        unisono.all_reduce(Batch(torch.ones(1), object()))
    with pytest.raises(TypeError, match=r"\['a'\]\[0\]: avg is not defined for int32.*float"):
        unisono.all_reduce({"a": [torch.ones(1, dtype=torch.int32)], "b": 1.0}, "mean")
    with pytest.raises(TypeError, match=r"\['n'\]: avg is not defined for int64"):
        unisono.all_reduce({"n": 3, "b": 1.0}, "mean")
    for call in (unisono.all_reduce, unisono.broadcast):
        with pytest.raises(ValueError, match="64 bits"):
            call([2**63])
    with pytest.raises(TypeError, match="out="):
        unisono.all_reduce([1], out=[2])
    assert unisono.all_reduce([True, 2.0], "max") == [True, 2.0]


@pytest.mark.ranks([2, 4])
def test_a_thousand_small_tensors(comm: Communicator) -> None:
    names = [f"layer.{i}" for i in range(1000)]
    mine = {name: torch.full((i % 7,), float(i)) for i, name in enumerate(names)}
    unisono.all_reduce(mine)
    assert all((mine[name] == i * comm.size).all() for i, name in enumerate(names))
