"""torch's names: those that are accepted, and those whose error names the right call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from expected import assert_reduced, inputs, promised, reduced
from implementations import assert_usable, refused_by
from unisono import PremulSum
from unisono.comm.communicator import Communicator

REDUCTIONS: list[tuple[Any, Any, torch.dtype]] = [
    (dist.ReduceOp.SUM, "sum", torch.float32),
    (dist.ReduceOp.AVG, "avg", torch.float64),
    (dist.ReduceOp.PRODUCT, "product", torch.int32),
    (dist.ReduceOp(dist.ReduceOp.MAX), "max", torch.float32),
    (dist.ReduceOp.MIN, "min", torch.int64),
    (dist.ReduceOp.BXOR, "bxor", torch.uint8),
    (dist._make_nccl_premul_sum(0.5), PremulSum(0.5), torch.float32),
    ("prod", "product", torch.float32),
    ("MAX", "max", torch.int32),
]


def test_torch_s_reductions(comm: Communicator) -> None:
    rank, last = comm.rank, comm.size - 1
    for op, known, dtype in REDUCTIONS:
        if not promised(comm, dtype, known):
            continue
        given = inputs(comm.size, dtype, 3 * comm.size)
        expected = reduced(given, known)
        tensors = [given[rank].clone() for _ in range(4)]
        comm.all_reduce(tensors[0], op)
        comm.all_reduce(tensors[1], op, async_op=True).wait()
        comm.all_reduce([tensors[2]], op)
        comm.reduce(tensors[3], dst=last, op=op)
        for tensor in tensors if rank == last else tensors[:3]:
            assert_reduced(comm, tensor, expected, op)
        comm.reduce_scatter(part := torch.empty(3, dtype=dtype), given[rank], op)
        assert_reduced(comm, part, expected[3 * rank : 3 * rank + 3], op)
        comm.all_reduce(tensor := given[rank].clone(), op, algorithm="ring")
        assert torch.allclose(tensor.double(), expected.double(), rtol=1e-4)
    assert "torch ReduceOp" in str(refused_by(comm.all_reduce, torch.ones(1), "middle"))
    assert "avg" in str(refused_by(comm.reduce, torch.ones(1).int(), 0, dist.ReduceOp.AVG))
    assert_usable(comm)


def test_torch_s_roots(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    mine = torch.full((2,), rank + 1.0)
    for root in range(size):
        is_root = rank == root
        comm.broadcast(tensor := mine.clone(), src=root)
        assert tensor.tolist() == [root + 1] * 2
        comm.broadcast(tensor := mine.clone(), root, src=root, async_op=True).wait()
        assert tensor.tolist() == [root + 1] * 2
        comm.reduce(tensor := mine.clone(), dst=root)
        assert tensor.tolist() == [sum(range(1, size + 1)) if is_root else rank + 1] * 2
        wide = torch.zeros(size, 2) if is_root else None
        comm.gather(wide, mine, dst=root)
        assert wide is None or wide[:, 0].tolist() == list(range(1, size + 1))
        comm.scatter(part := torch.zeros(2), wide, src=root)
        assert part.tolist() == [rank + 1] * 2
        if not is_root:
            comm.scatter(part := torch.zeros(2), src=root)
            assert part.tolist() == [7, 7]
        else:
            comm.scatter(part := torch.zeros(2), torch.full((size, 2), 7.0), root=root)
    for call, arguments, name in (
        (comm.broadcast, (mine, 0), "src"),
        (comm.reduce, (mine, 0), "dst"),
        (comm.gather, (None, mine, 0), "dst"),
        (comm.scatter, (mine, None, 0), "src"),
    ):
        error = refused_by(lambda: call(*arguments, **{name: size}))  # noqa: B023
        assert f"0 and {size} are two different roots: pass root, or" in str(error)
        error = refused_by(lambda: call(*arguments[:-1], **{name: size}))  # noqa: B023
        assert f"root {size} is not a rank of a group of {size}" in str(error)
    assert_usable(comm)


def test_torch_s_calls_are_answered_with_the_right_ones(comm: Communicator) -> None:
    any_comm: Any = comm
    x, wide = torch.ones(2), torch.ones(2 * comm.size)
    for name in ("all_gather", "reduce_scatter", "gather", "all_to_all"):
        error = refused_by(lambda: getattr(any_comm, name)(x))  # noqa: B023
        assert f"{name} on group {comm.name}: None " in str(error)
        assert f"comm.{name}(output, input)" in str(error)
        assert f"unisono.{name}(input, group=comm)" in str(error)
    splits = [2] * comm.size
    error = refused_by(any_comm.all_to_all, wide.clone(), wide, splits, splits)
    assert "comm.all_to_all(list(output.split(output_splits)), list(input.split(" in str(error)
    error = refused_by(any_comm.gather, x, [x] * comm.size if comm.rank == 0 else None)
    assert "instead of a tensor as the input of comm.gather(output, input)" in str(error)
    for name, right in (
        ("world_size", "comm.size"),
        ("all_gather_into_tensor", "comm.all_gather(output, input)"),
        ("all_gather_object", "unisono.all_gather_object(obj, group=comm)"),
    ):
        with pytest.raises(AttributeError) as caught:
            getattr(comm, name)
        assert str(caught.value) == f"a Communicator has no {name}: use {right}"
        assert not hasattr(comm, name)
        assert name not in dir(comm)
    for ranks in ("tp", 2, ["tp"], None, [0.5]):
        with pytest.raises(TypeError, match=r'comm\.split\(\[0, 1\], label="tp"\)'):
            any_comm.split(ranks)
    assert_usable(comm)
