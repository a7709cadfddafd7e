"""Invalid arguments: each is rejected with one sentence, and the group stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from implementations import assert_usable, refused_by
from unisono import PremulSum
from unisono.comm.communicator import Communicator


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


def without_plain_memory() -> list[tuple[Any, str]]:
    """Each with the reason, which may end with the devices that are supported."""
    resized = torch.ones(8)[2:6]
    resized.untyped_storage().resize_(12)
    records = numpy.dtype([("a", "f4"), ("b", "i4")])
    no_memory = [
        (torch.empty(3, device="meta"), "torch.float32, torch.strided on device meta"),
        (torch.eye(3).to_sparse(), "torch.float32, torch.sparse_coo on device cpu"),
        (torch.eye(3).to_sparse_csr(), "torch.float32, torch.sparse_csr on device cpu"),
        (torch.zeros(4).view(torch.bits8), "torch.bits8, torch.strided on device cpu"),
    ]
    not_numbers = [
        (numpy.ones(3, numpy.dtype(">f4")), ">f4"),
        (numpy.array([object()]), "object"),
        (numpy.zeros(2, records), str(records)),
        (numpy.array(["text"]), "<U4"),
        (numpy.array(["2020-01-01"], dtype="M8[s]"), "datetime64[s]"),
    ]
    return [
        *(
            (tensor, f"a Tensor of {what} has no plain memory to share: pass a dense tensor on")
            for tensor, what in no_memory
        ),
        *((array, f"{what} elements are not plain numbers") for array, what in not_numbers),
        (
            torch._efficientzerotensor(4),
            "Tensor has elements but no memory of its own (a lazy zero, a wrapper, a storage "
            "resized to nothing): pass a plain tensor",
        ),
        (
            resized,
            "the tensor ends at byte 24, but its storage was resized to 12 bytes: resize it back, "
            "or pass another tensor",
        ),
        (
            numpy.ma.array([1.0, 2.0], mask=[False, True]),
            "a masked array's hidden elements would count: pass .filled(...) or .data",
        ),
        (3.0, "float is neither a tensor nor an array"),
        ("tensor", "str is neither a tensor nor an array"),
        (None, "None was passed instead of a tensor"),
    ]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_what_is_not_plain_memory_is_refused_for_one_reason(comm: Communicator) -> None:
    comm.timeout_s = 3.0
    wide = torch.zeros(3 * comm.size)
    for tensor, why in without_plain_memory():
        for call, arguments in [
            (comm.all_reduce, (tensor,)),
            (comm.reduce, (tensor,)),
            (comm.broadcast, (tensor,)),
            (comm.broadcast, ([tensor],)),
            (comm.all_gather, (tensor, tensor)),
            (comm.all_gather, (tensor, wide)),
            (comm.all_gather, (wide, tensor)),
            (comm.all_gather, ([tensor] * comm.size, wide)),
            (comm.reduce_scatter, (tensor, wide)),
            (comm.reduce_scatter, (wide, tensor)),
            (comm.all_to_all, (wide, tensor)),
            (comm.all_to_all, (tensor, wide)),
            (comm.gather, (wide if comm.rank == 0 else None, tensor)),
            (comm.scatter, (tensor, wide if comm.rank == 0 else None)),
        ]:
            text = str(refused_by(call, *arguments)).removesuffix(" or cuda").removesuffix(" cpu")
            text = text.partition(" as the input of comm.")[0]  # what follows is a hint
            assert text == f"{call.__name__} on group {comm.name}: {why}"
    assert_usable(comm)


def test_roots_ops_and_parts_that_make_no_sense_are_refused(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    tensor, wide = torch.ones(2), torch.full((2 * size,), 7.0)

    def refused_for(why: str, call: Callable[..., Any], *args: Any) -> None:
        error = refused_by(call, *args)
        assert str(error) == f"{call.__name__} on group {comm.name}: {why}"

    for root in (-1, size, size + 5):
        why = f"root {root} is not a rank of a group of {size}"
        refused_for(why, comm.broadcast, tensor, root)
        refused_for(why, comm.reduce, tensor, root)
        refused_for(why, comm.gather, None, tensor, root)
        refused_for(why, comm.scatter, tensor, None, root)
    uneven = (
        f"{2 * size + 1} elements cannot be cut evenly into {size} parts: pass a list with one "
        "tensor per rank"
    )
    own = "this rank's part has {} elements in the input and {} in the output"
    if size > 1:
        refused_for(uneven, comm.all_gather, torch.zeros(2 * size + 1), tensor)
    refused_for(own.format(2, 3), comm.all_gather, torch.zeros(3 * size), tensor)
    refused_for(own.format(2, 3), comm.reduce_scatter, torch.zeros(3), wide)
    too_many = f"the list has {size + 1} tensors, but the group has {size} ranks"
    refused_for(too_many, comm.all_gather, [tensor] * (size + 1), tensor)
    refused_for(too_many, comm.reduce_scatter, tensor, [tensor] * (size + 1))
    refused_for(too_many, comm.all_to_all, wide, [tensor] * (size + 1))
    dtypes = "the input is float32, but the output is float64: pass one dtype"
    refused_for(dtypes, comm.all_gather, wide.double(), tensor)
    refused_for(dtypes, comm.reduce_scatter, tensor.double(), wide)
    swapped = "the input is int32, but the output is float32: pass one dtype"
    refused_for(swapped, comm.all_to_all, wide, wide.int())
    mixed = [tensor.double() if r == rank else tensor.clone() for r in range(size)]
    of_one_call = "the tensors of one call have different dtypes: float32, float64"
    refused_for(of_one_call if size > 1 else dtypes, comm.all_gather, mixed, tensor)
    refused_for("1 outputs were passed for 2 inputs", comm.all_gather, [wide], [tensor, tensor])
    lists = "a coalesced call needs a list on both sides"
    refused_for(lists, comm.all_gather, wide, [tensor])
    refused_for(lists, comm.reduce_scatter, [tensor], wide)
    memory = torch.zeros(2 * size + 1)
    twice = (
        "tensors 0 and 1 of the list share memory, so each result would overwrite the other: pass "
        "each tensor once, or clones"
    )
    refused_for(twice, comm.all_reduce, [tensor, tensor])
    refused_for(twice, comm.all_reduce, [tensor, tensor.view(torch.int32)])
    refused_for(
        "output and input share memory, but not as the same part of both in place: pass a .clone() "
        "of the input",
        comm.all_to_all,
        memory[1:],
        memory[:-1],
    )
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
