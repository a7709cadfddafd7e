"""`unisono.self_test`: passes on a correct group, fails on one with a planted fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import unisono
from unisono.comm.communicator import Communicator
from unisono.comm.factory import alone
from unisono.comm.work import Work
from unisono.errors import GroupAborted

PRIMITIVES = {
    "barrier", "broadcast", "reduce", "gather", "scatter", "all_gather", "all_to_all",
    "all_reduce sum", "all_reduce mean", "all_reduce max", "all_reduce async",
    "reduce_scatter", "reduce_scatter, gather",
}  # fmt: skip
MESSAGES = {"send, recv", "isend, irecv", "batch_isend_irecv"}


@pytest.mark.ranks([1, 2, 3, 4, 8])
def test_a_sound_group_is_green(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    result = unisono.self_test(repeats=2)
    assert result.ok, str(result)
    names = {check.primitive for check in result.checks}
    assert names == PRIMITIVES | (MESSAGES if comm.size > 1 else set())
    assert all(check.microseconds > 0 for check in result.checks)
    assert (result.rank, result.size) == (comm.rank, comm.size)
    printed = capsys.readouterr().out
    assert printed == (f"{result}\n" if comm.rank == 0 else "")


@pytest.mark.ranks(2)
def test_a_group_that_has_ended_says_so(comm: Communicator) -> None:
    with comm.split([0, 1], label="soon ended") as group:
        comm.barrier()
        if comm.rank == 0:
            group.abort("enough")
        with pytest.raises(GroupAborted, match="enough"):
            group.barrier()
        with pytest.raises(GroupAborted, match="enough"):
            unisono.self_test(group)


def test_alone_without_a_world() -> None:
    assert unisono.self_test(show=False).size == 1


@pytest.mark.ranks(3)
@pytest.mark.parametrize("elements", [0, 1, 7])
def test_any_number_of_elements(comm: Any, elements: int) -> None:
    assert unisono.self_test(comm, elements=elements, repeats=1, show=False).ok


@pytest.mark.ranks(3)
def test_a_subgroup_and_a_torch_group(process_group: Any) -> None:
    few = dist.new_group([2, 0])
    if process_group.rank() != 1:
        result = unisono.self_test(few, repeats=1, show=False)
        assert result.ok
        assert result.size == 2
    assert unisono.self_test(repeats=1, show=False).size == 3


# -- planted faults --------------------------------------------------------------------------------


def faulty(comm: Communicator, method: str, fault: Any) -> Communicator:
    """The same group, except that one method of this rank goes wrong: `fault` gets the method and
    its arguments."""
    kind = type(comm)
    sound = getattr(kind, method)

    def wrong(self: Communicator, *args: Any, **keywords: Any) -> Any:
        return fault(lambda *args, **keywords: sound(self, *args, **keywords), *args, **keywords)

    comm.__class__ = type("Faulty", (kind,), {"__slots__": (), method: wrong})
    return comm


def spoiled(call: Any, output: Any, *args: Any, **keywords: Any) -> Any:
    """One element of the result is off by one."""
    result = call(output, *args, **keywords)
    if isinstance(result, Work):
        result.wait()
    if output is not None:
        output.view(-1)[-1] += 1
    return result


def unmoved(call: Any, output: Any, *args: Any, **keywords: Any) -> Any:
    """The call happens, but its result never reaches the caller's tensor."""
    if output is None:
        return call(output, *args, **keywords)
    result = call(output.clone(), *args, **keywords)
    if isinstance(result, Work):
        result.wait()
    return result


EXPECTED_RED = {
    "broadcast": {"broadcast"},
    "reduce": {"reduce"},
    "all_reduce": {"all_reduce sum", "all_reduce mean", "all_reduce max", "all_reduce async"},
    "gather": {"gather"},
    "scatter": {"scatter"},
    "reduce_scatter": {"reduce_scatter", "reduce_scatter, gather"},
    "all_to_all": {"all_to_all"},
    "recv": {"send, recv"},
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("method", EXPECTED_RED)
def test_a_wrong_result_on_one_rank_is_red_on_all(comm: Any, method: str) -> None:
    culprit = 2  # the root, where there is one
    if comm.rank == culprit:
        comm = faulty(comm, method, spoiled)
    result = unisono.self_test(comm, elements=10, repeats=3, show=False)
    red = {check.primitive: check.message for check in result.checks if not check.ok}
    assert set(red) == EXPECTED_RED[method]
    last = 29 if method in ("gather", "all_to_all") else 9
    assert red[min(red)].startswith(f"rank 2: element {last} is ")
    assert "rank 1" not in red[min(red)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("method", ["all_reduce", "gather", "scatter", "all_to_all", "broadcast"])
def test_a_result_that_never_arrives_is_red(comm: Any, method: str) -> None:
    root_is_last = {"broadcast": 0}.get(method, 1)
    if comm.rank == root_is_last:
        comm = faulty(comm, method, unmoved)
    result = unisono.self_test(comm, repeats=1, show=False)
    red = {check.primitive for check in result.checks if not check.ok}
    assert red == EXPECTED_RED[method]


@pytest.mark.ranks(3)
def test_a_wrong_all_gather_cannot_hide_itself(comm: Any) -> None:
    if comm.rank == 2:
        comm = faulty(comm, "all_gather", unmoved)
    result = unisono.self_test(comm, repeats=1, show=False)
    red = {check.primitive for check in result.checks if not check.ok}
    if comm.rank == 2:  # it hears from no rank, not even itself
        assert "the ranks' verdicts" in red
        assert "all_gather" in red
    else:
        assert red == {"all_gather", "reduce_scatter, gather"}


@pytest.mark.ranks(2)
def test_a_fault_that_ends_the_group_leaves_the_rest_undone(comm: Any) -> None:
    def other(call: Any, tensor: Any, *args: Any, **keywords: Any) -> None:
        call(tensor[:-1], *args, **keywords)

    if comm.rank == 0:
        comm = faulty(comm, "reduce", other)
    result = unisono.self_test(comm, show=False)
    checks = {check.primitive: check for check in result.checks}
    assert checks["broadcast"].ok
    assert checks["reduce"].message.startswith("CollectiveMismatch: ")
    assert checks["all_to_all"].message == "not run: the group has ended"


def test_a_refusal_of_the_backend_is_red() -> None:
    class Poor(Communicator):
        def all_to_all(self, *args: Any, **keywords: Any) -> None:
            raise RuntimeError("this backend has no all_to_all")

    result = unisono.self_test(Poor(alone().transport), show=False)
    red = {check.primitive: check.message for check in result.checks if not check.ok}
    assert red == {"all_to_all": "RuntimeError: this backend has no all_to_all"}
    assert "WRONG all_to_all" in str(result)
    assert result.as_dict()["ok"] is False
