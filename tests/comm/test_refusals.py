"""A call that one rank refuses, for its form or for an argument: every member raises at once and
repeats that rank's own sentence; if all refuse it, the group goes on (docs/reliability.md)."""

from __future__ import annotations

import inspect
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono
from ranks import attempt, subgroup
from unisono import CollectiveMismatch, MessageMismatch, plan
from unisono.comm.communicator import Communicator

AT_ONCE_S = 6.0  # far less than the timeout; on an idle machine a few milliseconds

Right = tuple[tuple[Any, ...], dict[str, Any]]


def right_arguments(group: Communicator, name: str) -> Right:
    """Valid positional arguments of a method or a function, and named ones."""
    x, wide, on_root = torch.ones(2), torch.ones(2 * group.size), group.rank == 0
    methods: dict[str, Right] = {
        "comm.all_reduce": ((x,), {}),
        "comm.reduce": ((x,), {}),
        "comm.broadcast": ((x,), {}),
        "comm.all_gather": ((wide, x), {}),
        "comm.reduce_scatter": ((x, wide), {}),
        "comm.gather": ((wide if on_root else None, x), {}),
        "comm.scatter": ((x, wide if on_root else None), {}),
        "comm.all_to_all": ((wide, wide.clone()), {}),
        "comm.barrier": ((), {}),
        "comm.empty": ((3,), {}),
        "unisono.scatter": ((wide if on_root else None,), {"group": group}),
        "unisono.reduce_scatter": ((wide,), {"group": group}),
        "unisono.all_to_all": ((wide,), {"group": group}),
        "unisono.barrier": ((), {"group": group}),
        "unisono.all_gather_object": (("text",), {"group": group}),
        "unisono.broadcast_object": (("text",), {"group": group}),
        "unisono.share_tensor": ((x,), {"group": group}),
    }
    return methods.get(name, ((x,), {"group": group}))


METHODS = (
    "all_reduce reduce broadcast all_gather reduce_scatter gather scatter all_to_all barrier empty"
)
FUNCTIONS = (
    "all_reduce reduce broadcast all_gather reduce_scatter gather scatter all_to_all barrier "
    "reduce_tensor all_gather_object gather_object broadcast_object share_tensor"
)
NAMES = [f"comm.{name}" for name in METHODS.split()] + [
    f"unisono.{name}" for name in FUNCTIONS.split()
]


def spoiled(function: Any, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Right]:
    """The same call in each wrong form, by the sentence that it deserves."""
    first = next(iter(inspect.signature(function).parameters))
    cases: dict[str, Right] = {
        "got an unexpected keyword argument 'wrong'": (given, {**named, "wrong": 1}),
        "": ((*given, *[None] * 9), named),
    }
    if given:
        cases[f"multiple values for argument '{first}'"] = (given, {**named, first: given[0]})
        if first != "tensors":  # a scatter's may be left out
            cases["missing a required argument"] = ((), named)
    if "reduce" in function.__name__ and first.startswith(("tensor", "output")):
        cases["unknown reduction 'no'"] = (given, {**named, "op": "no"})
    return cases


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.ranks([2, 4], timeout_s=60)
def test_what_one_rank_refuses_every_rank_hears(comm: Communicator, name: str) -> None:
    place, _, short = name.partition(".")
    for number in range(9):
        group = subgroup(comm, list(range(comm.size)))
        function = getattr(group if place == "comm" else unisono, short)
        given, named = right_arguments(group, name)
        cases = list(spoiled(function, given, named).items())
        if number == len(cases):
            group.close()
            return
        sentence, (wrong, wrongly_named) = cases[number]
        bad = (number + len(name)) % comm.size
        begun = time.monotonic()
        if comm.rank == bad:
            error = attempt(function, *wrong, **wrongly_named)
        else:
            error = attempt(function, *given, **named)
        assert time.monotonic() - begun < AT_ONCE_S
        told = unisono.broadcast_object(str(error), src=bad, group=comm)
        assert sentence in told, told
        if comm.rank == bad:
            assert isinstance(error, (TypeError, ValueError)), error
        else:
            assert isinstance(error, CollectiveMismatch), (name, sentence, error)
            reason = told.partition(": ")[2]  # without the name of the group
            assert reason[:200] in str(error), (reason, error)
        assert isinstance(attempt(group.barrier), CollectiveMismatch), "not poisoned"
        comm.barrier()
        group.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.ranks(2)
def test_a_group_whose_ranks_all_refuse_a_call_goes_on(comm: Communicator, name: str) -> None:
    place, _, short = name.partition(".")
    function = getattr(comm if place == "comm" else unisono, short)
    for wrong, named in spoiled(function, *right_arguments(comm, name)).values():
        assert isinstance(attempt(function, *wrong, **named), (TypeError, ValueError))
    comm.barrier()


WRONG_MESSAGES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "list is neither a tensor nor an array": (([1],), {}),
    "too many arguments": ((torch.ones(1),), {}),
    "got an unexpected keyword argument 'wrong'": ((torch.ones(1),), {"wrong": 1}),
}


