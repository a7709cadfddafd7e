"""Calls that torch.distributed users write from habit: each error shows the right call."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from implementations import on_backends
from unisono import CollectiveMismatch, Message, UnisonoError
from unisono.comm.communicator import Communicator
from unisono.comm.factory import alone
from unisono.world.world import resolve

u: Any = unisono  # calls that type checkers reject


def outputs() -> list[torch.Tensor]:
    return [torch.zeros(2), torch.zeros(2)]


def values(tensors: Any) -> Any:
    return None if tensors is None else [tensor.tolist() for tensor in tensors]


X = torch.ones(2)
OUTPUT_FIRST: list[tuple[Callable[[Any], Any], str]] = [
    (lambda g: u.all_gather(outputs(), X, g), "outputs = unisono.all_gather(tensor)"),
    (lambda g: u.gather(X, outputs(), 0, g), "outputs = unisono.gather(tensor, dst)"),
    (lambda g: u.gather(X, None, 0, g), "outputs = unisono.gather(tensor, dst)"),
    (lambda g: u.scatter(X.clone(), outputs(), 0, g), "part = unisono.scatter(tensors, src)"),
    (lambda g: u.scatter(X.clone(), None, 0, g), "part = unisono.scatter(tensors, src)"),
    (lambda g: u.reduce_scatter(X, outputs(), "max", g), "unisono.reduce_scatter(tensors, op)"),
    (lambda g: u.all_gather(torch.zeros(4), X, g), "outputs = unisono.all_gather(tensor)"),
    (lambda g: u.all_gather(X, outputs(), group=g), "outputs = unisono.all_gather(tensor)"),
    (lambda g: u.all_gather([None, None], X, group=g), "outputs = unisono.all_gather(tensor)"),
    (lambda g: u.all_gather(outputs(), X, g, False, 5), "outputs = unisono.all_gather(tensor)"),
    (lambda g: u.gather({"a": X}, outputs(), 0, g), "outputs = unisono.gather(tensor, dst)"),
    (lambda g: u.gather(X, torch.zeros(4), group=g), "outputs = unisono.gather(tensor, dst)"),
    (lambda g: u.scatter(outputs(), outputs(), 0, g), "part = unisono.scatter(tensors, src)"),
    (lambda g: u.reduce_scatter(X, torch.ones(4), group=g), "unisono.reduce_scatter(tensors, op)"),
    (
        lambda g: u.reduce_scatter(outputs(), outputs(), dist.ReduceOp.SUM, g),
        "part = unisono.reduce_scatter(tensors, op)",
    ),
    (lambda g: u.all_to_all(outputs(), outputs(), g), "outputs = unisono.all_to_all(inputs)"),
    (lambda g: u.all_to_all(outputs(), outputs(), group=g), "all_to_all(inputs, out=outputs)"),
    (lambda g: u.all_to_all(X, X, [1, 1], [1, 1], g), "outputs = unisono.all_to_all(inputs)"),
    (lambda g: u.all_to_all(X, outputs(), group=g), "outputs = unisono.all_to_all(inputs)"),
    (lambda g: u.all_gather_object([None] * 2, {"a": 1}, group=g), "all_gather_object(obj)"),
    (lambda g: u.all_gather_object([None] * 2, "text", g), "unisono.all_gather_object(obj)"),
    (lambda g: u.gather_object("text", [None] * 2, 0, g), "unisono.gather_object(obj, dst)"),
    (lambda g: u.gather_object("text", [None] * 2, group=g), "unisono.gather_object(obj, dst)"),
    (lambda g: u.differentiable.all_gather(outputs(), X, g), "unisono.all_gather(tensor)"),
    (lambda g: u.differentiable.reduce_scatter(X, outputs(), group=g), "unisono.reduce_scatter("),
    (lambda g: u.differentiable.all_to_all(outputs(), outputs()), "unisono.all_to_all(inputs)"),
]


@on_backends(unisono=[1, 2], gloo=[2])
def test_outputs_first(process_group: Any, backend: str) -> None:
    """With torch's argument order every rank raises an error that shows the right call, and no
    tensor is filled."""
    comm = resolve(process_group)
    for group in (None, process_group, comm):
        for call, right in OUTPUT_FIRST:
            with pytest.raises((TypeError, ValueError)) as caught:
                call(group)
            assert right in str(caught.value)
            assert "unisono takes inputs first" in str(caught.value)
    assert X.tolist() == [1, 1]
    comm.barrier()  # all ranks did it, so the group stays usable


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_one_rank_alone_leaves_nobody_waiting(comm: Communicator) -> None:
    """On the group that it names."""
    pair = comm.split([0, 1])
    if comm.rank == 0:
        with pytest.raises(TypeError, match="unisono takes inputs first"):
            u.all_to_all(outputs(), outputs(), pair)
    else:
        with pytest.raises(CollectiveMismatch, match="rank 0"):
            unisono.all_to_all(X, pair)
    comm.barrier()


@on_backends(unisono=[2], gloo=[2])
def test_one_vocabulary(process_group: Any, backend: str) -> None:
    """The functions accept the Communicator's name for a root."""
    rank = dist.get_rank()
    mine = torch.full((1,), float(rank))
    for root in (0, 1):
        assert unisono.broadcast(mine.clone(), root=root).item() == root
        assert unisono.broadcast_tensor(mine.clone(), root=root).item() == root
        assert unisono.broadcast({"a": rank}, root=root)["a"] == root
        assert (unisono.reduce(mine, root=root) is None) == (rank != root)
        assert (unisono.gather(mine, root=root) is None) == (rank != root)
        assert (unisono.gather_tensor(mine, root=root, dst=root) is None) == (rank != root)
        parts = [mine, mine] if rank == root else None
        assert unisono.scatter(parts, root=root).item() == root
    for call in (
        lambda: unisono.broadcast(mine, 0, root=1),
        lambda: unisono.broadcast({"a": 1}, 0, root=1),
        lambda: unisono.reduce(mine, 0, root=1),
        lambda: unisono.gather(mine, 0, root=1),
        lambda: unisono.scatter(None, 0, root=1),
    ):
        with pytest.raises(ValueError, match=r"(0 and 1|1 and 0) are two different roots"):
            call()
    resolve(process_group).barrier()


