"""Sharded models and optimizers on "unisono": FSDP2, DTensor, pipelines, ZeRO, checkpoints.

What the ranks learn together is compared with what one process learns from the whole batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from unisono.comm.engine import Operation

STEPS = 3
BATCH = 8


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.up = torch.nn.Linear(6, 16, dtype=torch.float64)
        self.down = torch.nn.Linear(16, 4, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(self.up(inputs).tanh())
        return output


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(BATCH, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: torch.nn.Module, optimizer: Any, part: int = 0, parts: int = 1) -> None:
    """Learn from one part of every batch."""
    for number in range(STEPS):
        inputs, targets = (whole.chunk(parts)[part] for whole in batch(number))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def learned_alone() -> dict[str, torch.Tensor]:
    model = Mlp()
    train(model, adam(model))
    return dict(model.state_dict())


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


def assert_learned(model: torch.nn.Module) -> None:
    torch.testing.assert_close(whole(model.state_dict()), learned_alone())


@pytest.mark.ranks([2, 3])
def test_fully_shard(process_group: Any) -> None:
    """With three ranks, 16 rows do not divide."""
    model: Any = Mlp()
    for layer in (model.up, model.down):
        fully_shard(layer)
    fully_shard(model)
    optimizer = adam(model)
    size = dist.get_world_size()
    for number in range(STEPS):
        inputs, targets = batch(number)
        optimizer.zero_grad()
        mine = slice(dist.get_rank(), None, size)
        error = (model(inputs[mine]) - targets[mine]).square().sum() / inputs.size(0) / 4
        (error * size).backward()  # FSDP divides by the number of ranks
        optimizer.step()
    assert isinstance(model.up.weight, DTensor)
    assert model.up.weight.to_local().numel() < model.up.weight.numel()
    assert_learned(model)


def mappings() -> int:
    """How many mappings of anonymous memory this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:unisono")


def learn_by_fsdp(process_group: Any, shared: bool, watch: Any) -> dict[str, torch.Tensor]:
    """The weights of a model of four equal layers after some steps."""
    torch.manual_seed(5)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(160, 160) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if shared:
        for module in (model, *model):
            module.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        inputs = torch.randn(
            8, 160, generator=torch.Generator().manual_seed(step + dist.get_rank())
        )
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        watch(step)
    return whole(model.state_dict())


@pytest.mark.ranks([2, 3])
@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_allocate_memory_from_process_group_for_comm"),
    reason="this torch allocates FSDP2's buffers itself",
)
def test_fully_shard_has_its_buffers_in_shared_memory(process_group: Any) -> None:
    comm = process_group.comm
    gathered: list[bool] = []  # whether the input of each all_gather was shared
    blocks: list[int] = []  # after each step
    original = process_group._run_given  # the path of every `dist` call

    def run_given(operation: Operation, output: Any, given: Any, options: Any) -> int:
        is_large = isinstance(given, torch.Tensor) and given.nbytes >= 16 * 1024
        if operation == Operation.ALL_GATHER and is_large:
            gathered.append(comm.is_shared(given))
        return int(original(operation, output, given, options))

    process_group._run_given = run_given
    shared = learn_by_fsdp(process_group, True, lambda step: blocks.append(mappings()))
    assert gathered
    assert all(gathered)
    gathered.clear()
    assert blocks[1:] == blocks[1:2] * 3  # used again
    usual = learn_by_fsdp(process_group, False, lambda step: None)
    assert not any(gathered)
    for name, tensor in usual.items():
        assert torch.equal(tensor, shared[name]), name


@pytest.mark.ranks(2)
def test_buffers_are_used_again_when_nobody_looks_at_them(process_group: Any) -> None:
    comm = process_group.comm
    cpu = torch.device("cpu")
    assert process_group.supports_tensor_alloc(cpu)
    assert not process_group.supports_tensor_alloc(torch.device("cuda:0"))
    with pytest.raises(ValueError, match="no memory on meta"):
        process_group.allocate_tensor(8, dtype=torch.uint8, device=torch.device("meta"))

    def ask(count: int = 100_000) -> torch.Tensor:
        made = process_group.allocate_tensor(count, dtype=torch.float32, device=cpu)
        assert made.shape == (count,)
        tensor: torch.Tensor = made.fill_(dist.get_rank())
        return tensor

    assert not comm.is_shared(ask(100))
    first, second = ask(), ask()
    assert comm.is_shared(first)
    assert comm.is_shared(second)
    assert not comm.is_shared(ask())  # there is no third one: this is ordinary memory
    address, part = first.data_ptr(), first.view(1000, 100)[3:]
    del first
    if dist.get_rank():  # ranks may differ in which are free
        del part
    again = ask()
    assert comm.is_shared(again) == bool(dist.get_rank())
    assert (again.data_ptr() == address) == bool(dist.get_rank())
    dist.all_reduce(again)
    assert again.unique().tolist() == [1.0]
    dist.all_reduce(second)
    assert second.unique().tolist() == [1.0]


@pytest.mark.ranks(4)
def test_tensor_and_data_parallel_on_a_mesh(process_group: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = Mlp()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    train(model, adam(model), mesh["dp"].get_local_rank(), 2)
    assert model.up.weight.to_local().shape == (4, 6)  # a quarter of 16 rows
    assert_learned(model)


@pytest.mark.ranks(4)
def test_dtensors_are_laid_out_anew(process_group: Any) -> None:
    mesh = init_device_mesh("cpu", (4,))
    matrix = torch.arange(60.0).reshape(6, 10)
    rows = distribute_tensor(matrix, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.to_local(), matrix.chunk(4, 1)[dist.get_rank()])
    assert torch.equal((columns @ columns.t()).full_tensor(), matrix @ matrix.t())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_pipeline(process_group: Any, schedule: Any) -> None:
    rank = dist.get_rank()
    model = Mlp()
    layer = torch.nn.Sequential(model.up, torch.nn.Tanh()) if rank == 0 else model.down
    stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
    pipeline = schedule(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    optimizer = adam(layer)
    for number in range(STEPS):
        inputs, targets = batch(number)
        optimizer.zero_grad()
        if rank == 0:
            pipeline.step(inputs)
        else:
            pipeline.step(target=targets)
        optimizer.step()
    expected = learned_alone()
    name = ("up", "down")[rank]
    linear: Any = (model.up, model.down)[rank]
    torch.testing.assert_close(linear.weight, expected[f"{name}.weight"])
    torch.testing.assert_close(linear.bias, expected[f"{name}.bias"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "bucket views"])
def test_zero_redundancy_optimizer(process_group: Any, overlap: bool) -> None:
    model = Mlp()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=overlap)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.05, parameters_as_bucket_view=overlap
    )
    train(wrapped, optimizer, dist.get_rank(), 2)
    assert_learned(model)
    assert len(optimizer.optim.state_dict()["state"]) < len(list(model.parameters()))


@pytest.mark.ranks(4)
def test_a_checkpoint_is_loaded_by_another_number_of_ranks(
    process_group: Any, shared_tmp_path: Path
) -> None:
    """Written by four ranks that own a quarter each, read by two that own a half."""
    model = fully_shard(Mlp())
    train(model, adam(model))
    checkpoint.save(model.state_dict(), checkpoint_id=shared_tmp_path / "step")
    half = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return
    mesh = dist.DeviceMesh.from_group(half, "cpu")
    other = Mlp()
    torch.nn.init.zeros_(other.up.weight)
    fully_shard(other, mesh=mesh)
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=shared_tmp_path / "step", process_group=half)
    other.load_state_dict(state)
    assert_learned(other)
