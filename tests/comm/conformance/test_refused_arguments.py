"""Arguments that are refused, by one sentence, after which the group goes on."""

from __future__ import annotations

import numpy
import pytest
import torch

from implementations import assert_usable, refused_by
from ranks import attempt
from unisono import PremulSum
from unisono.comm.base import Communicator


def test_a_tensor_that_cannot_receive_is_refused(comm: Communicator) -> None:
    fixed = numpy.ones(4)
    fixed.flags.writeable = False
    assert "read-only" in str(refused_by(comm.all_reduce, fixed))
    refused_by(comm.all_gather, numpy.broadcast_to(numpy.ones(1), 4 * comm.size), fixed)
    assert "expanded" in str(refused_by(comm.all_reduce, torch.ones(1).expand(4)))
    refused_by(comm.broadcast, torch.ones(3, 1).expand(3, 4))
    refused_by(comm.reduce_scatter, torch.ones(1).expand(2), torch.ones(2 * comm.size))
    assert fixed.tolist() == [1.0] * 4
    assert_usable(comm)


def test_a_read_only_or_expanded_input_is_as_good_as_any(comm: Communicator) -> None:
    fixed = numpy.full(3, comm.rank)
    fixed.flags.writeable = False
    output = numpy.zeros(3 * comm.size, fixed.dtype)
    comm.all_gather(output, fixed)
    assert output.tolist() == [rank for rank in range(comm.size) for _ in range(3)]
    summed = torch.zeros(2)
    comm.reduce_scatter(summed, torch.full((1,), comm.rank + 1.0).expand(2 * comm.size))
    assert summed.tolist() == [sum(range(1, comm.size + 1))] * 2


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_tensor_that_is_not_plain_memory_is_refused(comm: Communicator) -> None:
    strange = {
        "meta": torch.empty(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "sparse row": torch.eye(3).to_sparse_csr(),
        "big-endian": numpy.ones(3, numpy.dtype(">f4")),
        "objects": numpy.array([object()]),
        "records": numpy.zeros(2, numpy.dtype([("a", "f4"), ("b", "i4")])),
        "words": numpy.array(["word"]),
        "dates": numpy.array(["2020-01-01"], dtype="M8[s]"),
        "a number": 3.0,
        "a list of numbers": [1.0, 2.0],
        "text": "tensor",
    }
    for name, tensor in strange.items():
        for call in (comm.all_reduce, comm.broadcast):
            error = attempt(call, tensor)
            assert isinstance(error, (TypeError, ValueError)), (name, call.__name__, error)
            assert "Exception raised from" not in str(error), "a C++ stack is no help"
        error = attempt(comm.all_gather, torch.zeros(3 * comm.size), tensor)
        assert isinstance(error, (TypeError, ValueError)), (name, error)
    assert_usable(comm)


def test_types_that_no_plain_tensor_has_are_refused(comm: Communicator) -> None:
    bits = torch.zeros(4, dtype=torch.uint8).view(torch.bits8)
    refused_by(comm.all_reduce, bits)
    assert_usable(comm)


@pytest.mark.parametrize(
    "operation", ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter",
                  "all_to_all", "gather", "scatter"]
)  # fmt: skip
def test_nothing_in_place_of_a_tensor_is_refused(comm: Communicator, operation: str) -> None:
    comm.timeout_s = 3.0
    call = getattr(comm, operation)
    if operation in ("all_reduce", "reduce", "broadcast"):
        refused_by(call, None)
    elif operation in ("all_gather", "reduce_scatter", "all_to_all"):
        refused_by(call, None, None)
        refused_by(call, torch.zeros(comm.size), None)
        refused_by(call, None, torch.zeros(comm.size))
    elif operation == "gather":
        refused_by(call, torch.zeros(comm.size) if comm.rank == 0 else None, None)
    else:
        refused_by(call, None, torch.zeros(comm.size) if comm.rank == 0 else None)
    assert_usable(comm)


