"""What serving engines ask of a group, against the same in one process; up to 12 ranks."""

from __future__ import annotations

import pytest
import torch

import unisono
from unisono.comm.communicator import Communicator
from unisono.serving.collectives import ServingCollectives

RANKS = [1, 2, 3, 12]


def rows(size: int, *shape: int) -> list[torch.Tensor]:
    """Every rank's tensor, of small integers."""
    make = torch.Generator().manual_seed(size)
    return [torch.randint(-9, 9, shape, generator=make).float() for _ in range(size)]


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_whole_tensors(comm: Communicator, mode: type[torch.inference_mode]) -> None:
    served, size, rank = ServingCollectives(comm), comm.size, comm.rank
    with mode():
        for shape in [(2, 3 * size, 4), (size, 1), (64 * size, 512)]:
            given = rows(size, *shape)
            mine = given[rank]
            assert torch.equal(served.all_reduce(mine.clone()), torch.stack(given).sum(0))
            for dim in (*range(len(shape)), -1):
                assert torch.equal(served.all_gather(mine, dim), torch.cat(given, dim))
                gathered = served.gather(mine, size - 1, dim)
                if rank == size - 1:
                    assert gathered is not None
                    assert torch.equal(gathered, torch.cat(given, dim))
                else:
                    assert gathered is None
                if shape[dim] % size == 0:
                    part = torch.stack(given).sum(0).chunk(size, dim)[rank]
                    assert torch.equal(served.reduce_scatter(mine, dim), part)


@pytest.mark.ranks(RANKS)
def test_uneven_parts(comm: Communicator) -> None:
    served, size, rank = ServingCollectives(comm), comm.size, comm.rank
    sizes = [(3 * r + 1) % 4 for r in range(size)]  # some have none
    given = [row[: sizes[r]] for r, row in enumerate(rows(size, 4, 5))]
    assert torch.equal(served.all_gatherv(given[rank], sizes), torch.cat(given))
    even = rows(size, 4, 5)
    assert torch.equal(served.all_gatherv(even[rank]), torch.cat(even))
    wide = rows(size, sum(sizes), 5)
    total = torch.stack(wide).sum(0)
    assert torch.equal(served.reduce_scatterv(wide[rank], 0, sizes), total.split(sizes)[rank])
    turned = served.reduce_scatterv(wide[rank].t(), 1, sizes)
    assert torch.equal(turned, total.t().split(sizes, 1)[rank])


@pytest.mark.ranks([2, 12])
def test_dictionaries_in_a_pipeline(comm: Communicator) -> None:
    """Senders are far ahead of receivers and reuse their tensors; shapes change in between."""
    served = ServingCollectives(comm)

    def stage(step: int, rank: int) -> dict[str, torch.Tensor]:
        tokens = 1 + step // 7
        return {
            "hidden": torch.full((tokens, 4), float(100 * rank + step), dtype=torch.bfloat16),
            "residual": torch.arange(tokens * 3.0).view(3, tokens).t() + step,
            "nothing": torch.empty(0, 2, dtype=torch.int64),
        }

    steps = 40
    if comm.rank < comm.size - 1:
        for step in range(steps):
            sent = stage(step, comm.rank)
            served.send_tensor_dict(sent, comm.rank + 1) if comm.rank == 0 else None
            sent["hidden"].zero_()
            if comm.rank:
                check(served.recv_tensor_dict(comm.rank - 1), stage(step, comm.rank - 1))
                served.send_tensor_dict(stage(step, comm.rank), comm.rank + 1)
    else:
        for step in range(steps):
            check(served.recv_tensor_dict(comm.rank - 1), stage(step, comm.rank - 1))
    comm.barrier()


def check(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


@pytest.mark.ranks(3)
@pytest.mark.provokes
def test_what_does_not_fit(comm: Communicator) -> None:
    served = ServingCollectives(comm)
    with pytest.raises(ValueError, match="cannot be cut into 3 equal parts"):
        served.reduce_scatter(torch.ones(4, 2), 0)
    trio = comm.split([0, 1, 2])
    assert trio is not None
    wrong = ValueError if comm.rank == 2 else unisono.CollectiveMismatch
    with pytest.raises(wrong):  # on the rank that has three rows, not two
        ServingCollectives(trio).all_gatherv(torch.ones(1 + comm.rank, 2), [1, 2, 2])
