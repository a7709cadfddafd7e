"""Attention over a sharded sequence, with CUDA tensors on one shared GPU: equal to one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from plain_attention import check, zigzag
from unisono import ProcessGroupManager
from unisono.comm.communicator import Communicator
from unisono.training import ring_attention, shard_positions, ulysses_attention

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.ranks([1, 2, 4])
def test_rings(comm: Communicator, causal: bool, dtype: torch.dtype) -> None:
    length = 8 * comm.size + 3
    ring = partial(ring_attention, group=comm, causal=causal)
    on_gpu = partial(check, length=length, causal=causal, dtype=dtype, device="cuda")
    on_gpu(ring, torch.arange(length).tensor_split(comm.size)[comm.rank])
    mine = zigzag(length, comm.rank, comm.size)
    on_gpu(partial(ring, order="zigzag"), mine)
    on_gpu(partial(ring, order="zigzag"), mine, heads=4, key_heads=2)
    if comm.size == 4:
        on_gpu(partial(ring, order="zigzag", inner_size=2), mine)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.ranks([1, 2, 4])
def test_ulysses(comm: Communicator, causal: bool, dtype: torch.dtype) -> None:
    length = 8 * comm.size + 3
    attend = partial(ulysses_attention, group=comm, causal=causal)
    mine = shard_positions(length, heads=comm)
    check(attend, mine, length, causal=causal, heads=4, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.ranks(4)
def test_2d(comm: Communicator, dtype: torch.dtype) -> None:
    with ProcessGroupManager(tp_size=2, cp_size=2, group=comm) as manager:
        groups = {"heads": manager.tp, "context": manager.cp}
        mine = shard_positions(35, **groups, order="zigzag")
        attend = partial(
            ulysses_attention, group=manager.tp, context=manager.cp, causal=True, order="zigzag"
        )
        check(attend, mine, 35, causal=True, heads=4, dtype=dtype, device="cuda")