def test_a_tensor_of_zeros_without_memory_is_right_or_refused(comm: Communicator) -> None:
    comm.timeout_s = 3.0
    output = torch.ones(4 * comm.size)
    error = attempt(comm.all_gather, output, torch._efficientzerotensor(4))
    if error is None:
        assert output.eq(0).all()
    else:
        assert isinstance(error, (TypeError, ValueError))


def test_roots_ops_and_parts_that_make_no_sense_are_refused(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    tensor, wide = torch.ones(2), torch.full((2 * size,), 7.0)
    for root in (-1, size, size + 5):
        assert str(root) in str(refused_by(comm.broadcast, tensor, root))
        refused_by(comm.reduce, tensor, root)
        refused_by(comm.gather, None, tensor, root)
        refused_by(comm.scatter, tensor, None, root)
    refused_by(comm.all_gather, torch.zeros(2 * size + 1), tensor)
    refused_by(comm.all_gather, torch.zeros(3 * size), tensor)
    refused_by(comm.all_gather, [tensor] * (size + 1), tensor)
    refused_by(comm.all_gather, wide.double(), tensor)
    refused_by(
        comm.all_gather,
        [tensor.double() if r == rank else tensor.clone() for r in range(size)],
        tensor,
    )
    refused_by(comm.all_gather, [wide], [tensor, tensor])
    refused_by(comm.all_gather, wide, [tensor])
    refused_by(comm.reduce_scatter, [tensor], wide)
    refused_by(comm.reduce_scatter, torch.zeros(3), wide)
    refused_by(comm.reduce_scatter, tensor.double(), wide)
    refused_by(comm.reduce_scatter, tensor, [tensor] * (size + 1))
    refused_by(comm.all_to_all, wide, wide.int())
    refused_by(comm.all_to_all, wide, [tensor] * (size + 1))
    assert tensor.tolist() == [1, 1]
    assert wide.eq(7).all()
    assert_usable(comm)


def test_arguments_of_the_wrong_type_are_refused(comm: Communicator) -> None:
    tensor = torch.ones(2)
    refused_by(comm.all_reduce, tensor, ["sum"])
    refused_by(comm.all_reduce, tensor, PremulSum("half"))  # type: ignore[arg-type]
    refused_by(comm.broadcast, tensor, "0")
    refused_by(comm.broadcast, tensor, 0.5)
    refused_by(comm.split, ["0"])
    refused_by(comm.split, [])
    refused_by(comm.split, [0, 0])
    refused_by(comm.split, [comm.size])
    assert tensor.tolist() == [1, 1]
    assert_usable(comm)


def test_a_coalesced_call_is_refused_as_a_whole(comm: Communicator) -> None:
    floats, whole = torch.full((2,), 2.0), torch.tensor([4, 6])
    for op in ("avg", "band", PremulSum(0.5)):
        for tensors in ([floats, whole], [whole, floats]):
            refused_by(comm.all_reduce, tensors, op)
            refused_by(comm.reduce, tensors, 0, op)
    refused_by(comm.all_reduce, [floats, 3])
    refused_by(comm.broadcast, [floats, None])
    output = [torch.zeros(1), torch.zeros(1, dtype=torch.int64)]
    wide = [torch.ones(comm.size), torch.ones(comm.size, dtype=torch.int64)]
    refused_by(comm.reduce_scatter, output, wide, PremulSum(0.5))
    refused_by(comm.reduce_scatter, output, wide, "avg")
    refused_by(comm.reduce_scatter, output[1], wide[1], "avg")
    assert floats.tolist() == [2, 2]
    assert whole.tolist() == [4, 6]
    assert [tensor.item() for tensor in output] == [0, 0]
    assert_usable(comm)


def test_a_factor_that_an_integer_type_cannot_hold_is_refused(comm: Communicator) -> None:
    for factor in (0.5, 1e30, float("inf"), float("nan")):
        refused_by(comm.all_reduce, torch.ones(2, dtype=torch.int32), PremulSum(factor))
    assert_usable(comm)
