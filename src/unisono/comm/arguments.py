"""The arguments of a call: invalid ones are refused here, in one sentence, for every transport.

Each check raises ValueError or TypeError with the bare reason; the Communicator adds the operation
and the group, and tells the peers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.cases.primitives import Primitive, primitive_of
from unisono.comm.engine import native
from unisono.comm.engine.numbers import Form, Operation
from unisono.comm.reductions import (
    REDUCTIONS,
    WIRE_SHIFT,
    WIRES,
    PremulSum,
    Reduction,
    has_meaning,
    holds,
    known_reduction,
)
from unisono.comm.tensors import count, dtype_name
from unisono.errors import name_ranks

if TYPE_CHECKING:
    from unisono.comm.transport import Transport

LISTS = (list, tuple)
MOST_CONTRIBUTIONS = 2**20
"""To one call: csrc/base/tree.h."""
_MOST_DIMS = 64  # the engine's limit, and NumPy's


# -- calls -----------------------------------------------------------------------------------------


class WideSide:
    """The wide side of a collective: one tensor, cut evenly, or one tensor per rank."""

    def __init__(self, given: Any, writable: bool, size: int, devices: Collection[str]) -> None:
        self.tensors = check_tensors(given, writable, devices)
        self.is_list = isinstance(given, LISTS)
        self.counts = check_parts(self.tensors, size, self.is_list)
        self.dtype = dtype_name(self.tensors[0])


class Call(NamedTuple):
    """A collective with valid arguments. In place there are no `inputs`; otherwise there is one
    of each, or several in a coalesced call, and a wide side is a WideSide. In a gather or
    scatter, ranks other than the root have nothing on that side."""

    operation: Operation
    outputs: list[Any]
    inputs: list[Any]
    root: int
    reduction: Reduction | None
    is_coalesced: bool
    form: int = 0
    """Of a reduction: the engine's bits for what else must be equal on all ranks."""
    contributions: int = 0
    """How many follow each other in the inputs; 0: one, which is the input."""
    residual: Any = None
    """Where what the wire format loses goes."""

    @property
    def name(self) -> str:
        return self.operation.name.lower()

    @property
    def primitive(self) -> Primitive:
        return primitive_of(self.name)

    @property
    def tensors(self) -> list[Any]:
        """All its tensors, outputs first."""
        return [*flatten(self.outputs), *flatten(self.inputs)]


def flatten(sides: Sequence[Any]) -> list[Any]:
    """The tensors of some sides, wide ones included."""
    return [
        tensor
        for side in sides
        for tensor in (side.tensors if isinstance(side, WideSide) else (side,))
    ]


def check_call(
    operation: Operation,
    output: Any,
    input: Any,
    root: Any,
    op: Any,
    transport: Transport,
    reproducible: bool = False,
    contributions: Any = None,
    wire: Any = None,
    residual: Any = None,
) -> Call:
    rank, size, devices = transport.rank, transport.size, transport.devices
    primitive = primitive_of(operation.name.lower())
    wide, is_rooted = primitive.wide, primitive.is_rooted
    if is_rooted:
        root = check_root(root, size)
    form = Form.REPRODUCIBLE if reproducible and primitive.reduces else 0
    count_given = 0
    if contributions is not None:
        form |= Form.CONTRIBUTIONS
        outputs, inputs = _check_contributions(operation, output, contributions, transport)
        is_coalesced = isinstance(output, LISTS)
        count_given = len(contributions)
    elif primitive.is_in_place:
        outputs, inputs = check_tensors(output, True, devices), []
        is_coalesced = isinstance(output, LISTS)
        check_overlaps(operation, outputs, [], rank, size)
    else:
        if is_rooted:
            check_wide_side(root, rank, output if "output" in wide else input, wide[0])
        narrow = input if "output" in wide else output
        is_coalesced = not primitive.is_pairwise and isinstance(narrow, LISTS)
        if is_coalesced:
            check_coalesced(output, input)
        given_outputs, given_inputs = (output, input) if is_coalesced else ([output], [input])

        def check_sides(given: Sequence[Any], writable: bool, is_wide: bool) -> list[Any]:
            if not is_wide:
                return [check_tensors([side], writable, devices)[0] for side in given]
            present = [side for side in given if side is not None or not is_rooted]
            return [WideSide(side, writable, size, devices) for side in present]

        inputs = check_sides(given_inputs, False, "input" in wide)
        outputs = check_sides(given_outputs, True, "output" in wide)
        for to, source in zip(outputs, inputs, strict=False):
            _check_own_part(to, source, rank)
        if outputs and inputs:
            same = output is input and operation == Operation.ALL_TO_ALL
            flat_inputs = [] if same else flatten(inputs)
            check_overlaps(operation, flatten(outputs), flat_inputs, rank, size, is_coalesced)
    reduction = None
    if primitive.reduces:
        reduction = check_reduction(op, map(dtype_name, outputs))
        if form and not transport.has_forms:
            _refuse_form(map(dtype_name, outputs), contributions is not None, transport)
    if wire is not None or residual is not None:
        assert reduction is not None
        form |= _check_wire(wire, reduction.name, outputs, residual, transport)
    form_and_more = form, count_given, residual
    call = Call(operation, outputs, inputs, root, reduction, is_coalesced, *form_and_more)
    transport.check_call(call)
    return call


