"""ProcessGroupManager: every rank's groups, on real ranks."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import unisono
from implementations import on_backends
from unisono import ProcessGroupManager, UnisonoError
from unisono.comm.communicator import Communicator
from unisono.world.world import resolve

SHAPES = {
    1: [{}],
    2: [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"ep": 2}],
    4: [{"tp": 2, "dp": 2}, {"cp": 2, "pp": 2}, {"cp": 4}, {"tp": 2, "ep": 2}],
    8: [{"tp": 2, "cp": 2, "dp": 2}, {"tp": 2, "pp": 2, "dp": 2}, {"cp": 2, "ep": 2, "tp": 2}],
}
SLOWEST_FIRST = ("dp", "pp", "cp", "ep", "tp")
NAMES = ("tp", "cp", "ep", "pp", "dp", "cp_dp", "pp_dp")


def sizes(shape: dict[str, int]) -> dict[str, int]:
    return {f"{axis}_size": size for axis, size in shape.items()}


def members(shape: dict[str, int], rank: int, name: str) -> list[int]:
    """The ranks in `rank`'s group, from the digits of the ranks: computed in another way than in
    the mesh."""

    def digits(of: int) -> dict[str, int]:
        found = {}
        for axis in reversed(SLOWEST_FIRST):
            of, found[axis] = divmod(of, shape.get(axis, 1))
        return found

    total = math.prod(shape.values())
    kept = [axis for axis in SLOWEST_FIRST if axis not in name.split("_")]
    mine = digits(rank)
    return [
        other for other in range(total) if all(digits(other)[axis] == mine[axis] for axis in kept)
    ]


def sum_of_ranks(comm: Communicator, global_rank: int) -> int:
    tensor = torch.tensor([global_rank])
    comm.all_reduce(tensor)
    return int(tensor)


def sum_by_torch(group: Any) -> int:
    tensor = torch.tensor([dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return int(tensor)


# -- over a world of unisono ---------------------------------------------------------------------


@pytest.mark.ranks([1, 2, 4, 8])
def test_every_group_sums_up_its_members(comm: Communicator) -> None:
    for shape in SHAPES[comm.size]:
        with ProcessGroupManager(**sizes(shape)) as manager:
            assert (manager.global_rank, manager.world_size) == (comm.rank, comm.size)
            for name in NAMES:
                group = members(shape, comm.rank, name)
                assert getattr(manager, f"{name}_ranks") == tuple(group)
                assert getattr(manager, f"{name}_world_size") == len(group)
                assert getattr(manager, f"{name}_rank") == group.index(comm.rank)
                assert getattr(manager, f"{name}_first_rank") == group[0]
                assert getattr(manager, f"{name}_last_rank") == group[-1]
                moves = getattr(manager, name)
                assert (moves.rank, moves.size) == (group.index(comm.rank), len(group))
                assert moves.global_ranks == tuple(group)
                assert sum_of_ranks(moves, comm.rank) == sum(group)
                made: Any = moves.transport
                assert (made.group.state()["descriptor"] < 0) == (len(group) == 1)


@pytest.mark.ranks([2, 8])
def test_a_pipeline_passes_something_on(comm: Communicator) -> None:
    with ProcessGroupManager(pp_size=2, tp_size=comm.size // 2) as manager:
        stage = manager.pp
        token = torch.zeros(3)
        if manager.pp_is_first_stage:
            assert manager.pp_prev_rank is None
            assert manager.pp_next_rank == comm.rank + comm.size // 2
            stage.send(token + comm.rank, stage.next)
        else:
            assert manager.pp_is_last_stage
            assert manager.pp_next_rank is None
            assert manager.pp_prev_rank == comm.rank - comm.size // 2
            stage.recv(token, stage.prev)
            assert token.eq(manager.pp_prev_rank).all()


@pytest.mark.ranks([1, 2, 4, 8])
def test_a_ring_along_cp(comm: Communicator) -> None:
    cp_size = min(4, comm.size)
    with ProcessGroupManager(cp_size=cp_size, dp_size=comm.size // cp_size) as manager:
        first = comm.rank // cp_size * cp_size
        assert manager.cp_send_rank == first + (comm.rank + 1) % cp_size
        assert manager.cp_recv_rank == first + (comm.rank - 1) % cp_size
        ring = manager.cp
        assert ring.global_ranks is not None
        assert ring.global_ranks[ring.next] == manager.cp_send_rank
        assert ring.global_ranks[ring.prev] == manager.cp_recv_rank
        if cp_size == 1:
            return
        seen = [comm.rank]
        for _ in range(cp_size - 1):
            sent = ring.isend(torch.tensor([seen[-1]]), ring.next)
            ring.recv(received := torch.tensor([-1]), ring.prev)
            sent.wait()
            seen.append(int(received))
        assert seen == [first + (comm.rank - step) % cp_size for step in range(cp_size)]


@pytest.mark.ranks(4)
def test_only_members_make_a_group_and_in_any_order(comm: Communicator) -> None:
    """Ranks 0 and 1 create tp, then dp; ranks 2 and 3 create dp in a thread while they create
    tp."""
    with ProcessGroupManager(tp_size=2, dp_size=2) as manager:
        if comm.rank < 2:
            assert sum_of_ranks(manager.tp, comm.rank) == 1
            assert sum_of_ranks(manager.dp, comm.rank) == 2 * comm.rank + 2
        else:
            early = threading.Thread(target=lambda: manager.dp)
            early.start()
            assert sum_of_ranks(manager.tp, comm.rank) == 5
            early.join()
            assert sum_of_ranks(manager.dp, comm.rank) == 2 * comm.rank - 2


@pytest.mark.ranks(3)
def test_two_managers_do_not_mix_whichever_is_asked_first(comm: Communicator) -> None:
    """Both have the same members. Ranks 0 and 1 first ask for the first one's group, rank 2 for the
    second one's."""
    first, second = ProcessGroupManager(dp_size=3), ProcessGroupManager(dp_size=3)
    early = threading.Thread(target=lambda: second.dp)
    if comm.rank == 2:
        early.start()
        time.sleep(0.05)  # let it arrive first
    for manager, factor in ((first, 1), (second, 10)):
        tensor = torch.tensor([factor * comm.rank])
        manager.dp.all_reduce(tensor)
        assert int(tensor) == 3 * factor
    if comm.rank == 2:
        early.join()
    assert first.dp.name != second.dp.name
    first.close()
    assert sum_of_ranks(second.dp, comm.rank) == 3
    second.close()


