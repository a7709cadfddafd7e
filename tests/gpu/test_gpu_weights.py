"""New weights from a trainer to an engine on the same GPU: from memory to memory."""

from __future__ import annotations

import gc
import os
import signal
import statistics
import time
from typing import Any

import pytest
import torch
from test_gpu_faults import refuse_to_share

from ranks import RankPool, raised
from unisono.comm.communicator import Communicator
from unisono.comm.cuda.conducting import mappings_of_this_process
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting.board import FileBoard
from unisono.errors import WeightUpdateError
from unisono.training import WeightReceiver, WeightSender, WeightShard, weight_update
from user_programs import eventually

pytestmark = pytest.mark.ranks(2)


def weights(value: float, device: str = "cuda") -> dict[str, torch.Tensor]:
    made = {
        "large": torch.full((2048, 2048), value, device=device),
        "half": torch.full((1000, 333), value, device=device, dtype=torch.bfloat16),
        "odd": torch.full((7,), int(value), device=device, dtype=torch.uint8),
        "strided": torch.full((512, 512), value, device=device).t(),
    }
    made["tied"] = made["large"]
    return made


@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_updates_on_one_gpu(comm: Communicator, transactional: bool, checksum: bool) -> None:
    mine = weights(comm.rank + 1)
    addresses = {name: tensor.data_ptr() for name, tensor in mine.items()}
    if comm.rank == 0:
        endpoint = WeightSender(comm, mine, transactional=transactional, checksum=checksum)
    else:
        endpoint = WeightReceiver(comm, mine)  # type: ignore[assignment]
    with endpoint:
        for version in range(1, 6):
            if comm.rank == 0:
                for name, tensor in mine.items():
                    if name != "tied":
                        tensor.fill_(10 * version)
            update = endpoint.update()
            assert update.version == version
            for name, tensor in mine.items():
                assert tensor.eq(10 * version).all(), name
                assert tensor.device.type == "cuda"
    assert mine["tied"].data_ptr() == mine["large"].data_ptr()
    if not transactional:
        assert addresses == {name: tensor.data_ptr() for name, tensor in mine.items()}


def test_500_updates_do_not_grow(comm: Communicator) -> None:
    mine = weights(comm.rank)
    ends = (WeightSender, WeightReceiver)[comm.rank](comm, mine)
    with ends as endpoint:
        for _ in range(20):
            endpoint.update()
        torch.cuda.synchronize()
        comm.barrier()
        free, _ = torch.cuda.mem_get_info()
        for _ in range(480):
            endpoint.update()
        torch.cuda.synchronize()
        comm.barrier()
        assert free - torch.cuda.mem_get_info()[0] < 64 << 20
    assert mine["large"].eq(0).all()