@pytest.mark.parametrize("owner", ["comm", "unisono"])
@pytest.mark.parametrize("sentence", WRONG_MESSAGES)
@pytest.mark.parametrize("sends", [True, False], ids=["send", "recv"])
@pytest.mark.ranks(2, timeout_s=60)
def test_a_refused_message_tells_its_peer(
    comm: Communicator, sends: bool, sentence: str, owner: str
) -> None:
    (tensor,), named = WRONG_MESSAGES[sentence]
    for begins in ("", "i"):
        group = subgroup(comm, [0, 1])
        more = {} if owner == "comm" else {"group": group}
        there: Any = group if owner == "comm" else unisono
        if comm.rank == 0:
            call: Callable[..., Any] = getattr(there, begins + ("send" if sends else "recv"))
            many = {"too many arguments": ([0, 0] if owner == "comm" else [group, 0])}
            extra = many.get(sentence, [])
            more = {} if extra else more
            error = attempt(call, tensor, 1, *extra, **named, **more)
            assert isinstance(error, TypeError), error
            assert sentence in str(error)
        else:
            error = attempt(group.recv if sends else group.send, torch.ones(1), 0)
            assert isinstance(error, MessageMismatch), error
            assert f"rank 0 refused its {'send' if sends else 'recv'} (tag 0)" in str(error)
            assert sentence in str(error)
        assert isinstance(attempt(group.barrier), MessageMismatch), "not poisoned"
        comm.barrier()
        group.close()


@pytest.mark.parametrize("name", [*unisono.math.__all__, "run_schedule"])
@pytest.mark.ranks(2)
def test_a_wrong_form_of_a_larger_function_is_heard(comm: Communicator, name: str) -> None:
    group = subgroup(comm, [0, 1])
    room = unisono if name == "run_schedule" else unisono.math
    named: dict[str, Any] = {"x": torch.ones(2), "dim": 0, "group": group}
    if name == "weighted_sum":
        named["weight"] = 1.0
    if name == "run_schedule":
        schedule = plan.find("all_reduce", "ring").schedule(2)
        named = {"schedule": schedule, "comm": group, "output": torch.ones(2)}
    error = attempt(getattr(room, name), **named, **({} if comm.rank else {"wrong": 1}))
    assert "got an unexpected keyword argument 'wrong'" in str(error)
    assert f": call it as {room.__name__}.{name}({next(iter(named))}, " in str(error)
    assert isinstance(error, CollectiveMismatch if comm.rank else TypeError), error
    comm.barrier()
    group.close()


LIMITS = {f"timeout_s={limit!r} is not a positive": limit for limit in (-5, 0, "5", float("nan"))}


@pytest.mark.parametrize("sentence", [*LIMITS, "rank 0 is the source (src=0), but passed None"])
@pytest.mark.ranks(2)
def test_an_argument_is_named_to_all(comm: Communicator, sentence: str) -> None:
    group, bad = subgroup(comm, [0, 1]), comm.rank == 0
    if sentence in LIMITS:
        error = attempt(group.barrier, timeout_s=LIMITS[sentence] if bad else None)
    else:
        error = attempt(unisono.scatter, None, group=group)
    assert isinstance(error, ValueError if bad else CollectiveMismatch), error
    assert sentence in str(error)
    comm.barrier()
    group.close()


@pytest.mark.ranks(2)
def test_a_batch_of_messages_without_messages_leaves_the_group_usable(comm: Communicator) -> None:
    if comm.rank == 0:
        for owner, call in (("comm", comm.batch_isend_irecv), ("unisono", unisono)):
            error = attempt(getattr(call, "batch_isend_irecv", call))
            assert isinstance(error, TypeError), error
            assert f"call it as {owner}.batch_isend_irecv(messages" in str(error)
    comm.barrier()


@pytest.mark.ranks(2)
def test_a_message_that_both_sides_refuse_leaves_the_group_usable(comm: Communicator) -> None:
    for _ in range(3):
        call = comm.send if comm.rank == 0 else comm.recv
        assert isinstance(attempt(call, [1], 1 - comm.rank), TypeError)
    x = torch.full((2,), float(comm.rank))
    if comm.rank == 0:
        comm.send(x, 1)
    else:
        comm.recv(x, 0)
    assert not x.any()


def test_the_real_signatures_are_seen() -> None:
    assert str(inspect.signature(Communicator.send)).startswith("(self, tensor: 'Tensor', dst")
    assert Communicator.all_reduce.__name__ == "all_reduce"
    assert (Communicator.barrier.__doc__ or "").startswith("Return once every rank")
    assert inspect.isroutine(Communicator.all_gather)
    assert pickle.loads(pickle.dumps(unisono.all_reduce)) is unisono.all_reduce
    assert pickle.loads(pickle.dumps(Communicator.send)) is Communicator.send