@pytest.mark.ranks(4)
def test_axes_with_the_same_members_share_a_group(comm: Communicator) -> None:
    with ProcessGroupManager(tp_size=2, dp_size=2) as manager:
        # Ranks that meet under different names of one group
        mine = manager.dp if comm.rank < 2 else manager.cp_dp
        assert sum_of_ranks(mine, comm.rank) == 2 * (comm.rank % 2) + 2
        assert manager.dp is manager.cp_dp is manager.pp_dp
        assert manager.cp is manager.pp


@pytest.mark.ranks(4)
def test_a_manager_of_some_ranks_speaks_of_global_ranks(comm: Communicator) -> None:
    some = comm.split([3, 1])
    if some is None:
        return
    with ProcessGroupManager(pp_size=2, group=some) as manager:
        assert manager.pp_ranks == (3, 1)
        assert manager.global_rank == comm.rank
        assert (manager.pp_next_rank, manager.pp_prev_rank) == (
            (1, None) if comm.rank == 3 else (None, 3)
        )
        assert sum_of_ranks(manager.pp, comm.rank) == 4
    some.close()


@pytest.mark.ranks(4)
def test_any_axes_together(comm: Communicator) -> None:
    with ProcessGroupManager(tp_size=2, ep_size=2) as manager:
        both = manager.along("tp", "ep")
        assert both.ranks == (0, 1, 2, 3)
        assert sum_of_ranks(both.comm, comm.rank) == 6
        assert manager.along("ep", "tp") is both
        with pytest.raises(ValueError, match="no axis 'sp': the axes are dp, pp, cp, ep, tp"):
            manager.along("sp")
        with pytest.raises(ValueError, match="at least one axis"):
            manager.along()


@pytest.mark.ranks(4)
def test_where_a_rank_stands(comm: Communicator) -> None:
    manager = ProcessGroupManager(tp_size=2, dp_size=2)
    tp, dp = comm.rank % 2, comm.rank // 2
    assert repr(manager) == (
        f"<ProcessGroupManager rank {comm.rank}: tp {tp}/2, cp 0/1, pp 0/1, dp {dp}/2>"
    )
    assert manager.mesh == unisono.Mesh({"dp": 2, "pp": 1, "cp": 1, "tp": 2})
    assert "cp+dp: 0 2 | 1 3" in manager.mesh.describe(ranks_per_node=2, joint=[("cp", "dp")])
    assert manager.get_info().splitlines() == [
        f"rank {comm.rank} of 4, local rank {comm.rank}",
        f"grid position: dp {dp}, pp 0, cp 0, tp {tp}",
        f"tp: rank {tp} of 2: global ranks {2 * dp} and {2 * dp + 1}",
        f"cp: rank 0 of 1: global rank {comm.rank}",
        f"pp: rank 0 of 1: global rank {comm.rank}",
        f"dp: rank {dp} of 2: global ranks {tp} and {tp + 2}",
        "pipeline: stage 0 of 1",
    ]