@pytest.mark.ranks(3)
def test_engines_serve_the_trainers_memory(comm: Communicator) -> None:
    mine = lone_weights(comm.rank + 1)
    if comm.rank == 0:
        with WeightSender(comm, mine) as sender:
            for step in (10, 20, 30):
                torch.cuda._sleep(50_000_000)  # the step's work is still in progress
                for tensor in mine.values():
                    tensor.fill_(step)
                sender.update()
                comm.barrier()  # the engines have checked
            mine["large"][3, 4] = -1
            torch.cuda.synchronize()
            comm.barrier()
            comm.barrier()
        return
    handed: dict[str, torch.Tensor] = {}
    receiver = WeightReceiver(comm, mine, alias=True)
    if comm.rank == 2:
        receiver = WeightReceiver(comm, alias=True, commit=handed.update)
        mine = handed
    for step in (10, 20, 30):
        update = receiver.update()
        assert (update.version, update.bytes) == (step // 10, 0)
        assert all(tensor.eq(step).all() for tensor in mine.values())
        comm.barrier()
    comm.barrier()
    assert mine["large"][3, 4].item() == mine["tied"][3, 4].item() == -1
    assert mine["large"].data_ptr() == mine["tied"].data_ptr()
    assert mine["turned"].stride() == (1, 512)
    receiver.close()
    assert count_open() >= 1
    assert mine["half"].eq(30).all()
    mine.clear()
    assert count_open() == 0
    comm.barrier()


def lone_weights(value: float) -> dict[str, torch.Tensor]:
    """No other view of its memory exists."""
    made = {
        "large": torch.full((2048, 2048), value, device="cuda"),
        "half": torch.full((1000, 333), value, device="cuda", dtype=torch.bfloat16),
        "odd": torch.full((7,), int(value), device="cuda", dtype=torch.uint8),
        "turned": torch.empty_strided((512, 512), (1, 512), device="cuda").fill_(value),
    }
    made["tied"] = made["large"]
    return made


def count_open() -> int:
    gc.collect()
    return len(mappings_of_this_process())


def test_500_updates_of_served_memory_do_not_grow(comm: Communicator) -> None:
    mine = lone_weights(comm.rank)
    end: Any = WeightReceiver(comm, mine, alias=True) if comm.rank else WeightSender(comm, mine)
    with end:
        for _ in range(20):
            end.update()
        torch.cuda.synchronize()
        comm.barrier()
        free, _ = torch.cuda.mem_get_info()
        opened = count_open()
        for _ in range(480):
            end.update()
        torch.cuda.synchronize()
        comm.barrier()
        assert free - torch.cuda.mem_get_info()[0] < 16 << 20
        assert count_open() == opened
    assert mine["large"].eq(0).all()
    comm.barrier()


def test_a_trainer_whose_memory_is_elsewhere_now(comm: Communicator) -> None:
    mine = {"w": torch.zeros(32 << 20, device="cuda")}
    end: Any = WeightReceiver(comm, mine, alias=True) if comm.rank else WeightSender(comm, mine)
    comm.barrier()
    free, _ = torch.cuda.mem_get_info()
    with end:
        for step in range(1, 13):
            if comm.rank == 0:
                mine["w"] = torch.full((32 << 20,), float(step), device="cuda")
            end.update()
            assert mine["w"].eq(step).all()
            assert comm.rank == 0 or count_open() == 1
            torch.cuda.empty_cache()  # so that memory is returned, and reused for something else
            comm.barrier()
        torch.cuda.empty_cache()
        comm.barrier()
        assert free - torch.cuda.mem_get_info()[0] < 300 << 20
    mine.clear()
    assert comm.rank == 0 or count_open() == 0
    comm.barrier()


def test_expandable_segments_are_served(fresh_pool: RankPool) -> None:
    assert fresh_pool.run(serve_expandable_segments, 2, connected=False) == [None] * 2


def serve_expandable_segments(rank: int, size: int, path: str) -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    with connect_on_host(FileBoard(path), rank, size) as comm:
        mine = {f"w{at}": torch.full((9 << 20,), float(rank), device="cuda") for at in range(4)}
        end: Any = WeightReceiver(comm, mine, alias=True) if rank else WeightSender(comm, mine)
        with end:
            for step in range(1, 7):
                if rank == 0 and step % 2:
                    mine.clear()
                    torch.cuda.empty_cache()  # pieces are freed, and others take their places
                    for at in range(4):
                        mine[f"w{at}"] = torch.full((9 << 20,), float(step), device="cuda")
                elif rank == 0:
                    for tensor in mine.values():
                        tensor.fill_(step)
                end.update()
                assert all(tensor.eq(step).all() for tensor in mine.values()), step
                comm.barrier()
        mine.clear()
        assert rank == 0 or count_open() == 0
        comm.barrier()


@pytest.mark.parametrize(
    ("gigabytes", "refuses", "limit_ms"),
    [(16, False, 60), (4, True, 200)],  # at least 20 GB/s
    ids=["expandable segments", "nothing is shared"],
)
def test_how_long_updates_take_without_cuda_ipc(
    fresh_pool: RankPool, record_property: Any, gigabytes: int, refuses: bool, limit_ms: float
) -> None:
    first, second, *later = fresh_pool.run(time_updates, 2, gigabytes, refuses, connected=False)[1]
    record_property("first_ms", round(first, 1))
    record_property("second_ms", round(second, 1))
    record_property("later_ms", round(statistics.median(later), 1))
    assert statistics.median(later) < limit_ms


def time_updates(rank: int, size: int, path: str, gigabytes: int, refuses: bool) -> list[float]:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    if refuses:
        refuse_to_share()
    times = []
    with connect_on_host(FileBoard(path), rank, size) as comm:
        mine = {
            f"w{at}": torch.full((50_000_000,), float(rank), device="cuda", dtype=torch.bfloat16)
            for at in range(10 * gigabytes)
        }
        end: Any = WeightReceiver(comm, mine) if rank else WeightSender(comm, mine, checksum=False)
        with end:
            for _ in range(7):
                comm.barrier()
                begin = time.perf_counter()
                end.update()
                times.append(1e3 * (time.perf_counter() - begin))
        assert all(tensor.eq(0).all() for tensor in mine.values())
    return times


def test_served_memory_outlives_the_trainer(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(die_while_an_engine_serves, 2, connected=False)
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert outcomes[1].error is None, outcomes[1].error
    assert outcomes[1].value == "served"


def die_while_an_engine_serves(rank: int, size: int, path: str) -> str:
    comm = connect_on_host(FileBoard(path), rank, size)
    mine = {"w": torch.full((256 << 20,), float(rank), device="cuda")}  # 1 GiB
    if rank == 0:
        mine["w"].fill_(5)
        WeightSender(comm, mine).update()
        os.kill(os.getpid(), signal.SIGKILL)
    receiver = WeightReceiver(comm, mine, alias=True)
    receiver.update()
    error = raised(WeightUpdateError, receiver.update)
    assert error.group_ended
    assert error.failed.keys() == {0}
    receiver.close()
    comm.close()
    torch.cuda.empty_cache()
    others = torch.full((1 << 30,), -1.0, device="cuda")  # the dead process's memory is not reused
    torch.cuda.synchronize()
    assert mine["w"].eq(5).all()
    mine["w"].add_(1)  # only this engine has it now
    assert mine["w"].eq(6).all()
    del error, others  # an error holds frames, which hold the weights
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    mine.clear()
    assert count_open() == 0
    # The dead process may take a moment to release its part.
    assert eventually(lambda: torch.cuda.mem_get_info()[0] - free > 1 << 29, within_s=20)
    return "served"


@pytest.mark.parametrize(("sender", "receiver"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_between_gpu_and_cpu(comm: Communicator, sender: str, receiver: str) -> None:
    mine = weights(comm.rank + 1, sender if comm.rank == 0 else receiver)
    weight_update(mine, comm)
    for name, tensor in mine.items():
        assert tensor.eq(1).all(), name


@pytest.mark.ranks(3)
def test_sharded_senders(comm: Communicator) -> None:
    rows = 1500
    if comm.rank < 2:
        part = torch.full((rows, 1024), float(comm.rank + 1), device="cuda")
        shard = WeightShard(part, (2 * rows, 1024), (comm.rank * rows, 0))
        weight_update({"w": shard}, comm, src=(0, 1))
    else:
        whole = torch.zeros(2 * rows, 1024, device="cuda")
        weight_update({"w": whole}, comm, src=(0, 1))
        assert whole[:rows].eq(1).all()
        assert whole[rows:].eq(2).all()


def test_a_trainer_that_dies_leaves_the_old_weights(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(lose_trainer, 2, connected=False)
    assert outcomes[1].error is None, outcomes[1].error
    assert outcomes[1].value == 1


def lose_trainer(rank: int, size: int, path: str) -> int:
    comm = connect_on_host(FileBoard(path), rank, size)
    mine = {f"w{index}": torch.full((8 << 20,), float(rank), device="cuda") for index in range(8)}
    if rank == 0:

        def die(moved: int, total: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        WeightSender(comm, mine, progress=die).update()
    with pytest.raises(WeightUpdateError):
        WeightReceiver(comm, mine).update()
    assert all(tensor.eq(1).all() for tensor in mine.values())
    return 1
