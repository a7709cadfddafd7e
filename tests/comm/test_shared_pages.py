"""Tensors that were allocated elsewhere, shared in place."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
import torch

from unisono.comm.shared_memory.shared_pages import LEAST_BYTES, SharedPages

pytestmark = pytest.mark.ranks(2)

COUNT = 100_000


def numbers(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(COUNT, dtype=dtype) % 100 + rank


def everybodys(comm: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([numbers(rank, dtype) for rank in range(comm.size)]).sum(0, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 3, 2000])
def test_a_tensor_keeps_address_and_elements_and_is_reduced_in_its_place(
    comm: Any, dtype: torch.dtype, offset: int
) -> None:
    """It may begin anywhere in a page, at a different offset on each rank."""
    before = torch.full((COUNT + 5000,), 7, dtype=dtype)
    begin = offset * (comm.rank + 1)
    tensor = before[begin : begin + COUNT].copy_(numbers(comm.rank, dtype))
    address = tensor.data_ptr()
    pages = SharedPages(COUNT, dtype, comm)
    pages.hold(tensor)
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, numbers(comm.rank, dtype))
    assert comm.is_shared(pages.middle)
    assert pages.middle.nbytes > tensor.nbytes - 16 * 1024
    comm.all_reduce(pages.edges)
    comm.all_reduce(pages.middle)
    assert torch.equal(tensor, everybodys(comm, dtype))
    pages.middle.zero_()
    assert not tensor.count_nonzero() > sum(edge.numel() for edge in pages.edges)
    assert torch.equal(before[:begin], torch.full((begin,), 7, dtype=dtype))
    assert set(before[begin + COUNT :].tolist()) <= {7}
    comm.barrier()


def test_a_tensor_that_is_let_go_has_memory_of_its_own(comm: Any) -> None:
    tensor, another = numbers(comm.rank), numbers(comm.rank + 1)
    pages = SharedPages(COUNT, tensor.dtype, comm)
    pages.hold(tensor)
    pages.hold(another)
    assert torch.equal(tensor, numbers(comm.rank))
    tensor.zero_()
    assert torch.equal(another, numbers(comm.rank + 1))
    comm.all_reduce(pages.edges)
    comm.all_reduce(pages.middle)
    assert torch.equal(another, everybodys(comm) + comm.size)
    del pages
    gc.collect()
    comm.barrier()  # memory that all ranks have dropped is returned to the system
    assert torch.equal(another, everybodys(comm) + comm.size)
    assert not tensor.any()


def test_a_forked_child_reads_and_cannot_write(comm: Any) -> None:
    tensor = numbers(comm.rank)
    pages = SharedPages(COUNT, tensor.dtype, comm)
    pages.hold(tensor)
    for way, wanted in ((lambda: tensor.sum(), 0), (tensor.zero_, -signal.SIGSEGV)):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            way()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == wanted
    assert torch.equal(tensor, numbers(comm.rank))
    comm.barrier()


def test_what_is_small_or_elsewhere_is_left_alone(comm: Any) -> None:
    assert SharedPages.can_hold(torch.empty(LEAST_BYTES, dtype=torch.uint8), comm)
    assert not SharedPages.can_hold(torch.empty(LEAST_BYTES - 1, dtype=torch.uint8), comm)
    assert not SharedPages.can_hold(torch.empty(LEAST_BYTES, device="meta"), comm)