def _check_contributions(
    operation: Operation, output: Any, contributions: Any, transport: Transport
) -> tuple[list[Any], list[Any]]:
    """The outputs of a reduction, and the tensors of all contributions, one after the other."""
    if not isinstance(contributions, LISTS) or not contributions:
        raise TypeError(
            "contributions= takes a list with at least one contribution, each like the tensor"
        )
    most = MOST_CONTRIBUTIONS // transport.size
    if len(contributions) > most:
        raise ValueError(f"{len(contributions)} contributions: a rank may bring up to {most}")
    outputs = check_tensors(output, True, transport.devices)
    times = transport.size if operation == Operation.REDUCE_SCATTER else 1
    inputs: list[Any] = []
    for number, given in enumerate(contributions):
        if isinstance(given, LISTS) != isinstance(output, LISTS):
            what = "a list" if isinstance(output, LISTS) else "one tensor"
            raise TypeError(f"contribution {number} must be {what}, as the result is")
        tensors = check_tensors(given, False, transport.devices)
        if len(tensors) != len(outputs):
            raise ValueError(
                f"contribution {number} has {len(tensors)} tensors, not {len(outputs)}"
            )
        for to, source in zip(outputs, tensors, strict=True):
            if dtype_name(to) != dtype_name(source):
                raise TypeError(
                    f"contribution {number} is {dtype_name(source)}, the result {dtype_name(to)}"
                )
            if count(source) != times * count(to):
                raise ValueError(
                    f"contribution {number} has {count(source)} elements, not {times * count(to)}"
                )
        inputs += tensors
    every = [*map(_memory, outputs), *map(_memory, inputs)]
    size = len(outputs)
    clash = native.find_clash(Operation.ALL_REDUCE, every[:size], None, 0, 1, True)
    sides = every[:size], every[size:], transport.rank, transport.size, True
    clash = clash or native.find_clash(operation, *sides)
    if clash is not None:
        raise ValueError(
            "the result shares memory with a contribution other than the first, or with another "
            "result: pass a tensor of its own"
        )
    return outputs, inputs


def _refuse_form(dtypes: Iterable[str], is_listed: bool, transport: Transport) -> None:
    """Integers have one sum; others only the engine computes in a fixed tree."""
    if is_listed or any(not name.startswith(("int", "uint", "bool")) for name in dtypes):
        raise ValueError(
            f"reproducible reductions are not available on {_place(transport)}: pass CPU tensors "
            "in a group whose backend is unisono"
        )


_ON_WIRES = ("float32", "float16", "bfloat16")


def _check_wire(wire: Any, op: str, outputs: list[Any], residual: Any, transport: Transport) -> int:
    """The form of a reduction with this wire format."""
    if wire not in WIRES:
        raise ValueError(f"unknown wire format {wire!r}: use {', '.join(WIRES)}, or None")
    if op not in ("sum", "avg"):
        raise ValueError(f"wire={wire!r} is for sums and averages, not {op}")
    for dtype in map(dtype_name, outputs):
        if dtype not in _ON_WIRES:
            raise TypeError(f"wire={wire!r} is for {', '.join(_ON_WIRES)}, not {dtype}")
    if not transport.has_forms:
        raise ValueError(
            f"wire formats are not available on {_place(transport)}: pass CPU tensors in a group "
            "whose backend is unisono"
        )
    if residual is not None:
        check_tensor(residual, True, ("cpu",))
        if len(outputs) != 1 or count(residual) != count(outputs[0]):
            raise ValueError("a residual has as many elements as the tensor, which is not a list")
        if dtype_name(residual) != "float32" or not _is_dense(residual):
            raise TypeError("a residual is a contiguous float32 tensor")
        memory = _memory(residual)
        if native.find_clash(Operation.ALL_REDUCE, [memory, _memory(outputs[0])], None, 0, 1, True):
            raise ValueError("the residual shares memory with the tensor")
    return WIRES.index(wire) + 1 << WIRE_SHIFT


