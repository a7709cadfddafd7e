"""Checks of the functions' arguments: tensors, arrays, ranks and reductions. An invalid argument is
reported to the other ranks, too. Also the works that the functions return."""

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import numpy
import torch

from unisono.comm import arguments as calls
from unisono.comm.arguments import NotARank, describe_meaningless, describe_unknown_reduction
from unisono.comm.communicator import Communicator
from unisono.comm.engine.numbers import Operation
from unisono.comm.forms import Function
from unisono.comm.reductions import NamedReduction as Reduction
from unisono.comm.reductions import PremulSum, has_meaning, known_reduction
from unisono.comm.tensors import dtype_name
from unisono.comm.work import FinishedWork, Work
from unisono.errors import ScheduleError, UnisonoError
from unisono.torch_habits import describe_output_first, may_be_output_first, name_type, one_root
from unisono.world.world import resolve, well_formed

_Tensor = torch.Tensor


def is_tensor(tensor: Any) -> bool:
    """Whether it is a tensor or an array; anything else is a structure."""
    return isinstance(tensor, (_Tensor, numpy.ndarray))


def check_tensor(comm: Communicator, operation: str, tensor: Any) -> None:
    """Reject what is no tensor or array, and sparse tensors and the like."""
    if not is_tensor(tensor):
        why = f"{type(tensor).__name__} is neither a tensor nor an array"
        if operation in ("all_gather", "gather"):
            why += f": unisono.{operation}_object takes lists, dicts and other plain data"
        refuse_type(comm, operation, why)
    if isinstance(tensor, _Tensor) and (tensor.layout is not torch.strided or tensor.is_quantized):
        kind = f"{tensor.layout} of {tensor.dtype}"
        refuse_type(comm, operation, f"{kind} is not dense: pass a dense tensor")


def copy_of(tensor: Any) -> Any:
    """A contiguous copy, detached from autograd's graph."""
    if isinstance(tensor, _Tensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format)
    return tensor.copy()


def copy_into(
    comm: Communicator,
    operation: str,
    out: Any,
    tensor: Any,
    op: Any,
    reproducible: bool | None,
    algorithm: Any = None,
) -> Any:
    """`out`, with the elements of `tensor`, unless its reduction in place is refused."""
    if type(out) is not type(tensor) and not is_tensor(out):
        refuse_type(comm, operation, f"out must be a tensor or an array, not {type(out).__name__}")
    check_out(comm, operation, out, tensor.dtype, tensor.shape)
    transport = comm._transport_for(operation, out, out)
    as_tree = comm.reproducible if reproducible is None else bool(reproducible)
    if as_tree and algorithm is not None:
        return tensor  # it is refused
    try:
        if algorithm is not None:
            from unisono.comm.schedules.compiled_schedules import schedule_for

            schedule_for(operation, algorithm, comm.size, 0)
        calls.check_call(Operation[operation.upper()], out, None, 0, op, transport, as_tree)
        if isinstance(out, _Tensor):
            out.detach().copy_(tensor.detach())
        else:
            out[...] = tensor
    except RuntimeError as error:  # torch's: they overlap
        comm._refuse_for(operation, ValueError(f"out= cannot be filled: {error}"))
    except (TypeError, ValueError, ScheduleError) as error:
        comm._refuse_for(operation, error)
    return out


def empty(like: Any, shape: Any) -> Any:
    if isinstance(like, _Tensor):
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return numpy.empty(shape, like.dtype)


