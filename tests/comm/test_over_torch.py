"""What only the transport over another library's process groups has: conformance/ tests the
rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from ranks import attempt, in_a_fork, raised
from unisono.world.world import resolve


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.parametrize("difference", ["size", "dtype", "op", "operation", "root"])
def test_a_mismatch_on_gloo_raises_on_every_rank(process_group: Any, difference: str) -> None:
    comm = resolve()
    odd = comm.rank == 1
    tensor = torch.ones(12 if odd and difference == "size" else 10)
    if odd and difference == "dtype":
        tensor = tensor.int()
    error = None
    if difference == "root":
        error = attempt(comm.broadcast, tensor, 2 if odd else 0)
    elif difference == "operation" and odd:
        error = attempt(comm.barrier)
    else:
        error = attempt(comm.all_reduce, tensor, "max" if odd and difference == "op" else "sum")
    assert isinstance(error, unisono.CollectiveMismatch), error
    assert error.culprits == (1,)
    assert (tensor == 1).all()
    assert isinstance(attempt(comm.barrier), unisono.CollectiveMismatch)
    assert isinstance(comm.errored, unisono.CollectiveMismatch)


@pytest.mark.ranks(3, backend="gloo")
def test_a_pair_that_disagrees_on_gloo_is_told(process_group: Any) -> None:
    comm = resolve()
    sent = [torch.ones(2) for _ in range(3)]
    taken = [torch.ones(3 if comm.rank == 2 and r == 0 else 2) for r in range(3)]
    error = raised(unisono.CollectiveMismatch, comm.all_to_all, taken, sent)
    assert "rank 0 sends 2 elements to rank 2, which expects 3" in str(error)


@pytest.mark.ranks(2, backend="gloo")
def test_a_forked_child_is_told_that_the_group_is_not_its_own(process_group: Any) -> None:
    comm = resolve()
    x = torch.ones(2)
    comm.all_reduce(x)
    for call in (
        lambda: comm.send(x, comm.next),
        lambda: comm.irecv(x, comm.next),
        lambda: unisono.all_reduce(x),
        lambda: comm.all_reduce(None),  # type: ignore[call-overload]
    ):
        assert in_a_fork(call) == "GroupClosed"
    in_a_fork(lambda: comm.abort("of a child"))
    comm.barrier()


@pytest.mark.ranks(2, backend="gloo")
def test_reproducible_sums_are_refused_on_gloo(process_group: Any) -> None:
    comm = resolve()
    with pytest.raises(ValueError, match="not available on"):
        comm.all_reduce(torch.ones(3), reproducible=True)
    with pytest.raises(ValueError, match="not available on"):
        comm.all_reduce(torch.ones(3), contributions=[torch.ones(3)])
    comm.all_reduce(whole := torch.ones(3).long(), reproducible=True)
    assert whole.tolist() == [2, 2, 2]


@pytest.mark.ranks(2, backend="gloo")
def test_one_rank_that_refuses_its_arguments_does_not_leave_the_others_waiting(
    process_group: Any,
) -> None:
    comm = resolve()
    if comm.rank == 0:
        with pytest.raises(TypeError, match="avg is not defined for int32"):
            comm.all_reduce(torch.ones(3, dtype=torch.int32), "avg")
    else:
        with pytest.raises(unisono.CollectiveMismatch, match="refused"):
            comm.all_reduce(torch.ones(3))
    assert isinstance(attempt(comm.barrier), unisono.CollectiveMismatch)


@pytest.mark.ranks(2, backend="gloo")
def test_a_late_peer_is_a_timeout_on_both_sides(process_group: Any, shared_tmp_path: Any) -> None:
    comm = resolve()
    gave_up = shared_tmp_path / "gave-up"
    if comm.rank == 0:
        with pytest.raises(unisono.CollectiveTimeout, match="barrier on group") as caught:
            comm.barrier(timeout_s=0.3)
        assert isinstance(caught.value.__cause__, RuntimeError)
        gave_up.touch()
        assert isinstance(attempt(comm.all_reduce, torch.ones(1)), unisono.CollectiveTimeout)
    else:
        while not gave_up.exists():
            pass
        error = raised(unisono.CollectiveTimeout, comm.barrier)
        assert "reported by rank 0" in str(error)


@pytest.mark.ranks(3, backend="gloo")
def test_abort_ends_the_calls_of_every_rank_with_its_reason(process_group: Any) -> None:
    comm = resolve()
    if comm.rank == 1:
        comm.abort("enough")
    error = raised(unisono.GroupAborted, comm.all_reduce, torch.ones(3))
    assert "rank 1 ended group" in str(error)
    assert "enough" in str(error)


@pytest.mark.ranks(2, backend="gloo")
def test_a_group_that_closes_ends_what_is_under_way(
    process_group: Any, shared_tmp_path: Any
) -> None:
    comm = resolve().split([0, 1])
    assert comm is not None
    if comm.rank == 0:
        work = comm.all_reduce(torch.ones(3), async_op=True)
        assert work is not None
        comm.close()
        comm.close()
        assert isinstance(attempt(work.wait), unisono.GroupError)
        assert isinstance(attempt(comm.barrier), unisono.GroupClosed)
        (shared_tmp_path / "closed").touch()
    else:
        while not (shared_tmp_path / "closed").exists():
            pass
        error = raised(unisono.PeerLost, comm.barrier)
        assert "rank 0 closed group" in str(error)
        assert error.peer == 0
    dist.barrier()  # its parent stays usable


@pytest.mark.ranks(2, backend="gloo")
def test_an_error_of_a_work_comes_out_at_wait(process_group: Any) -> None:
    comm = resolve()
    work = comm.all_reduce(torch.ones(3 + comm.rank), async_op=True)
    assert work is not None
    assert isinstance(attempt(work.wait), unisono.CollectiveMismatch)
    assert isinstance(attempt(work.wait), unisono.CollectiveMismatch)
    assert work.is_completed()
    assert isinstance(work.exception(), unisono.CollectiveMismatch)


@pytest.mark.ranks(2, backend="gloo")
def test_a_foreign_group_is_wrapped_once_and_goes_with_its_group(process_group: Any) -> None:
    assert resolve() is resolve(process_group) is resolve(dist.group.WORLD)
    assert resolve().backend == "gloo"
    sub = dist.new_group([1, 0])
    comm = resolve(sub)
    assert comm is resolve(sub)
    assert comm.global_ranks == (0, 1)
    comm.all_reduce(tensor := torch.ones(2))
    assert tensor.tolist() == [2, 2]
    dist.barrier()
    dist.destroy_process_group(sub)
    del sub
    assert isinstance(attempt(comm.barrier), unisono.UnisonoError)
    closed = resolve()
    closed.close()
    assert isinstance(attempt(closed.barrier), unisono.GroupClosed)
    dist.barrier()  # closing does not destroy what it did not create
    resolve().barrier()
