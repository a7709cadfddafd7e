"""Engines that serve a trainer's memory on a GPU (`alias=True`), as far as a machine without one
can test it: the driver is replaced at its one import, and GPU memory is memory that processes
share.
"""

from __future__ import annotations

import gc
import os
import signal
from functools import partial
from typing import Any

import pytest
import torch

import replaced_gpus
from ranks import RankPool, connect, raised
from replaced_gpus import tensor_of
from unisono import Communicator, WeightMismatch, WeightUpdateError
from unisono.training import WeightReceiver, WeightSender, WeightShard, weight_update


def weights(value: float) -> dict[str, torch.Tensor]:
    made = {
        "matrix": tensor_of(torch.full((60, 50), value)),
        "half": tensor_of(torch.full((7,), value, dtype=torch.bfloat16)),
        "turned": tensor_of(torch.full((50, 60), value).t()),
    }
    made["tied"] = made["matrix"]
    return made


def count_open() -> int:
    from unisono.comm.cuda.conducting import mappings_of_this_process

    gc.collect()
    return len(mappings_of_this_process())


def times(driver: Any, what: str) -> int:
    return sum(line.startswith(what) for line in driver.log)


@pytest.mark.parametrize("expandable", [False, True], ids=["allocations", "expandable segments"])
def test_engines_serve_the_trainers_memory(
    cuda_pool: RankPool, memory_folder: str, expandable: bool
) -> None:
    assert cuda_pool.run(serve, 3, memory_folder, expandable) == [None] * 3


