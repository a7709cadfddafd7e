"""New weights from a trainer to an engine on the same GPU: from memory to memory."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from ranks import RankPool
from unisono.comm.base import Communicator
from unisono.comm.rendezvous.announcements import FileAnnouncements
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator
from unisono.errors import WeightUpdateError
from unisono.training import WeightReceiver, WeightSender, WeightShard, weight_update

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
    comm = SharedMemoryCommunicator.connect(FileAnnouncements(path), rank, size)
    mine = {f"w{index}": torch.full((8 << 20,), float(rank), device="cuda") for index in range(8)}
    if rank == 0:

        def die(moved: int, total: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        WeightSender(comm, mine, progress=die).update()
    with pytest.raises(WeightUpdateError):
        WeightReceiver(comm, mine).update()
    assert all(tensor.eq(1).all() for tensor in mine.values())
    return 1