def part_shape(comm: Communicator, operation: str, tensor: Any) -> tuple[int, ...]:
    """The shape of one rank's part of a tensor that is cut along its first dimension."""
    check_tensor(comm, operation, tensor)
    shape = tuple(tensor.shape)
    if not shape or shape[0] % comm.size:
        comm.reject_call(
            operation,
            f"a tensor of shape {shape} cannot be cut evenly for {comm.size} ranks: pass a list of "
            "tensors",
        )
    return (shape[0] // comm.size, *shape[1:])


def check_parts(comm: Communicator, operation: str, tensors: Any) -> None:
    """Check that there is one tensor per rank, all of one dtype."""
    if len(tensors) != comm.size:
        comm.reject_call(operation, f"{len(tensors)} tensors for {comm.size} ranks: pass one each")
    for tensor in tensors:
        check_tensor(comm, operation, tensor)
    dtypes = sorted({str(tensor.dtype) for tensor in tensors})
    if len(dtypes) > 1:
        refuse_type(
            comm, operation, f"all tensors of a call must have the same dtype, not {dtypes}"
        )


def parts(comm: Communicator, operation: str, tensors: Any) -> list[torch.Tensor]:
    """One tensor for each rank."""
    if isinstance(tensors, (list, tuple)):
        check_parts(comm, operation, tensors)
        return [as_dense_tensor(comm, operation, tensor) for tensor in tensors]
    length = part_shape(comm, operation, tensors)[0]
    whole = as_dense_tensor(comm, operation, tensors)
    return [whole[rank * length : (rank + 1) * length] for rank in range(comm.size)]


def in_given_type(given: Any, result: Any) -> Any:
    """Arrays where arrays were given."""
    if not isinstance(given, numpy.ndarray) or result is None:
        return result
    if isinstance(result, ResultWork):
        return ResultWork(result, finish=lambda: in_given_type(given, result.wait()))
    if isinstance(result, list):
        return [tensor.numpy() for tensor in result]
    return result.numpy()


def refuse_type(comm: Communicator, operation: str, why: str) -> NoReturn:
    """Raise TypeError about this rank's arguments, after telling its peers."""
    try:
        comm.reject_call(operation, why)
    except ValueError as error:
        raise TypeError(str(error)) from None


def check_rank(comm: Communicator, operation: str, rank: Any, root: Any = None) -> int:
    """The rank that was passed, under either name; 0 by default. Rejects an invalid rank."""
    if root is not None:
        rank = one_root(comm, operation, rank, root)
    if rank is None:
        return 0
    if not isinstance(rank, int) or not 0 <= rank < comm.size:
        comm.reject_call(operation, NotARank("rank", rank, comm.size).among(comm.global_ranks))
    return rank


def check_out(comm: Communicator, operation: str, out: Any, dtype: Any, shape: Any) -> None:
    if out.dtype != dtype or tuple(out.shape) != tuple(shape):
        given, wanted = f"{out.dtype} of shape {tuple(out.shape)}", f"{dtype} of {tuple(shape)}"
        comm.reject_call(operation, f"out is {given}, but the result is {wanted}")


def as_dense_tensor(comm: Communicator, operation: str, tensor: Any) -> torch.Tensor:
    """A tensor, or an array as a tensor over the same memory."""
    check_tensor(comm, operation, tensor)
    try:
        return tensor if isinstance(tensor, _Tensor) else torch.from_numpy(tensor)
    except (TypeError, ValueError) as error:
        refuse_type(comm, operation, str(error))


def reduction(
    op: Any, comm: Communicator, operation: str, *tensors: Any, where: str = ""
) -> Reduction:
    """The Communicator's name for `op`. `where` says where in a structure the tensors are. Rejects
    an unknown reduction, and one that is not defined for a tensor's dtype."""
    known = known_reduction(op)
    if known is None:
        comm.reject_call(operation, describe_unknown_reduction(op))
    name: str = "premul_sum" if isinstance(known, PremulSum) else known
    for dtype in {dtype_name(tensor) for tensor in tensors}:
        if not has_meaning(name, dtype):
            why = describe_meaningless(name, dtype)
            refuse_type(comm, operation, f"{where}: {why}" if where else why)
    return known


class ResultWork(Work[Any]):
    """An operation in progress. `wait()` returns what the blocking form would have returned."""

    __slots__ = ("_finish", "_result", "_work")

    def __init__(
        self, work: Work | None, result: Any = None, finish: Callable[[], Any] | None = None
    ) -> None:
        self._work = FinishedWork() if work is None else work
        self._result = result
        self._finish = finish

    def wait(self, timeout_s: float | None = None) -> Any:
        self._work.wait(timeout_s)
        finish = self._finish
        if finish is not None:
            self._result = finish()
            self._finish = None
        return self._result

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def exception(self) -> Exception | None:
        return self._work.exception()

    def source_rank(self) -> int:
        return self._work.source_rank()


def result_or_work(
    work: Work | None, async_op: bool, result: Any, finish: Callable[[], Any] | None = None
) -> Any:
    """The result of a call, passed through `finish` if given; with `async_op`, a work that returns
    it."""
    if async_op:
        return ResultWork(work, result, finish)
    return result if finish is None else finish()


# -- torch's order, outputs before inputs: rejected on every rank, with the right call -------------


def inputs_first(function: Function) -> Function:
    """A decorator: reject torch's order of arguments, outputs before inputs."""
    name, code = function.__name__, function.__code__
    second, most = code.co_varnames[1], code.co_argcount
    function = well_formed(function)

    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        if len(given) > 1 and (len(given) > most or _is_foreign(name, second, given[1])):
            _refuse(name, second, given, named)
        return function(*given, **named)

    return called  # type: ignore[return-value]


def _is_foreign(function: str, second: str, value: Any) -> bool:
    """Whether this cannot be the second argument of our function, named `second`."""
    if second == "group":
        is_object = function.endswith("_object") and isinstance(value, (str, dict, set))
        return is_object or may_be_output_first(value)
    return isinstance(value, (list, tuple)) or is_tensor(value)


def _refuse(function: str, second: str, given: Any, named: dict[str, Any]) -> NoReturn:
    """Say what was probably meant, on the group of the call, or else on the world."""
    what = {"group": "a group", "op": "a reduction"}.get(second, "a rank")
    why = f"{name_type(given[1])} is not {what}: {describe_output_first(function)}"
    group = next((each for each in (*given[2:], *named.values()) if hasattr(each, "rank")), None)
    try:
        comm = resolve(group)
    except UnisonoError:
        raise TypeError(why) from None
    refuse_type(comm, function.removesuffix("_object"), why)
