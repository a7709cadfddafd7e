"""How torch calls the methods of a process group: decorators for them.

Most calls of most programs are blocking, on plain CPU tensors. Such a call is one call into C,
which reads tensors and options by itself. Everything else takes the general path, which this rank's
arguments alone decide: works, GPUs, sparse tensors, averages, short signatures, profiles.

The full signature of a method is `group.allreduce([tensor], options)`. torch's own groups, and code
like DDP's, also use shorter ones: `group.allreduce(tensor)`, `group.allreduce([tensor],
ReduceOp.MAX)`, `group.broadcast(tensor, 1)`, `group.barrier()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from unisono.comm.engine.numbers import Operation, Status
from unisono.torch_autograd import mark_written

Method = Callable[..., Any]

UNHEARD = (Status.ASK_AGAIN, Status.ON_DEVICE)
"""The engine has not begun the call."""


def run_but_all_reduce(run: Callable[..., int], operation: int, *given: Any) -> int:
    """Whether UNISONO_ALGO names an algorithm: the fast path has only the engine's own."""
    is_all_reduce = operation == Operation.ALL_REDUCE
    return Status.ASK_AGAIN if is_all_reduce else run(operation, *given)


# The path into C is written out for each kind of signature: one more function between torch's call
# and the engine's would add a tenth to the time.


def straight_in_place(operation: Operation) -> Callable[[Method], Method]:
    """Make a method that takes [tensor] and options try the engine first."""
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
            if status not in UNHEARD:
                raise self._call_error(status, operation, tensors, opts)
            return method(self, tensors, opts, *more, **named)

        return call

    return decorate


def straight(operation: Operation) -> Callable[[Method], Method]:
    """Make a method that takes output, input and options try the engine first."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(
            self: Any, output: Any, input: Any, opts: Any = None, *more: Any, **named: Any
        ) -> Any:
            status = self._run_given(operation, output, input, opts)
            if not status:
                mark_written(_tensors_of(output))
                return None
            if status not in UNHEARD:
                raise self._call_error(status, operation, input, opts)
            return method(self, output, input, opts, *more, **named)

        return call

    return decorate


def _tensors_of(output: Any) -> Any:
    """A tensor, [tensor] or [[tensor, ...]] as a sequence of tensors."""
    if not isinstance(output, list):
        return (output,)
    return output[0] if isinstance(output[0], (list, tuple)) else output


def straight_if_even(operation: Operation) -> Callable[[Method], Method]:
    """Make a method that takes output, input, the sizes of their parts and options try the engine
    first where there are no sizes."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, output: Any, input: Any, *more: Any, **named: Any) -> Any:
            if not named and len(more) == 3 and not more[0] and not more[1]:
                status = self._run_given(operation, output, input, more[2])
                if not status:
                    mark_written((output,))
                    return None
                if status not in UNHEARD:
                    raise self._call_error(status, operation, input, more[2])
            return method(self, output, input, *more, **named)

        return call

    return decorate


# -- signatures ------------------------------------------------------------------------------------


def accept_short_signatures(kind: type, *tensors: Method) -> Callable[[Method], Method]:
    """Make a method that takes tensors and options of this kind accept every signature.

    `tensors` says for each argument how to convert it to the full signature.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def either(self: Any, *given: Any, **named: Any) -> Any:
            if named:
                given = (*given, *named.values())
            if given and type(given[-1]) is kind:
                return method(self, *given)
            wide = [how(value) for how, value in zip(tensors, given, strict=False)]
            return method(self, *wide, _options(kind, given[len(tensors) :]))

        return either

    return decorate


def _options(kind: type, fields: tuple[Any, ...]) -> Any:
    """The arguments after the tensors: options, or their values."""
    options = kind()
    for value in fields:
        if type(value) is kind:
            return value
        if isinstance(value, timedelta):
            options.timeout = value
        elif isinstance(value, int):
            options.rootRank = value
        elif value is not None:
            options.reduceOp = value
    return options


def as_list(tensors: Any) -> Any:
    """A list of tensors, also of a single one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def as_nested_list(tensors: Any) -> Any:
    """A list of one list of tensors, also of that list alone."""
    return [tensors] if len(tensors) and isinstance(tensors[0], torch.Tensor) else tensors


def unchanged(value: Any) -> Any:
    """Arguments that always have the same form."""
    return value