def serve(comm: Communicator, folder: str, expandable: bool) -> None:
    driver = replaced_gpus.install(folder, expandable)
    mine = weights(comm.rank + 1)
    if comm.rank == 0:
        with WeightSender(comm, mine) as sender:
            for step in (10, 20):
                for tensor in mine.values():
                    tensor.fill_(step)
                assert sender.update().version == step // 10
                assert len(replaced_gpus.waits) == step // 10  # for the step before
                comm.barrier()  # the engines have checked
            mine["matrix"][3, 4] = -1
            comm.barrier()
            comm.barrier()
        assert times(driver, "open") == 0
        return
    handed: dict[str, torch.Tensor] = {}
    receiver: Any = WeightReceiver(comm, mine, alias=True)
    if comm.rank == 2:  # an engine without weights accepts anything
        receiver = WeightReceiver(comm, alias=True, commit=handed.update)
        mine = handed
    for step in (10, 20):
        update = receiver.update()
        assert (update.version, update.bytes) == (step // 10, 0)
        assert all(tensor.eq(step).all() for tensor in mine.values())
        comm.barrier()
    comm.barrier()
    assert mine["matrix"][3, 4] == mine["tied"][3, 4] == -1
    assert mine["matrix"].data_ptr() == mine["tied"].data_ptr()
    assert mine["turned"].stride() == (1, 60)
    receiver.close()
    assert count_open() == times(driver, "open") == 3  # each of them once
    assert mine["half"].eq(20).all()
    mine.clear()
    assert count_open() == 0
    assert times(driver, "close") == 3
    comm.barrier()


def test_memory_that_was_freed_and_came_back_is_another(
    cuda_pool: RankPool, memory_folder: str
) -> None:
    assert cuda_pool.run(move_weights, 2, memory_folder) == [None] * 2


def move_weights(comm: Communicator, folder: str) -> None:
    driver = replaced_gpus.install(folder)
    addresses, freed = set(), []
    mine = {"w": tensor_of(torch.zeros(1000), partial(freed.append, 0))}
    end: Any = WeightReceiver(comm, mine, alias=True) if comm.rank else WeightSender(comm, mine)
    with end:
        for step in range(1, 5):
            if comm.rank == 0:
                mine["w"] = tensor_of(torch.full((1000,), float(step)), partial(freed.append, step))
                addresses.add(mine["w"].data_ptr())
                # What the engine still serves is not freed, so nothing else is allocated there.
                assert freed == [0, *range(1, step - 1)][: len(freed)]
                assert step - 1 not in freed or step == 1
            end.update()
            assert mine["w"].eq(step).all()
            if comm.rank:
                assert count_open() == 1
            else:
                assert freed[-1] == step - 1
    assert comm.rank or len(addresses) < 4  # an address is reused
    if comm.rank:
        assert times(driver, "open") == 4
        assert times(driver, "close") == 3


def test_updates_do_not_grow(cuda_pool: RankPool, memory_folder: str) -> None:
    assert cuda_pool.run(update_often, 2, memory_folder) == [None] * 2


def update_often(comm: Communicator, folder: str) -> None:
    driver = replaced_gpus.install(folder)
    mine = weights(comm.rank)
    end: Any = WeightReceiver(comm, mine, alias=True) if comm.rank else WeightSender(comm, mine)
    mapped = []
    with end:
        for step in range(100):
            end.update()
            if step in (10, 99):
                with open("/proc/self/maps") as maps:
                    mapped.append(len(maps.readlines()))
        assert mapped[1] <= mapped[0] + 3
        assert times(driver, "open") == (3 if comm.rank else 0)
        assert mine["matrix"].eq(0).all()
        # What was agreed no longer holds: the trainer's memory moves, then the engine's.
        for moving in (0, 1):
            if comm.rank == moving:
                mine["half"] = tensor_of(torch.full((7,), 8.0 + moving, dtype=torch.bfloat16))
            for _ in range(3):
                assert end.update().version == end.version
                assert mine["half"].eq(8).all()
        assert end.version == 106
        assert times(driver, "open") == (5 if comm.rank else 0)  # it had released its own


def test_a_part_of_the_trainers_tensor_is_served(cuda_pool: RankPool, memory_folder: str) -> None:
    assert cuda_pool.run(serve_parts, 3, memory_folder) == [None] * 3


def serve_parts(comm: Communicator, folder: str) -> None:
    replaced_gpus.install(folder)
    whole = torch.arange(48.0).view(8, 6)
    options: Any = {"group": comm, "src": (0, 1)}
    if comm.rank < 2:  # each trainer rank has half of the rows
        held = tensor_of(whole[4 * comm.rank :][:4].clone())
        weight_update({"w": WeightShard(held, (8, 6), (4 * comm.rank, 0))}, **options)
        comm.barrier()
        return
    held = tensor_of(torch.zeros(2, 3))
    served = {"w": WeightShard(held, (8, 6), (5, 2))}
    with WeightReceiver(comm, served, alias=True) as receiver:
        receiver.update()
    assert torch.equal(held, whole[5:7, 2:5])
    assert held.stride() == (6, 1)
    comm.barrier()


def test_what_cannot_be_served_is_refused(cuda_pool: RankPool, memory_folder: str) -> None:
    assert cuda_pool.run(refuse, 2, memory_folder) == [None] * 2


def refuse(comm: Communicator, folder: str) -> None:
    driver = replaced_gpus.install(folder)
    mine = weights(comm.rank)
    where = {name: tensor.data_ptr() for name, tensor in mine.items()}
    update = partial(weight_update, mine, comm, **{"alias": True} if comm.rank else {})

    driver.refuses_export = True  # as under MIG
    error = str(raised(WeightUpdateError, update))
    assert "rank 0: ValueError: alias=True: engines cannot open the trainer's memory" in error
    assert "cuIpcGetMemHandle" in error
    assert "MIG and sandboxes" in error
    driver.refuses_export = False

    if comm.rank == 0:  # opening it finds nothing
        driver._own[where["half"]].path.rename(f"{folder}/away")
    comm.barrier()
    error = str(raised(WeightUpdateError, update))
    assert "rank 1: ValueError: alias=True: the memory of 'half' cannot be opened" in error
    assert where == {name: tensor.data_ptr() for name, tensor in mine.items()}
    assert mine["matrix"].eq(comm.rank).all()
    assert count_open() == 0
    if comm.rank == 0:
        driver._own[where["half"]].path.with_name("away").rename(driver._own[where["half"]].path)

    if comm.rank:
        replaced_gpus.name = "GPU-two"
    error = str(raised(WeightMismatch, update))
    assert "it is on GPU GPU-one, and the engine's weights are on GPU GPU-two" in error
    if comm.rank:
        mine["half"] = torch.zeros(7, dtype=torch.bfloat16)  # of the CPU
        update = partial(weight_update, mine, comm, alias=True)
    error = str(raised(WeightMismatch, update))
    assert "it is on GPU GPU-one, and the engine's weights are not on one GPU" in error


def test_where_one_engine_cannot_no_engine_serves(cuda_pool: RankPool, memory_folder: str) -> None:
    assert cuda_pool.run(vote_against, 3, memory_folder) == [None] * 3


def vote_against(comm: Communicator, folder: str) -> None:
    replaced_gpus.install(folder)
    mine = weights(comm.rank)
    where = {name: tensor.data_ptr() for name, tensor in mine.items()}
    asked = []

    def prepare(new: dict[str, torch.Tensor]) -> None:
        asked.append(all(tensor.eq(0).all() for tensor in new.values()))
        if comm.rank == 2 and len(asked) == 1:
            raise OSError("this engine has no room")

    if comm.rank == 0:
        end: Any = WeightSender(comm, mine)
    else:
        end = WeightReceiver(comm, mine, alias=True, prepare=prepare)
    error = str(raised(WeightUpdateError, end.update))
    assert "rank 2: OSError: this engine has no room" in error
    assert where == {name: tensor.data_ptr() for name, tensor in mine.items()}
    assert all(tensor.eq(comm.rank).all() for tensor in mine.values())
    assert count_open() == 0
    assert end.update().version == 1
    assert all(tensor.eq(0).all() for tensor in mine.values())
    assert asked == ([True, True] if comm.rank else [])
    comm.barrier()


def test_the_trainers_memory_outlives_the_trainer(fresh_pool: RankPool, memory_folder: str) -> None:
    job = partial(die_while_an_engine_serves, memory_folder)
    outcomes = fresh_pool.outcomes(job, 2, connected=False)
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert outcomes[1].error is None, outcomes[1].error
    assert outcomes[1].value == "served"


def die_while_an_engine_serves(folder: str, rank: int, size: int, path: str) -> str:
    driver = replaced_gpus.install(folder)
    comm = connect(path, rank, size)
    mine = weights(rank + 5)
    if rank == 0:
        WeightSender(comm, mine).update()
        os.kill(os.getpid(), signal.SIGKILL)
    receiver = WeightReceiver(comm, mine, alias=True)
    receiver.update()
    error = raised(WeightUpdateError, receiver.update)
    assert error.group_ended
    assert error.failed.keys() == {0}
    receiver.close()
    comm.close()
    assert all(tensor.eq(5).all() for tensor in mine.values())
    assert count_open() == 3
    del error  # which holds frames, which hold the weights
    mine["matrix"].zero_()  # only this engine has it now
    assert mine["tied"].eq(0).all()
    mine.clear()
    assert count_open() == 0
    assert times(driver, "close") == 3
    return "served"
