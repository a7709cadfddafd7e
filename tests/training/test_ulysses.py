"""Sequence parallelism, alone and with a ring: compared with attention in one process."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from plain_attention import BATCH, WIDTH, check, zigzag
from unisono import ProcessGroupManager
from unisono.comm.communicator import Communicator
from unisono.training import shard_positions, ulysses_attention
from unisono.world.world import resolve

HEADS = 24  # divides by 1, 2, 3, 4 and 8 ranks


def check_ulysses(comm: Communicator, length: int, causal: bool, **options: Any) -> None:
    mine = torch.arange(length).tensor_split(comm.size)[comm.rank]
    assert torch.equal(mine, shard_positions(length, heads=comm))
    attend = partial(ulysses_attention, group=comm, causal=causal)
    check(attend, mine, length, causal=causal, **{"heads": HEADS, **options})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.ranks([1, 2, 3, 4, 8])
def test_ulysses(comm: Communicator, causal: bool) -> None:
    check_ulysses(comm, 2 * comm.size, causal)
    check_ulysses(comm, 2 * comm.size + 1, causal)  # rank 0 has one more
    check_ulysses(comm, max(1, comm.size - 1), causal)  # the last rank has none


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.ranks(4)
def test_ulysses_in_other_precisions(comm: Communicator, dtype: torch.dtype) -> None:
    check_ulysses(comm, 13, causal=True, heads=4, dtype=dtype)


@pytest.mark.ranks([1, 2])
def test_heads_that_share_keys(comm: Communicator) -> None:
    for key_heads in (2, 4):
        check_ulysses(comm, 7, causal=True, heads=8, key_heads=key_heads, value_width=3)


@pytest.mark.ranks(3, backend="gloo")
def test_ulysses_on_gloo(process_group: Any) -> None:
    check_ulysses(resolve(), 7, causal=True, heads=3)


@pytest.mark.ranks(2)
def test_a_scale_and_no_batch(comm: Communicator) -> None:
    q = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))
    mine = q[:, shard_positions(6, heads=comm)]
    expected = torch.softmax(q @ q.mT * 0.3, -1) @ q
    got = ulysses_attention(mine, mine, mine, scale=0.3)
    torch.testing.assert_close(got, expected[:, shard_positions(6, heads=comm)])


@pytest.mark.ranks(4)
def test_what_is_sent(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element of query, key, value and result once, in two calls, except a rank's own."""
    sent: list[list[int]] = []
    begin = Communicator.all_to_all

    def spy(self: Communicator, output: Any, input: Any, **options: Any) -> Any:
        sent.append([part.numel() for part in input])
        return begin(self, output, input, **options)

    monkeypatch.setattr(Communicator, "all_to_all", spy)
    q = torch.ones(4, 6, WIDTH)
    ulysses_attention(q, q, q)
    assert sent == [[3 * q.numel() // 4] * 4, [q.numel() // 4] * 4]


# -- heads first, context second -------------------------------------------------------------------


def check_2d(
    group: Any,
    size: int,
    heads_size: int,
    length: int,
    order: str,
    inner_size: int | None = None,
    **options: Any,
) -> None:
    sizes = {"tp_size": heads_size, "cp_size": size // heads_size}
    with ProcessGroupManager(**sizes, group=group) as manager:
        ring = zigzag(length, manager.cp_rank, manager.cp_world_size)
        if order == "contiguous":
            ring = torch.arange(length).tensor_split(manager.cp_world_size)[manager.cp_rank]
        mine = ring.tensor_split(heads_size)[manager.tp_rank]
        found = shard_positions(length, context=manager.cp, heads=manager.tp, order=order)
        assert torch.equal(mine, found)
        attend = partial(
            ulysses_attention,
            group=manager.tp,
            context=manager.cp,
            causal=True,
            order=order,
            inner_size=inner_size,
        )
        check(attend, mine, length, causal=True, **{"heads": 8, **options})


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.ranks([1, 2, 4, 8])
def test_2d(comm: Communicator, order: str) -> None:
    for heads_size in (size for size in (1, 2, 4, 8) if size <= comm.size):
        for length in (4 * comm.size, 4 * comm.size + 3):
            check_2d(comm, comm.size, heads_size, length, order)


@pytest.mark.ranks(8)
def test_2d_with_a_double_ring_and_shared_heads(comm: Communicator) -> None:
    check_2d(comm, 8, 2, 33, "zigzag", inner_size=2, key_heads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.ranks(4)
def test_2d_in_other_precisions(comm: Communicator, dtype: torch.dtype) -> None:
    check_2d(comm, 4, 2, 19, "zigzag", dtype=dtype)


@pytest.mark.ranks(4, backend="gloo")
def test_2d_on_gloo(process_group: Any) -> None:
    check_2d(process_group, 4, 2, 17, "zigzag")


# -- what does not fit -----------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_heads_that_cannot_be_cut(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank raises before anything moves, and the group stays usable."""
    q = torch.ones(BATCH, 6, 2, WIDTH)

    def moves(*_: Any, **__: Any) -> None:
        raise AssertionError("something moved")

    with monkeypatch.context() as patch:
        patch.setattr("unisono.training.ulysses.all_gather_integers", moves)
        patch.setattr("unisono.training.ulysses.exchange_rows", moves)
        with pytest.raises(ValueError, match="6 query heads cannot be cut evenly over 4 ranks"):
            ulysses_attention(q, q, q)
        key = torch.ones(BATCH, 2, 2, WIDTH)
        with pytest.raises(ValueError, match=r"2 key heads cannot be cut .* or repeat the heads"):
            ulysses_attention(torch.ones(BATCH, 8, 2, WIDTH), key, key)
    check_ulysses(comm, 8, causal=True, heads=4)


@pytest.mark.ranks(2)
def test_wrong_arguments(comm: Communicator) -> None:
    q = torch.ones(4, 3, WIDTH)
    with pytest.raises(ValueError, match="heads are needed"):
        ulysses_attention(q[0], q[0], q[0])
    with pytest.raises(ValueError, match="do not fit"):
        ulysses_attention(q, q[:3], q[:3])
    with pytest.raises(ValueError, match="order and inner_size are for a ring"):
        ulysses_attention(q, q, q, order="zigzag")
    with pytest.raises(ValueError, match="inner_size 3 does not divide 2 ranks"):
        ulysses_attention(q, q, q, comm.split([comm.rank]), context=comm, inner_size=3)
    comm.barrier()
