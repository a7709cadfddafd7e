"""torch.ops.unisono: the engine's calls from eager and compiled programs, against arithmetic in one
process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unisono
import unisono.operators
from unisono.comm.communicator import Communicator

RANKS = [1, 2, 3]
ops: Any = torch.ops.unisono


def rows(comm: Communicator, *shape: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Every rank's tensor, of small integers."""
    make = torch.Generator().manual_seed(len(shape))
    return [torch.randint(-9, 9, shape, generator=make).to(dtype) for _ in range(comm.size)]


def modes() -> list[Any]:
    """Where a program may call an operator: with gradients Python looks first."""
    return [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_in_place(comm: Communicator, dtype: torch.dtype) -> None:
    for mode in modes():
        for length in (0, 1, 3, 5000, 100_000):
            with mode():
                check_in_place(comm, rows(comm, length, dtype=dtype), dtype)


def check_in_place(comm: Communicator, given: list[torch.Tensor], dtype: torch.dtype) -> None:
    group, mine, length = comm.name, given[comm.rank], len(given[0])
    x = mine.clone()
    ops.all_reduce_(x, group)
    assert torch.equal(x, torch.stack(given).sum(0).to(dtype))
    if not dtype.is_complex:
        x = mine.clone()
        ops.all_reduce_(x, group, "max")
        assert torch.equal(x, torch.stack(given).amax(0))
    x = mine.clone()
    ops.broadcast_(x, group, comm.size - 1)
    assert torch.equal(x, given[-1])
    x = mine.clone()
    ops.sum_to_root_(x, group, 0)
    total = torch.stack(given).sum(0).to(dtype)
    assert torch.equal(x, total if comm.rank == 0 else torch.zeros_like(total))
    everyone = torch.empty(comm.size, length, dtype=dtype)
    ops.all_gather_(everyone, mine, group)
    assert torch.equal(everyone, torch.stack(given))
    wide = [torch.cat([row * (part + 1) for part in range(comm.size)]) for row in given]
    x = torch.empty_like(mine)
    ops.reduce_scatter_(x, wide[comm.rank], group)
    assert torch.equal(x, (torch.stack(given) * (comm.rank + 1)).sum(0).to(dtype))
    x = torch.empty_like(wide[0])
    ops.all_to_all_(x, wide[comm.rank], group)
    assert torch.equal(x, torch.cat([row * (comm.rank + 1) for row in given]))


@pytest.mark.ranks(4)
def test_reductions_of_a_reproducible_group(comm: Communicator) -> None:
    """They add in a tree, as the group's methods do, whether or not Python runs in the call."""
    found = []
    with torch.no_grad():
        for comm.reproducible in (True, True, False):
            x = torch.tensor([[1e8, 1.0, -1e8, 1.0][comm.rank]])
            ops.all_reduce_(x, comm.name)
            found.append(x.item())
    assert found == [0.0, 0.0, 1.0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_python_runs_in_a_call(comm: Communicator, mode: Any) -> None:
    """Once the group is known, only the line of the program that makes the call."""
    calls: dict[str, Callable[[Any], Any]] = {
        "all_reduce_": lambda x: ops.all_reduce_(x, comm.name),
        "broadcast_": lambda x: ops.broadcast_(x, comm.name, 1),
        "sum_to_root_": lambda x: ops.sum_to_root_(x, comm.name, 1),
        "all_gather_": lambda x: ops.all_gather_(wide, x, comm.name),
        "reduce_scatter_": lambda x: ops.reduce_scatter_(x, wide, comm.name),
        "all_to_all_": lambda x: ops.all_to_all_(wide, torch.ones(8), comm.name),
    }
    seen: list[str] = []
    with mode():
        wide, x = torch.ones(8), torch.ones(4)
        ops.all_reduce_(x, comm.name)
        for name, call in calls.items():
            seen.clear()
            sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_filename))
            call(x)
            sys.setprofile(None)
            ours = [file for file in seen if "/unisono/" in file]
            assert len(ours) <= 4, (name, ours)  # enter and leave `raising_ours`, and calls in it


@pytest.mark.ranks(2)
def test_any_layout(comm: Communicator) -> None:
    """What the engine leaves to Python: strided tensors, lazy ones, overlapping ones."""
    with torch.no_grad():
        for _ in range(2):  # the second time the group is known
            wide = torch.arange(12.0).view(3, 4)
            ops.all_reduce_(wide[:, 1], comm.name)
            assert wide[:, 1].tolist() == [2, 10, 18]
            assert wide[:, 0].tolist() == [0, 4, 8]
            z = torch.tensor([1 + 2j])
            ops.all_reduce_(z.conj(), comm.name)
            assert z.tolist() == [2 + 4j]
            both = torch.arange(4.0) + comm.rank
            with pytest.raises(ValueError, match="memory"):
                ops.all_gather_(both, both[1:3], comm.name)