@pytest.mark.ranks(2)
def test_a_group_in_the_place_of_something_else(comm: Communicator) -> None:
    for call in (
        lambda: u.all_reduce(X, comm),
        lambda: u.reduce(X, comm),
        lambda: u.broadcast(X, comm),
        lambda: u.reduce_scatter(X, comm),
        lambda: u.gather(X, comm),
    ):
        with pytest.raises(ValueError, match=r"pass a group as .*group=\.\.\."):
            call()
    comm.barrier()


@pytest.mark.ranks(2)
def test_what_is_not_a_group(process_group: Any) -> None:
    with unisono.ProcessGroupManager(dp_size=2) as manager:
        for group, right in [
            ([0, 1], r"unisono\.get_world\(\)\.split\(\[0, 1\]\)"),
            (range(2), r"unisono\.get_world\(\)\.split\(\[0, 1\]\)"),
            ("tp", "the group itself, such as manager.tp"),
            (manager, "such as manager.dp"),
            (manager.along("dp"), "pass its .comm"),
            (manager.to_device_mesh(), r'mesh\.get_group\("dp"\)'),
            (3.5, "a Communicator, a torch process group or None"),
        ]:
            with pytest.raises(UnisonoError, match=right):
                u.all_reduce(X.clone(), group=group)
            with pytest.raises(UnisonoError, match=right):
                u.all_gather(X, group=group)


@on_backends(unisono=[2], gloo=[2])
def test_a_group_that_this_process_is_not_in(process_group: Any, backend: str) -> None:
    first = dist.new_group([0])
    if dist.get_rank() == 0:
        assert unisono.all_gather(X, first)[0].equal(X)
        return
    for call in (
        lambda: unisono.all_reduce(X, group=first),
        lambda: unisono.all_gather(X, first),
        lambda: unisono.all_gather_object(1, first),
        lambda: unisono.get_rank(first),
    ):
        with pytest.raises(UnisonoError, match=r"not a member .*if dist.get_rank\(group\) >= 0"):
            call()


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_a_split_that_gave_none(comm: Communicator) -> None:
    """Rank 1 is not in the group but calls anyway: with None, which is the world."""
    world = comm.split([0, 1])
    assert world is not None
    few = world.split([0])
    if few is not None:
        few.all_reduce(X.clone())
    with pytest.raises(CollectiveMismatch) as caught:
        world.all_reduce(X.clone()) if few is None else world.barrier()
    hint = "rank 1 got None from split([0]), whose group it is not in"
    assert (hint in str(caught.value)) == (comm.rank == 1)


@on_backends(unisono=[4], gloo=[4])
def test_global_ranks_in_a_subgroup(process_group: Any, backend: str) -> None:
    comm = resolve(process_group)
    some = comm.split([1, 3])
    if some is None:
        return
    every = r"global ranks 1 and 3: for global rank 3 pass 1"
    for call in (
        lambda: unisono.broadcast(X.clone(), 3, some),
        lambda: unisono.reduce(X, 3, group=some),
        lambda: unisono.gather(X, 3, some),
        lambda: unisono.broadcast_object(1, 3, some),
        lambda: unisono.send(X, 3, some),
        lambda: unisono.irecv(X, 3, some),
        lambda: some.gather(None, X, 3),
        lambda: some.batch_isend_irecv([Message("send", X, 3)]),
    ):
        with pytest.raises(ValueError, match=every):
            call()
    with pytest.raises(ValueError, match=r"global ranks 1 and 3$"):
        unisono.broadcast(X.clone(), 2, some)
    with pytest.raises(ValueError, match=r"global ranks.* \[1, 0\]"):
        some.split([3, 1])
    some.barrier()
    some.close()