def _place(transport: Transport) -> str:
    return "CUDA tensors" if "cuda" in transport.devices else f"the backend {transport.backend}"


def _check_own_part(to: Any, source: Any, rank: int) -> None:
    """What a rank sends to itself must have the same length and dtype on both sides."""
    (given, its_dtype), (taken, dtype) = (
        (side.counts[rank], side.dtype)
        if isinstance(side, WideSide)
        else (count(side), dtype_name(side))
        for side in (source, to)
    )
    if its_dtype != dtype:
        raise TypeError(f"the input is {its_dtype}, but the output is {dtype}: pass one dtype")
    if given != taken:
        raise ValueError(
            f"this rank's part has {given} elements in the input and {taken} in the output"
        )


def check_message(
    tensor: Any, sends: bool, peer: Any, tag: Any, transport: Transport, devices: Collection[str]
) -> None:
    if (sends or peer is not None) and (type(peer) is not int or not 0 <= peer < transport.size):
        raise NotARank("peer", peer, transport.size)
    if type(tag) is not int:
        raise TypeError(f"a tag must be a whole number, not {tag!r}")
    if tag not in transport.tags:
        raise ValueError(f"tag {tag} is not between {transport.tags[0]} and {transport.tags[-1]}")
    transport.check_message(sends, peer)
    check_tensor(tensor, not sends, devices)


# -- reductions ------------------------------------------------------------------------------------


def check_reduction(op: Any, dtypes: Iterable[str]) -> Reduction:
    reduction = op if isinstance(op, Reduction) else _reduction_of(op)
    for dtype in dtypes:
        if not has_meaning(reduction.name, dtype):
            raise TypeError(describe_meaningless(reduction.name, dtype))
        if not holds(dtype, reduction.factor):
            raise ValueError(f"{dtype} cannot be scaled by {reduction.factor}")
    return reduction


def _reduction_of(op: Any) -> Reduction:
    known = known_reduction(op)
    if known is None:
        raise ValueError(describe_unknown_reduction(op))
    if not isinstance(known, PremulSum):
        return Reduction(known)
    try:
        return Reduction("premul_sum", float(known.factor))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # last: other devices
        raise ValueError(f"the factor {known.factor!r} is not a number") from None


def describe_unknown_reduction(op: object) -> str:
    if hasattr(op, "rank"):
        return f"{op!r} is not a reduction: pass a group as the keyword group=..."
    return f"unknown reduction {op!r}: use {', '.join(REDUCTIONS)}, PremulSum or a torch ReduceOp"


def describe_meaningless(name: str, dtype: str) -> str:
    remedy = ""
    if name == "avg":
        remedy = ': pass a floating tensor (x.float()), or use op="sum" and divide'
    elif name in ("band", "bor", "bxor"):
        remedy = ": it combines bits, which only integers and bools have"
    return f"{name} is not defined for {dtype}{remedy}"


# -- ranks -----------------------------------------------------------------------------------------


class NotARank(ValueError):
    """`rank`, which was passed as `what`, is not a rank of a group of `size`."""

    def __init__(self, what: str, rank: object, size: int) -> None:
        super().__init__(f"{what} {rank!r} is not a rank of a group of {size}")
        self.rank = rank

    def among(self, global_ranks: Sequence[int] | None) -> str:
        """The reason, and a hint if it is a global rank of this group, or a group."""
        if hasattr(self.rank, "rank"):
            return f"{self}: pass a group as the keyword group=..."
        if not isinstance(self.rank, int) or not global_ranks:
            return str(self)
        if list(global_ranks) == list(range(len(global_ranks))):
            return str(self)
        text = f"{self}: ranks count from 0 in every group, and the members of this one are global "
        text += name_ranks(global_ranks)
        if self.rank in global_ranks:
            text += f": for global rank {self.rank} pass {global_ranks.index(self.rank)}"
        return text