@pytest.mark.ranks(RANKS)
def test_autograd_sees_writes(comm: Communicator) -> None:
    weight = torch.ones(2, requires_grad=True)
    for mode in (torch.enable_grad, torch.no_grad):
        x = torch.ones(2)
        y = (weight * x).sum()
        with mode():
            ops.all_reduce_(x, comm.name)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    with pytest.raises(ValueError, match="requires a gradient"):
        ops.all_reduce_(weight * 2, comm.name)


FUNCTIONAL: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "all_reduce": (
        lambda x, comm: ops.all_reduce(x, comm.name),
        lambda xs, rank: torch.stack(xs).sum(0),
    ),
    "avg": (
        lambda x, comm: ops.all_reduce(x, comm.name, "avg"),
        lambda xs, rank: torch.stack(xs).mean(0),
    ),
    "broadcast": (
        lambda x, comm: ops.broadcast(x, comm.name, comm.size - 1),
        lambda xs, rank: xs[-1],
    ),
    "sum_to_root": (
        lambda x, comm: ops.sum_to_root(x, comm.name),
        lambda xs, rank: torch.stack(xs).sum(0) * (rank == 0),
    ),
    "all_gather": (
        lambda x, comm: ops.all_gather(x, comm.name, comm.size),
        lambda xs, rank: torch.cat(xs),
    ),
    "reduce_scatter": (
        lambda x, comm: ops.reduce_scatter(x, comm.name, comm.size),
        lambda xs, rank: torch.stack(xs).sum(0).chunk(len(xs))[rank],
    ),
    "reduce_scatter avg": (
        lambda x, comm: ops.reduce_scatter(x, comm.name, comm.size, "avg"),
        lambda xs, rank: torch.stack(xs).mean(0).chunk(len(xs))[rank],
    ),
    "all_to_all": (
        lambda x, comm: ops.all_to_all(x, comm.name),
        lambda xs, rank: torch.cat([x.chunk(len(xs))[rank] for x in xs]),
    ),
}


def all_of(comm: Communicator) -> Callable[[torch.Tensor], torch.Tensor]:
    """Every operator, each with its own weight: one number."""

    def program(x: torch.Tensor) -> torch.Tensor:
        results = [
            operator(x * (i + 1), comm) for i, (operator, _) in enumerate(FUNCTIONAL.values())
        ]
        return sum((i + 2) * (y**2).sum() for i, y in enumerate(results)) * (comm.rank + 1)

    return program


@pytest.mark.ranks(RANKS)
def test_functional_with_gradients(comm: Communicator) -> None:
    check_gradients(comm, is_compiled=False)


@pytest.mark.ranks(2)
def test_functional_with_gradients_if_compiled(comm: Communicator) -> None:
    check_gradients(comm, is_compiled=True)


@pytest.mark.slow
@pytest.mark.ranks([1, 3])
def test_functional_with_gradients_if_compiled_for_other_ranks(comm: Communicator) -> None:
    check_gradients(comm, is_compiled=True)


def check_gradients(comm: Communicator, is_compiled: bool) -> None:
    """The loss is the sum of all ranks' losses; one process computes it as a whole."""
    given = [x.requires_grad_() for x in rows(comm, 6, 2)]
    program = all_of(comm)
    mine = given[comm.rank].detach().clone().requires_grad_()
    loss = (torch.compile(program, fullgraph=True) if is_compiled else program)(mine)
    loss.backward()
    losses = []
    for rank in range(comm.size):
        results = [
            whole([x * (i + 1) for x in given], rank)
            for i, (_, whole) in enumerate(FUNCTIONAL.values())
        ]
        losses.append(sum((i + 2) * (y**2).sum() for i, y in enumerate(results)) * (rank + 1))
    sum(losses).backward()
    torch.testing.assert_close(loss, losses[comm.rank])
    torch.testing.assert_close(mine.grad, given[comm.rank].grad)
    with pytest.raises(ValueError, match="'max' has no gradient"):
        ops.all_reduce(mine, comm.name, "max")


@pytest.mark.ranks(2)
def test_compiled_programs_write_in_place(comm: Communicator) -> None:
    """One call of the operator for each in the program, on the buffer itself, and no copies."""
    from torch._inductor.utils import run_and_get_code

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        ops.all_reduce_(y, comm.name)
        return ops.all_reduce(torch.relu(y), comm.name, "max") + 1

    x, w = torch.ones(4, 8) * (comm.rank + 1), torch.eye(8) * 2
    with torch.no_grad():
        expected = program(x, w)
        assert expected.tolist() == [[7.0] * 8] * 4
        compiled = torch.compile(program, fullgraph=True)
        result, (code,) = run_and_get_code(compiled, x, w)
        assert torch.equal(result, expected)
        assert code.count("torch.ops.unisono.all_reduce_.default(") == 2
        assert "copy_" not in code.partition("def call")[2]
    with torch.inference_mode():
        assert torch.equal(compiled(x, w), expected)