@pytest.mark.ranks(2)
def test_what_a_rank_knows_of_its_pipeline(comm: Communicator) -> None:
    told = ProcessGroupManager(pp_size=2).get_info().splitlines()[-1]
    assert (
        told == "pipeline: stage " + ("0 of 2, next rank 1", "1 of 2, previous rank 0")[comm.rank]
    )


@pytest.mark.ranks(8)
def test_the_grid_is_dp_pp_cp_ep_tp(comm: Communicator) -> None:
    for tp, cp, pp, dp, ep in [(2, 2, 1, 1, 2), (1, 2, 1, 2, 2), (2, 1, 2, 1, 2), (1, 2, 2, 1, 2)]:
        grid = numpy.arange(8).reshape(dp, pp, cp, ep, tp)
        ((d, p, c, e, t),) = numpy.argwhere(grid == comm.rank)
        with ProcessGroupManager(tp, cp, pp, dp, ep) as manager:
            assert manager.grid.tolist() == grid.tolist()
            assert manager.tp_group_ids == grid[d, p, c, e, :].tolist()
            assert manager.ep_group_ids == grid[d, p, c, :, t].tolist()
            assert manager.cp_group_ids == grid[d, p, :, e, t].tolist()
            assert manager.pp_group_ids == grid[d, :, c, e, t].tolist()
            assert manager.dp_group_ids == grid[:, p, c, e, t].tolist()
            assert manager.cp_dp_group_ids == grid[:, p, :, e, t].ravel().tolist()
            assert manager.pp_dp_group_ids == grid[:, :, c, e, t].ravel().tolist()
            assert manager.local_rank == comm.rank


@pytest.mark.ranks(2)
def test_the_default_manager(comm: Communicator) -> None:
    assert unisono.get_process_group_manager() is None
    first = unisono.setup_process_group_manager(tp_size=2)
    assert unisono.get_process_group_manager() is first
    second = unisono.setup_process_group_manager(dp_size=2)
    assert unisono.get_process_group_manager() is second
    assert sum_of_ranks(first.tp, comm.rank) == sum_of_ranks(second.dp, comm.rank) == 1
    with pytest.raises(ValueError, match="the world has 2"):
        unisono.setup_process_group_manager(dp_size=3)
    assert unisono.get_process_group_manager() is second
    second.cleanup()
    second.cleanup()
    assert unisono.get_process_group_manager() is None
    assert sum_of_ranks(first.tp, comm.rank) == 1
    first.cleanup()


@pytest.mark.ranks(1)
def test_the_default_manager_goes_with_its_world(comm: Communicator) -> None:
    own = comm.split([0], "a world that ends")
    assert own is not None
    manager = unisono.setup_process_group_manager(group=own)
    assert unisono.get_process_group_manager() is manager
    own.close()
    assert unisono.get_process_group_manager() is None


@pytest.mark.ranks(3)
def test_sizes_that_do_not_fit(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"= 4 ranks, but the world has 3\. What fits: dp 3 x"):
        ProcessGroupManager(tp_size=2, dp_size=2)
    with pytest.raises(ValueError, match="axis tp has 0 ranks"):
        ProcessGroupManager(tp_size=0, dp_size=3)


@pytest.mark.ranks(2)
def test_a_closed_manager_says_so(comm: Communicator) -> None:
    manager = ProcessGroupManager(tp_size=2)
    group = manager.tp
    manager.close()
    manager.close()
    with pytest.raises(unisono.GroupClosed):
        group.barrier()
    with pytest.raises(UnisonoError, match="is closed"):
        _ = manager.tp
    with pytest.raises(UnisonoError, match="is closed"):
        _ = manager.dp
    assert manager.tp_ranks == (0, 1)


@pytest.mark.ranks([1, 2])
def test_without_torch_distributed_a_process_group_cannot_be_had(comm: Communicator) -> None:
    with (
        ProcessGroupManager(dp_size=comm.size) as manager,
        pytest.raises(UnisonoError, match="init_process_group"),
    ):
        _ = manager.dp_group


# -- over torch.distributed ----------------------------------------------------------------------

on_four = on_backends(unisono=[4], gloo=[4])