@on_backends(unisono=[2], gloo=[2])
def test_torch_s_messages(process_group: Any, backend: str) -> None:
    comm = resolve(process_group)
    peer = 1 - comm.rank
    received = torch.zeros(2)
    theirs = [dist.P2POp(dist.isend, X, peer), dist.P2POp(dist.irecv, received, peer)]
    for batch in (theirs, [Message("send", X, peer), theirs[1]], [("send", X, peer)]):
        for call in (u.batch_isend_irecv, comm.batch_isend_irecv):
            with pytest.raises(TypeError, match=r'Message\("send", tensor, peer\)'):
                call(batch)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a list of Messages"):
        u.batch_isend_irecv(Message("send", X, peer))
    with pytest.raises(ValueError, match='a "send" or a "recv", not \'isend\''):
        Message("isend", X, peer)  # type: ignore[arg-type]
    # none of these calls has started
    ours = (Message("send", X + comm.rank, peer), Message("recv", received, peer))
    for work in unisono.batch_isend_irecv(ours):
        work.wait()
    assert received.eq(1 + peer).all()


@pytest.mark.ranks(2)
def test_a_second_start(comm: Communicator) -> None:
    said = rf"this process is rank {comm.rank} of 2 on unisono\. unisono\.get_world\(\) returns"
    for again in (unisono.init, lambda: unisono.init("gloo"), lambda: unisono.setup(comm.rank, 2)):
        with pytest.raises(UnisonoError, match=said):
            again()


def test_torch_s_names() -> None:
    for name, right in [
        ("all_gather_into_tensor", "unisono.all_gather(tensor, out=wide)"),
        ("init_process_group", "unisono.init()"),
        ("new_group", "unisono.get_world().split(ranks)"),
        ("P2POp", 'unisono.Message("send", tensor, peer)'),
    ]:
        with pytest.raises(AttributeError) as caught:
            getattr(unisono, name)
        assert right in str(caught.value)
    with pytest.raises(AttributeError, match=r"no attribute 'nosuch'$"):
        u.nosuch  # noqa: B018


def test_what_is_suggested_exists() -> None:
    from unisono.torch_habits import _RIGHT_CALLS, INSTEAD, ON_COMMUNICATOR

    for text in (*INSTEAD.values(), *_RIGHT_CALLS.values(), *ON_COMMUNICATOR.values()):
        for part in text.split("unisono.")[1:]:
            assert part.partition("(")[0] in unisono.__all__
        for part in text.split("comm.")[1:]:
            assert re.split(r"\W", part)[0] in dir(alone())
    assert not set(INSTEAD) & set(unisono.__all__)
    assert not set(ON_COMMUNICATOR) & set(dir(alone()))


# -- launch ----------------------------------------------------------------------------------------


def work(base: int, factor: int = 1) -> int:
    return base * factor


def work_of_spawn(rank: int, base: int) -> int:
    return rank + base


@pytest.mark.parametrize(
    ("call", "right"),
    [
        (lambda: u.launch(work, 2, 5), r"launch\(work, ranks, \(5,\)\)"),
        (lambda: u.launch(work, 2, "ab"), r"launch\(work, ranks, \('ab',\)\)"),
        (lambda: u.launch(work, 2, (5,), 3), r"launch\(work, ranks, args, \{'name': value\}\)"),
        (lambda: u.launch(work, (5,), 2), r"launch\(fn, ranks, args\)"),
        (lambda: u.launch(work_of_spawn, 2, (5,)), r"call unisono\.get_rank\(\)"),
        (lambda: u.launch(work, 2), "missing a required argument: 'base'"),
        (lambda: u.launch(work, 2, (5,), {"other": 1}), "unexpected keyword argument 'other'"),
    ],
)
def test_launches_that_cannot_work(call: Callable[[], Any], right: str) -> None:
    with pytest.raises((TypeError, ValueError), match=right):
        call()


def test_a_launch_that_can() -> None:
    words = iter(["one"])  # can be iterated over only once
    assert unisono.launch(textwrap.indent, 1, words, {"prefix": "+"}) == ["+one"]  # type: ignore[arg-type]
    assert unisono.launch(max, 1, (3, 4)) == [4]  # it has no signature
