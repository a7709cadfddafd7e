"""Ring attention: compared with attention over the whole sequence in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from expected import doubles
from plain_attention import WIDTH, check, full, zigzag
from unisono import Message
from unisono.comm.communicator import Communicator
from unisono.training import ring_attention, shard_positions
from unisono.world.world import resolve

RANKS = [1, 2, 3, 4]


def lengths_of(size: int, kind: str) -> list[int]:
    if kind == "even":
        return [4] * size
    if kind == "one each":
        return [1] * size
    return [(3 * rank) % 5 + (rank == 0) * 2 for rank in range(size)]  # 2, 3, 1, 4


def check_ring(comm: Communicator, lengths: list[int], causal: bool, **options: Any) -> None:
    begin = sum(lengths[: comm.rank])
    mine = torch.arange(begin, begin + lengths[comm.rank])
    ring = partial(ring_attention, group=comm, causal=causal, **options)
    check(ring, mine, sum(lengths), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["even", "one each", "uneven"])
@pytest.mark.ranks(RANKS)
def test_ring(comm: Communicator, kind: str, causal: bool) -> None:
    check_ring(comm, lengths_of(comm.size, kind), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.ranks([2, 3])
def test_ring_with_an_empty_shard(comm: Communicator, causal: bool) -> None:
    for empty in range(comm.size):
        check_ring(comm, [3 * (rank != empty) for rank in range(comm.size)], causal)


@pytest.mark.ranks(3, backend="gloo")
def test_ring_on_gloo(process_group: Any) -> None:
    check_ring(resolve(), [4, 4, 4], causal=True)


@pytest.mark.ranks(2)
def test_ring_in_half_precision_and_with_large_scores(comm: Communicator) -> None:
    q, k, v = (doubles(seed, 8, WIDTH) for seed in (1, 2, 3))
    mine = [row.chunk(2)[comm.rank].bfloat16() for row in (q, k, v)]
    got = ring_attention(*mine)
    assert got.dtype is torch.bfloat16
    exact = full(*(row.bfloat16().double() for row in (q, k, v)))
    torch.testing.assert_close(got.double(), exact.chunk(2)[comm.rank], rtol=1e-2, atol=1e-2)
    huge = [row.chunk(2)[comm.rank] * scale for row, scale in ((q, 1e4), (k, 1e4), (v, 1))]
    expected = full(q * 1e4, k * 1e4, v).chunk(2)[comm.rank]
    torch.testing.assert_close(ring_attention(*huge), expected)


@pytest.mark.ranks(2)
def test_wrong_shapes(comm: Communicator) -> None:
    q = torch.ones(4, 3)
    with pytest.raises(ValueError, match="do not fit"):
        ring_attention(q, torch.ones(4, 2), q)
    with pytest.raises(ValueError, match=r"query has 4 positions, its key 5: .*\.tree_attention"):
        ring_attention(q, torch.ones(5, 3), torch.ones(5, 3))
    with pytest.raises(ValueError, match="positions and width"):
        ring_attention(q[0], q, q)
    with pytest.raises(ValueError, match="do not fit"):
        ring_attention(torch.ones(3, 4, 3), torch.ones(2, 4, 3), torch.ones(2, 4, 3))


@pytest.mark.ranks([1, 3])
def test_what_is_not_a_number_stays_so(comm: Communicator) -> None:
    for wrong in (torch.nan, torch.inf):
        q = torch.ones(2, 3)
        k = torch.ones(2, 3)
        if comm.rank == comm.size - 1:
            k[1, 1] = wrong
        assert ring_attention(q, k, torch.ones(2, 3)).isnan().all()


# -- the zigzag order ------------------------------------------------------------------------------


def check_zigzag(comm: Communicator, length: int, causal: bool = True, **options: Any) -> None:
    mine = zigzag(length, comm.rank, comm.size)
    assert torch.equal(mine, shard_positions(length, context=comm, order="zigzag"))
    inner_size = options.pop("inner_size", None)
    ring = partial(ring_attention, group=comm, causal=causal, order="zigzag", inner_size=inner_size)
    check(ring, mine, length, causal=causal, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.ranks([*RANKS, 8])
def test_zigzag(comm: Communicator, causal: bool) -> None:
    check_zigzag(comm, 4 * comm.size, causal)
    check_zigzag(comm, 4 * comm.size + 3, causal)  # parts of different lengths
    check_zigzag(comm, comm.size + 1, causal)  # some of them empty


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.ranks(4)
def test_zigzag_in_other_precisions(comm: Communicator, dtype: torch.dtype) -> None:
    check_zigzag(comm, 19, dtype=dtype)


@pytest.mark.ranks([1, 4])
def test_heads_that_share_keys(comm: Communicator) -> None:
    for key_heads in (1, 2, 6):
        check_zigzag(comm, 11, heads=6, key_heads=key_heads, value_width=3)


def flops(comm: Communicator, order: str) -> list[int]:
    """What each rank computes, forward and backward, in multiplications and additions."""
    q, k, v = (torch.ones(1, 2, 16, WIDTH, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        ring_attention(q, k, v, comm, causal=True, order=order).sum().backward()
    everyone = torch.empty(comm.size, dtype=torch.int64)
    comm.all_gather(everyone, torch.tensor([counter.get_total_flops()]))
    return everyone.tolist()


@pytest.mark.ranks(4)
def test_zigzag_gives_every_rank_as_much_to_compute(comm: Communicator) -> None:
    """In units of half a shard's queries times half a shard's keys: partly masked ones, on the
    diagonal, are computed in full."""
    plain, balanced = flops(comm, "contiguous"), flops(comm, "zigzag")
    unit = plain[0] // 4
    assert plain == [4 * unit, 8 * unit, 12 * unit, 16 * unit]
    assert balanced == [9 * unit] * 4


@pytest.mark.ranks(3)
def test_wrong_numbers_of_positions(comm: Communicator) -> None:
    q = torch.ones(5 if comm.rank == 1 else 4, WIDTH)  # of 13: 5, 4, 4
    with pytest.raises(ValueError, match=r"rank 0 of group \S+ has 4 of 13 .* would have 5"):
        ring_attention(q, q, q, order="zigzag")
    comm.barrier()  # the group goes on


@pytest.mark.ranks(2)
def test_wrong_options(comm: Communicator) -> None:
    q = torch.ones(4, WIDTH)
    with pytest.raises(ValueError, match=r"order is 'striped': use \"contiguous\" or \"zigzag\""):
        ring_attention(q, q, q, order="striped")
    with pytest.raises(ValueError, match="order is 'striped'"):
        shard_positions(4, order="striped")
    with pytest.raises(ValueError, match="-1 positions"):
        shard_positions(-1)
    for wrong in (0, 3, -1):
        with pytest.raises(ValueError, match=rf"inner_size {wrong} does not divide 2 .* use 1, 2"):
            ring_attention(q, q, q, inner_size=wrong)
    with pytest.raises(ValueError, match=r"rank 1 .* causal=True, order='contiguous'"):
        ring_attention(q, q, q, causal=comm.rank == 1)
    comm.barrier()


# -- the double ring -------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.ranks([1, 4, 6, 8])
def test_double_ring(comm: Communicator, causal: bool) -> None:
    for inner_size in (size for size in range(1, comm.size + 1) if comm.size % size == 0):
        check_ring(comm, [1 + rank % 3 for rank in range(comm.size)], causal, inner_size=inner_size)
        check_zigzag(comm, 4 * comm.size + 1, causal, inner_size=inner_size)


@pytest.mark.ranks(4, backend="gloo")
def test_double_ring_on_gloo(process_group: Any) -> None:
    check_zigzag(resolve(), 17, inner_size=2)


@pytest.mark.parametrize(
    ("inner_size", "to_peers"),
    [(None, {1: 3}), (2, {1: 2, 2: 1}), (1, {1: 3})],  # in ranks ahead: to the next, or to the mate
)
@pytest.mark.ranks(4)
def test_messages(
    comm: Communicator,
    monkeypatch: pytest.MonkeyPatch,
    inner_size: int | None,
    to_peers: dict[int, int],
) -> None:
    """Each rank sends keys and values size - 1 times in the forward pass; with rings of two, two of
    these messages stay inside them, and one goes to the other ring."""
    sent: list[Message] = []
    begin = Communicator.batch_isend_irecv

    def spy(self: Communicator, messages: Sequence[Message]) -> Any:
        sent.extend(message for message in messages if message.kind == "send")
        return begin(self, messages)

    monkeypatch.setattr(Communicator, "batch_isend_irecv", spy)
    q = torch.ones(1, 6, WIDTH)
    ring_attention(q, q, q, comm, inner_size=inner_size)
    assert [message.tensor.numel() for message in sent] == [2 * q.numel()] * 3
    distances = [(message.peer - comm.rank) % comm.size for message in sent]
    if inner_size == 2:  # rank 1 sends to rank 0, which is three ahead of it in the whole ring
        distances = [1 if message.peer // 2 == comm.rank // 2 else 2 for message in sent]
    assert {ahead: distances.count(ahead) for ahead in set(distances)} == to_peers