@on_backends(unisono=[1, 2, 4, 8], gloo=[1, 4])
def test_torch_sums_up_every_group(process_group: Any, backend: str) -> None:
    rank = dist.get_rank()
    for shape in SHAPES[dist.get_world_size()]:
        with ProcessGroupManager(**sizes(shape)) as manager:
            for name in NAMES:
                expected = members(shape, rank, name)
                group = getattr(manager, f"{name}_group")
                assert dist.get_process_group_ranks(group) == expected
                assert dist.get_rank(group) == expected.index(rank)
                assert dist.get_backend(group) == backend
                assert sum_by_torch(group) == sum(expected)
                assert getattr(manager, f"{name}_group") is group
                if backend == "unisono":
                    assert resolve(group) is getattr(manager, name)
        assert dist.get_pg_count() == 1


@pytest.mark.ranks(4, backend="gloo")
def test_communicators_over_gloo(process_group: Any) -> None:
    rank = dist.get_rank()
    with ProcessGroupManager(tp_size=2, dp_size=2) as manager:
        for name in NAMES:
            comm = getattr(manager, name)
            assert sum_of_ranks(comm, rank) == sum(getattr(manager, f"{name}_ranks"))
            assert resolve(getattr(manager, f"{name}_group")) is comm
        with ProcessGroupManager(tp_size=2, group=manager.tp) as inner:
            assert inner.tp_ranks == manager.tp_ranks
            assert sum_of_ranks(inner.tp, rank) == sum(inner.tp_ranks)


@on_four
def test_the_world_s_group(process_group: Any, backend: str) -> None:
    with ProcessGroupManager(tp_size=2, dp_size=2) as manager:
        assert manager.world_group is dist.group.WORLD
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    with ProcessGroupManager(dp_size=2, group=mine) as manager:
        assert manager.world_group is mine
    half = dist.DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("dp", "tp"))
    with ProcessGroupManager.from_device_mesh(half["tp"]) as manager:
        assert dist.get_process_group_ranks(manager.world_group) == list(manager.tp_ranks)


@pytest.mark.ranks(2)
def test_the_group_of_a_world_that_torch_does_not_know(
    comm: Communicator, process_group: Any
) -> None:
    own = comm.split([1, 0])
    assert own is not None
    with ProcessGroupManager(dp_size=2, group=own) as manager:
        assert dist.get_process_group_ranks(manager.world_group) == [1, 0]
        assert sum_by_torch(manager.world_group) == 1
    own.close()


@on_four
def test_torch_groups_are_made_in_different_orders(process_group: Any, backend: str) -> None:
    """Ranks have created different numbers of groups before; `new_group` would wait forever."""
    rank = dist.get_rank()
    with ProcessGroupManager(tp_size=2, dp_size=2) as first, ProcessGroupManager(dp_size=4) as all_:
        if rank in (0, 1):
            assert sum_by_torch(first.tp_group) == 1
        if rank == 0:
            _ = first.pp_group
            _ = first.cp_group
        assert sum_by_torch(all_.dp_group) == 6
        assert sum_by_torch(first.dp_group) == 2 * (rank % 2) + 2
        if rank in (2, 3):
            assert sum_by_torch(first.tp_group) == 5
    with ProcessGroupManager(tp_size=2, dp_size=2) as again:
        assert sum_by_torch(again.dp_group) == 2 * (rank % 2) + 2
    assert sum_by_torch(None) == 6


@on_four
def test_torch_sends_along_pp_and_around_cp(process_group: Any, backend: str) -> None:
    rank = dist.get_rank()
    with ProcessGroupManager(pp_size=2, cp_size=2) as manager:
        token = torch.zeros(1)
        if not manager.pp_is_last_stage:
            dist.send(token + rank, dst=manager.pp_next_rank, group=manager.pp_group)
        else:
            dist.recv(token, src=manager.pp_prev_rank, group=manager.pp_group)
            assert int(token) == rank - 2
        ring = manager.cp_group
        sent = dist.isend(torch.tensor([rank]), dst=manager.cp_send_rank, group=ring)
        dist.recv(received := torch.tensor([-1]), src=manager.cp_recv_rank, group=ring)
        sent.wait()
        assert int(received) == manager.cp_recv_rank == (rank ^ 1)


@on_four
def test_ddp_over_the_ranks_of_dp(process_group: Any, backend: str) -> None:
    rank = dist.get_rank()
    with ProcessGroupManager(tp_size=2, dp_size=2) as manager:
        layer = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(layer.weight, float(rank))
        model = DistributedDataParallel(layer, process_group=manager.dp_group)
        assert layer.weight.eq(manager.dp_first_rank).all()  # as DDP does: from its first rank
        model(torch.full((1, 2), float(rank))).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.eq(sum(manager.dp_ranks) / 2).all()
        del model


