"""What the engine leaves to Python: tensors that are not contiguous or not in the CPU's memory,
groups of other transports or not yet known, programs that record gradients, and every failure."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from unisono.comm.by_name import communicator_named
from unisono.comm.communicator import Communicator
from unisono.comm.engine import native
from unisono.comm.engine.numbers import Operation, Status
from unisono.torch_autograd import mark_written

_failed = threading.local()
"""In `error`, how the last call of this thread failed."""

NO_GRADIENT = (
    "the operator writes to a tensor that requires a gradient, and has none itself: use the one "
    "without _ at the end of its name, which returns a new tensor, or torch.no_grad()"
)


def sum_to_root(comm: Communicator, x: torch.Tensor, root: int) -> None:
    comm.reduce(x, root)
    if comm.rank != root:
        x.zero_()


CALLS: dict[Operation, Callable[[Communicator, Any, Any, int, Any], object]] = {
    Operation.ALL_REDUCE: lambda comm, x, _, root, op: comm.all_reduce(x, op),
    Operation.BROADCAST: lambda comm, x, _, root, op: comm.broadcast(x, root),
    Operation.REDUCE: lambda comm, x, _, root, op: sum_to_root(comm, x, root),
    Operation.ALL_GATHER: lambda comm, to, x, root, op: comm.all_gather(to, x),
    Operation.REDUCE_SCATTER: lambda comm, to, x, root, op: comm.reduce_scatter(to, x, op),
    Operation.ALL_TO_ALL: lambda comm, to, x, root, op: comm.all_to_all(to, x),
}


def call(
    operation: int, output: torch.Tensor, input: torch.Tensor, group: str, op: str, root: int
) -> None:
    """Run a call by the Communicator's method."""
    comm = communicator_named(group)
    if torch.is_grad_enabled() and output.requires_grad:
        comm.reject_call(Operation(operation).name.lower(), NO_GRADIENT)
    CALLS[Operation(operation)](comm, output, input, root, op)
    mark_written([output])
    if vars(comm)["_algorithm"] is None:  # else every call needs its schedule
        serve = getattr(comm.transport.fast_path, "serve_operators", None)
        if serve is not None:
            serve(comm.name)


def go_on(
    output: torch.Tensor,
    input: torch.Tensor,
    group: str,
    operation: int,
    op: str,
    root: int,
    status: int,
) -> str:
    """A call that the engine has not begun, or that has failed: how it failed, or nothing."""
    try:
        if status == Status.INTERRUPTED:
            raise native.take_interruption() or KeyboardInterrupt
        if status == Status.ASK_AGAIN:
            call(operation, output, input, group, op, root)
            return ""
        raise communicator_named(group).transport.call_error(status, operation, op, output)
    except BaseException as error:
        _failed.error = error
        return f"{type(error).__name__}: {error}"


def raising_ours(operator: Callable[..., object]) -> Callable[..., object]:
    """An operator whose failures are our exceptions, where torch makes a RuntimeError of them."""

    @functools.wraps(operator)
    def call_it(*arguments: Any, **named: Any) -> object:
        try:
            return operator(*arguments, **named)
        except RuntimeError as raised:
            error, _failed.error = getattr(_failed, "error", None), None
            if error is None or f"{type(error).__name__}: " not in str(raised):
                raise
            try:
                raise error from None
            finally:
                del error  # which refers to this frame

    return call_it
