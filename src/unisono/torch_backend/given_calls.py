"""Blocking calls on their way from torch's options straight into the engine.

Most calls of most programs are blocking, on plain CPU tensors. Such a call is one call into C,
which reads tensors and options by itself. What it does not take, as a look at this rank's arguments
decides, goes on as any other: works, GPUs, sparse tensors, averages, short signatures, profiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from unisono import variables
from unisono.comm.communicator import Communicator
from unisono.comm.engine.numbers import Operation, Status
from unisono.comm.shared_memory.torch_reductions import reductions_by_hash
from unisono.torch_autograd import mark_written

Method = Callable[..., Any]


class GivenCalls:
    """A process group whose blocking calls may go straight to the engine of its Communicator."""

    def _prepare_given_calls(self, comm: Communicator) -> None:
        self._names_of_ops = reductions_by_hash()
        self._run_given: Callable[..., int] = comm.transport.short.run_given
        if (
            variables.ALGO.read() is not None
        ):  # the short way knows the engine's own algorithm alone
            self._run_given = functools.partial(_run_but_all_reduce, self._run_given)
        self._error_given = comm.transport.call_error

    def _raise_unless_unheard(
        self, status: int, operation: Operation, tensors: Any, options: Any
    ) -> None:
        """After a status that is not OK: raise, unless the call has not begun."""
        if status not in (Status.ASK_AGAIN, Status.ON_DEVICE):
            reduces = hasattr(options, "reduceOp")
            op = self._names_of_ops[hash(options.reduceOp)] if reduces else "sum"
            raise self._error_given(status, operation, op, tensors)


def _run_but_all_reduce(run: Callable[..., int], operation: int, *given: Any) -> int:
    is_all_reduce = operation == Operation.ALL_REDUCE
    return Status.ASK_AGAIN if is_all_reduce else run(operation, *given)


# The way into C is written out for each kind of signature: every further function between torch's
# call and the engine's costs a tenth of the whole.


def straight_in_place(operation: Operation) -> Callable[[Method], Method]:
    """Let a method that takes [tensor] and options try the engine first."""
    everywhere = operation == Operation.ALL_REDUCE

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
            status = self._run_given(operation, tensors, None, opts)
            if not status:
                if everywhere or (opts.rootRank == self.comm.rank) is (
                    operation == Operation.REDUCE
                ):
                    mark_written(tensors)
                return None
            self._raise_unless_unheard(status, operation, tensors, opts)
            return method(self, tensors, opts, *more, **named)

        return call

    return decorate


def straight(operation: Operation) -> Callable[[Method], Method]:
    """Let a method that takes output, input and options try the engine first."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(
            self: Any, output: Any, input: Any, opts: Any = None, *more: Any, **named: Any
        ) -> Any:
            status = self._run_given(operation, output, input, opts)
            if not status:
                mark_written(_tensors_of(output))
                return None
            self._raise_unless_unheard(status, operation, input, opts)
            return method(self, output, input, opts, *more, **named)

        return call

    return decorate


def _tensors_of(output: Any) -> Any:
    """A tensor, [tensor] or [[tensor, ...]] as a sequence of tensors."""
    if not isinstance(output, list):
        return (output,)
    return output[0] if isinstance(output[0], (list, tuple)) else output


def straight_if_even(operation: Operation) -> Callable[[Method], Method]:
    """Let a method that takes output, input, the sizes of their parts and options try the engine
    first where there are no sizes."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, output: Any, input: Any, *more: Any, **named: Any) -> Any:
            if not named and len(more) == 3 and not more[0] and not more[1]:
                status = self._run_given(operation, output, input, more[2])
                if not status:
                    mark_written((output,))
                    return None
                self._raise_unless_unheard(status, operation, input, more[2])
            return method(self, output, input, *more, **named)

        return call

    return decorate
