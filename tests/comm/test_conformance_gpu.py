"""The transport over torch on nccl: needs a GPU; one rank is enough for every call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import unisono
from expected import (
    COMPLEXES,
    FLOATS,
    OPS,
    REDUCIBLE,
    assert_same,
    copy_of,
    inputs,
    meaningful,
    reduced,
)
from ranks import subgroup
from unisono import PremulSum
from unisono.comm.communicator import Communicator
from unisono.comm.over_torch.torch_transport import OverTorch

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a GPU and nccl"
)


@pytest.fixture
def comm() -> Iterator[Communicator]:
    made = unisono.init()
    yield made
    unisono.shutdown()


def test_one_process_with_a_gpu_starts_on_nccl(comm: Communicator) -> None:
    assert isinstance(comm.transport, OverTorch)
    assert unisono.get_backend() == "nccl"
    assert unisono.get_device() == torch.device("cuda", 0)
    assert "its own GPU" in unisono.get_backend_reason()
    comm.all_reduce(here := torch.ones(3))
    assert here.tolist() == [1, 1, 1]
    comm.barrier()


def nccl_has(dtype: torch.dtype, op: str | PremulSum) -> bool:
    """Whether NCCL supports a reduction that is defined; others are rejected."""
    if isinstance(op, PremulSum):
        return False
    if dtype in COMPLEXES:
        return op in ("sum", "avg", "mean")
    small = (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
    return op not in ("band", "bor", "bxor") and dtype in (*small, *FLOATS)


def test_every_reduction_on_the_device(comm: Communicator) -> None:
    for dtype in REDUCIBLE:
        for op in (*OPS, PremulSum(-3), PremulSum(0.3)):
            if meaningful(dtype, op):
                given = inputs(1, dtype, 37)
                tensor = copy_of(given[0]).to("cuda")
                if not nccl_has(dtype, op):
                    with pytest.raises(TypeError, match="nccl"):
                        comm.all_reduce(tensor, op)
                    continue
                comm.all_reduce(tensor, op)
                assert_same(tensor.cpu(), reduced(given, op), (dtype, op))
                output = torch.empty_like(tensor)
                comm.reduce_scatter(output, copy_of(given[0]).to("cuda"), op)
                assert_same(output.cpu(), reduced(given, op), (dtype, op))


@pytest.mark.parametrize("async_op", [False, True])
def test_every_way_to_move_on_the_device(comm: Communicator, async_op: bool) -> None:
    wide = torch.zeros(12, device="cuda")
    strided, given = wide[::2], torch.arange(6.0, device="cuda")
    calls = (
        lambda: comm.all_gather(strided, given, async_op=async_op),
        lambda: comm.all_gather([strided], given, async_op=async_op),
        lambda: comm.all_to_all(strided, given, async_op=async_op),
        lambda: comm.gather(strided, given, async_op=async_op),
        lambda: comm.scatter(strided, given, async_op=async_op),
        lambda: comm.reduce_scatter([strided], [given], async_op=async_op),
    )
    for call in calls:
        wide.fill_(-1)
        work = call()
        if work is not None:
            work.wait(timeout_s=30)
            assert work.is_completed()
        assert wide.tolist() == [0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1]
    comm.broadcast([wide, given])
    assert comm.barrier(async_op=True) is not None
    sub = subgroup(comm, [0])
    sub.all_reduce(given)
    sub.close()