def check_root(root: object, size: int) -> int:
    """A root must be a rank of the group; a bool or a member of an enumeration becomes an int."""
    if not isinstance(root, int) or not 0 <= root < size:
        raise NotARank("root", root, size)
    return int(root)


def check_wide_side(root: int, rank: int, wide: Any, side: str) -> None:
    """Only the root of a gather passes an output, and only the root of a scatter an input."""
    if wide is None and rank == root:
        raise ValueError(f"the root must pass an {side}")
    if wide is not None and rank != root:
        raise ValueError(f"only the root passes an {side}: pass None on other ranks")


# -- sizes and dtypes ------------------------------------------------------------------------------


def check_coalesced(output: Any, input: Any) -> None:
    if not isinstance(output, LISTS) or not isinstance(input, LISTS):
        raise TypeError("a coalesced call needs a list on both sides")
    if len(output) != len(input):
        raise ValueError(f"{len(output)} outputs were passed for {len(input)} inputs")


def check_parts(tensors: Sequence[Any], size: int, is_list: bool) -> tuple[int, ...]:
    """How many elements each rank's part of a wide side has: one tensor cut evenly, or a list."""
    dtypes = sorted({dtype_name(tensor) for tensor in tensors})
    if len(dtypes) > 1:
        raise TypeError(f"the tensors of one call have different dtypes: {', '.join(dtypes)}")
    if is_list:
        if len(tensors) != size:
            raise ValueError(f"the list has {len(tensors)} tensors, but the group has {size} ranks")
        return tuple(count(tensor) for tensor in tensors)
    (tensor,) = tensors
    if count(tensor) % size:
        raise ValueError(
            f"{count(tensor)} elements cannot be cut evenly into {size} parts: pass a list with "
            "one tensor per rank"
        )
    return (count(tensor) // size,) * size


# -- tensors ---------------------------------------------------------------------------------------


def check_tensors(given: Any, writable: bool, devices: Collection[str]) -> list[Any]:
    tensors = list(given) if isinstance(given, LISTS) else [given]
    for tensor in tensors:
        check_tensor(tensor, writable, devices)
    return tensors


def check_tensor(tensor: Any, writable: bool, devices: Collection[str]) -> None:
    """A tensor or array must have plain memory on one of these devices."""
    try:
        if hasattr(tensor, "layout") and hasattr(tensor, "device"):
            _check_torch_tensor(tensor, devices)
        else:
            _check_array(tensor, writable, devices)
    except (AttributeError, RuntimeError):  # not a real tensor
        raise TypeError(f"{type(tensor).__name__} is neither a tensor nor an array") from None
    if len(tensor.shape) > _MOST_DIMS:
        raise ValueError(f"tensors of more than {_MOST_DIMS} dimensions are not supported")
    if writable and not _is_dense(tensor) and native.overlaps_itself(_memory(tensor)):
        raise ValueError(
            "an expanded or overlapping tensor cannot receive a result: several of its elements "
            "share an address: pass a .clone()"
        )


def _check_array(tensor: Any, writable: bool, devices: Collection[str]) -> None:
    if tensor is None:
        raise TypeError("None was passed instead of a tensor")
    if not hasattr(tensor, "__array_interface__"):
        if hasattr(tensor, "__dlpack__"):
            raise TypeError(
                f"a {type(tensor).__name__} outside CPU memory: only torch tensors may be on a "
                "GPU; pass torch.as_tensor(x)"
            )
        raise TypeError(f"{type(tensor).__name__} is neither a tensor nor an array")
    if "cpu" not in devices:
        raise TypeError(f"an array is in CPU memory: pass a tensor on {_either(devices)}")
    is_plain = tensor.dtype.kind in "biufc" and tensor.dtype.itemsize <= 16
    if not is_plain or not tensor.dtype.isnative:
        raise TypeError(f"{tensor.dtype} elements are not plain numbers")
    if hasattr(tensor, "mask"):
        raise TypeError("a masked array's hidden elements would count: pass .filled(...) or .data")
    if writable and not tensor.flags.writeable:
        raise ValueError("a read-only array cannot receive a result")


def _check_torch_tensor(tensor: Any, devices: Collection[str]) -> None:
    import torch

    plain = tensor.layout is torch.strided and tensor.device.type in devices
    odd = tensor.is_nested or tensor.is_quantized
    if not plain or odd or dtype_name(tensor).startswith("bits"):
        raise _without_memory(tensor, devices)
    try:
        has_bytes, address = tensor.untyped_storage().nbytes(), tensor.data_ptr()
    except RuntimeError:  # made by a function transform
        raise _without_memory(tensor, devices) from None
    needs_bytes = _end_in_storage(tensor)
    if needs_bytes and not address:
        raise TypeError(
            f"{type(tensor).__name__} has elements but no memory of its own (a lazy zero, a "
            "wrapper, a storage resized to nothing): pass a plain tensor"
        )
    if needs_bytes > has_bytes:
        raise ValueError(
            f"the tensor ends at byte {needs_bytes}, but its storage was resized to {has_bytes} "
            "bytes: resize it back, or pass another tensor"
        )


def _without_memory(tensor: Any, devices: Collection[str]) -> TypeError:
    return TypeError(
        f"a {type(tensor).__name__} of {tensor.dtype}, {tensor.layout} on device "
        f"{tensor.device} has no plain memory to share: pass a dense tensor on {_either(devices)}"
    )


def _end_in_storage(tensor: Any) -> int:
    """Where in its storage a tensor ends."""
    if not tensor.numel():
        return 0
    last = tensor.storage_offset() + tensor.numel() - 1
    if not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = tensor.storage_offset() + sum((length - 1) * step for length, step in steps)
    return int(last + 1) * int(tensor.element_size())


def _is_dense(tensor: Any) -> bool:
    is_torch = hasattr(tensor, "is_contiguous")
    return bool(tensor.is_contiguous() if is_torch else tensor.flags.c_contiguous)


def _either(devices: Collection[str]) -> str:
    return " or ".join(sorted(devices))


# -- memory ----------------------------------------------------------------------------------------

_KNOWN = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
_KNOWN += ("float16", "float32", "float64", "complex64", "complex128")
_OTHERS = {1: "|u1", 2: "=u2", 4: "=u4", 8: "=u8", 16: "=c16"}


def check_overlaps(
    operation: Operation,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    rank: int,
    size: int,
    is_coalesced: bool = False,
) -> None:
    """Tensors must not share memory except where a call works in place: csrc/python/overlaps.c
    has the rules, and docs/collectives.md the table. Without inputs the outputs are both; either
    side is one tensor, one for each rank or, in a coalesced call, many."""
    if len(outputs) == 1 and not inputs:
        return
    to, source = list(map(_memory, outputs)), list(map(_memory, inputs))
    sides: tuple[Any, Any]
    if not source or (is_coalesced and len(to) != len(source)):  # the parts of several tensors
        sides, source = ([*to, *source], None), []
        operation = operation if operation == Operation.BROADCAST else Operation.ALL_REDUCE
    else:
        sides = tuple(
            side[0] if len(side) == 1 and not is_coalesced else side for side in (to, source)
        )  # type: ignore[assignment]
    clash = native.find_clash(operation, *sides, rank, size, is_coalesced)
    if clash is None:
        return
    (_, one), (is_input, other) = sorted(clash)
    if not is_input and not source:
        raise ValueError(
            f"tensors {one} and {other} of the list share memory, so each result would overwrite "
            "the other: pass each tensor once, or clones"
        )
    if not is_input:
        raise ValueError(
            f"outputs {one} and {other} share memory, but each has its own result: pass clones"
        )
    output = f"output {one}" if len(to) > 1 else "output"
    input = f"input {other}" if len(source) > 1 else "input"
    own = "the same part of both" if operation == Operation.ALL_TO_ALL else "this rank's own part"
    raise ValueError(
        f"{output} and {input} share memory, but not as {own} in place: pass a .clone() of the "
        "input"
    )


def _memory(tensor: Any) -> Any:
    """An array at the tensor's address, whatever its device; its elements are never read."""
    import numpy as np  # not needed for torch tensors

    name = dtype_name(tensor)
    if hasattr(tensor, "data_ptr"):
        item_bytes, address = tensor.element_size(), tensor.data_ptr()
        strides = tuple(step * item_bytes for step in tensor.stride())
    else:
        item_bytes, address = tensor.itemsize, tensor.__array_interface__["data"][0]
        strides = tensor.strides
    shape = tuple(tensor.shape)
    interface = {
        "version": 3,
        "typestr": np.dtype(name).str if name in _KNOWN else _OTHERS[item_bytes],
        "data": (address, False),
        "shape": shape,
        "strides": strides,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