class Shifted(torch.nn.Module):
    def __init__(self, group: str) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        y = x * 2
        ops.all_reduce_(y, self.group)
        return (ops.all_gather(y + 1, self.group, 2),)


@pytest.mark.ranks(2)
def test_export(comm: Communicator) -> None:
    from torch._functorch.aot_autograd import aot_export_module

    x = torch.arange(3.0) + comm.rank
    with torch.no_grad():
        exported = torch.export.export(Shifted(comm.name), (x,))
        assert exported.module()(x)[0].tolist() == [3.0, 7.0, 11.0] * 2
        graph, _ = aot_export_module(Shifted(comm.name), (x,), trace_joint=False)
        assert graph(x)[0].tolist() == [3.0, 7.0, 11.0] * 2


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_failures_are_the_librarys(comm: Communicator) -> None:
    with torch.no_grad():
        with pytest.raises(ValueError, match="no group of this process is named 'nobody'"):
            ops.all_reduce_(torch.ones(2), "nobody")
        for bad in (torch.ones(2, dtype=torch.bool), torch.ones(3)):
            with pytest.raises((TypeError, ValueError), match="on group"):
                ops.reduce_scatter_(torch.ones(1, dtype=bad.dtype), bad, comm.name, "avg")
        with pytest.raises(ValueError, match="nonsense"):
            ops.all_reduce_(torch.ones(2), comm.name, "nonsense")
        with pytest.raises(ValueError, match="not a rank"):
            ops.broadcast_(torch.ones(2), comm.name, 7)
        pair = comm.split([0, 1])
        assert pair is not None
        ops.all_reduce_(torch.ones(2), pair.name)
        with pytest.raises(unisono.CollectiveMismatch, match=r"test_operators\.py"):
            ops.all_reduce_(torch.ones(2 + comm.rank), pair.name)
        with pytest.raises(unisono.CollectiveMismatch):  # and from now on
            ops.all_reduce_(torch.ones(2), pair.name)
        pair.close()
        with pytest.raises(unisono.GroupError, match="closed"):
            ops.all_reduce_(torch.ones(2), pair.name)


@pytest.mark.ranks(2)
def test_groups_of_one_name(comm: Communicator) -> None:
    """A name serves the group that is open; two open ones are refused."""
    for _ in range(3):
        with (
            torch.no_grad(),
            unisono.Communicator.join(f"again-{os.getppid()}-{comm.name}", comm.rank, 2) as group,
        ):
            x = torch.ones(2)
            ops.all_reduce_(x, group.name)
            ops.all_reduce_(x, group.name)
            assert x.tolist() == [4, 4]
            comm.barrier()


@pytest.mark.ranks(2)
def test_of_two_open_groups_of_one_name_none_is_taken(comm: Communicator) -> None:
    def join() -> Communicator:
        return unisono.Communicator.join(f"twice-{os.getppid()}-{comm.name}", comm.rank, 2)

    with torch.no_grad():
        dropped: list[object] = [join()]
        dropped.append(dropped)  # only the collector finds it
        del dropped
        with join() as first:
            ops.all_reduce_(x := torch.ones(2), first.name)
            assert x.tolist() == [2, 2]
            with join() as second:
                with pytest.raises(ValueError, match="2 groups of this process are named"):
                    ops.all_reduce_(x, second.name)
                comm.barrier()


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_compiled_program_hears_of_an_abort(comm: Communicator) -> None:
    pair = comm.split([0, 1])
    assert pair is not None

    @torch.compile(fullgraph=True)
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        ops.all_reduce_(y, pair.name)
        return y

    with torch.no_grad():
        assert program(torch.ones(2)).tolist() == [4, 4]
        if comm.rank == 0:
            pair.abort("the test asked for it")
        with pytest.raises(unisono.GroupAborted, match="the test asked for it"):
            program(torch.ones(2))


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_ctrl_c(comm: Communicator) -> None:
    """It ends a wait in an operator, as itself."""
    pair = comm.split([0, 1])
    assert pair is not None
    with torch.no_grad():
        ops.all_reduce_(torch.ones(2), pair.name)
        if comm.rank == 0:
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                ops.all_reduce_(torch.ones(2), pair.name)
            timer.join()
    comm.barrier()


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_closing_during_a_call(comm: Communicator) -> None:
    """Another thread's close ends the wait, and then the group is closed."""
    pair = comm.split([0, 1])
    assert pair is not None
    with torch.no_grad():
        ops.all_reduce_(torch.ones(2), pair.name)
        if comm.rank == 0:
            timer = threading.Timer(0.3, pair.close)
            timer.start()
            with pytest.raises(unisono.GroupError):
                ops.all_reduce_(torch.ones(2), pair.name)
            timer.join()
            with pytest.raises(unisono.GroupError):
                ops.all_reduce_(torch.ones(2), pair.name)
    comm.barrier()