@on_four
def test_to_a_device_mesh_and_back(process_group: Any, backend: str) -> None:
    with ProcessGroupManager(tp_size=2, dp_size=2) as manager:
        mesh = manager.to_device_mesh()
        assert mesh.mesh_dim_names == ("dp", "pp", "cp", "tp")
        assert mesh.mesh.flatten().tolist() == [0, 1, 2, 3]
        for axis in mesh.mesh_dim_names:
            ranks = list(manager.along(axis).ranks)
            assert mesh[axis].mesh.tolist() == ranks
            assert dist.get_process_group_ranks(mesh.get_group(axis)) == ranks
        assert mesh.get_group("tp") is manager.tp_group
        back = ProcessGroupManager.from_device_mesh(mesh)
        assert back.mesh == manager.mesh
        assert back.tp_group is manager.tp_group
        back.close()
        assert sum_by_torch(manager.tp_group) == sum(manager.tp_ranks)


@on_four
def test_from_a_mesh_of_torch(process_group: Any, backend: str) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "shard"))
    with ProcessGroupManager.from_device_mesh(mesh) as manager:
        assert manager.mesh.axes == ("tp", "shard")
        assert list(manager.tp_ranks) == [rank % 2, rank % 2 + 2]
        assert manager.tp_group is mesh.get_group("tp")
        assert sum_by_torch(manager.along("shard").group) == (1 if rank < 2 else 5)
        assert sum_by_torch(manager.along("tp", "shard").group) == 6
        assert manager.dp_world_size == 1
    assert sum_by_torch(mesh.get_group("tp")) == 2 * (rank % 2) + 2
    with pytest.raises(ValueError, match="names"):
        ProcessGroupManager.from_device_mesh(init_device_mesh("cpu", (4,)))


@pytest.mark.ranks(2)
def test_a_mesh_whose_ranks_are_turned_around(process_group: Any) -> None:
    mesh = dist.DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("pp",))
    manager = ProcessGroupManager.from_device_mesh(mesh)
    assert manager.pp_ranks == (1, 0)
    assert manager.pp_is_first_stage == (dist.get_rank() == 1)


@on_four
def test_managers_that_only_some_ranks_have(process_group: Any, backend: str) -> None:
    """Ranks 0 and 1 have created one manager more than the others when all create the next."""
    rank = dist.get_rank()
    half = dist.DeviceMesh("cpu", torch.tensor([0, 1]), mesh_dim_names=("dp",))
    if rank < 2:
        with ProcessGroupManager.from_device_mesh(half) as few:
            assert few.dp_ranks == (0, 1)
            assert sum_by_torch(few.dp_group) == 1
    else:
        with pytest.raises(ValueError, match="is not in the DeviceMesh"):
            ProcessGroupManager.from_device_mesh(half)
    with ProcessGroupManager(tp_size=2, dp_size=2) as manager:
        assert sum_by_torch(manager.dp_group) == 2 * (rank % 2) + 2
        assert sum_by_torch(manager.tp_group) == (1 if rank < 2 else 5)


@pytest.mark.ranks(4)
def test_a_manager_of_a_torch_subgroup(process_group: Any) -> None:
    some = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        with ProcessGroupManager(dp_size=2, group=some) as manager:
            assert manager.dp_ranks == (1, 2)
            assert sum_by_torch(manager.dp_group) == 3
    else:
        with pytest.raises(UnisonoError, match="member"):
            ProcessGroupManager(dp_size=2, group=some)


@pytest.mark.ranks(2)
def test_torch_s_end_is_the_groups_end(process_group: Any) -> None:
    manager = ProcessGroupManager(dp_size=2)
    assert sum_by_torch(manager.dp_group) == 1
    comm = manager.dp
    dist.destroy_process_group()
    with pytest.raises(unisono.GroupClosed):
        comm.barrier()
    manager.close()


@pytest.mark.ranks(2, backend="gloo")
def test_our_world_beside_gloo_s(comm: Communicator, process_group: Any) -> None:
    """The world is unisono's, and its groups are torch groups as well."""
    with ProcessGroupManager(dp_size=2) as manager:
        assert dist.get_backend(manager.dp_group) == "unisono"
        assert sum_by_torch(manager.dp_group) == 1
        assert resolve(manager.dp_group) is manager.dp


def test_one_process_that_started_nothing() -> None:
    with ProcessGroupManager() as manager:
        assert sum_of_ranks(manager.cp_dp, 5) == 5
        assert manager.tp_ranks == (0,)
    with pytest.raises(ValueError, match="the world has 1"):
        ProcessGroupManager(tp_size=2)
