"""Blocking calls on their way from torch's options straight into the engine.

Most calls of most programs are blocking, on plain CPU tensors. Such a call is one call into C,
which reads tensors and options by itself. What it does not take, as a look at this rank's arguments
decides, goes on as any other: works, GPUs, sparse tensors, averages, short signatures, profiles.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
)

from unisono.comm.base import Communicator
from unisono.comm.engine import Operation, Status, learn_options
from unisono.torch_autograd import mark_written

Method = Callable[..., Any]
OPTIONS: dict[Operation, type] = {
    Operation.BARRIER: BarrierOptions,
    Operation.ALL_REDUCE: AllreduceOptions,
    Operation.REDUCE: ReduceOptions,
    Operation.BROADCAST: BroadcastOptions,
    Operation.ALL_GATHER: AllgatherOptions,
    Operation.REDUCE_SCATTER: ReduceScatterOptions,
    Operation.ALL_TO_ALL: AllToAllOptions,
}
_SAMPLES = 24
_Type: Any = ReduceOp.RedOpType


class GivenCalls:
    """A process group whose blocking calls may go straight to the engine of its Communicator."""

    def _prepare_given_calls(self, comm: Communicator) -> None:
        self._run_given: Callable[..., int] = getattr(comm, "run_given", _ask_again)
        self._fail_given: Any = getattr(comm, "fail_given", None)

    def _go_on(
        self, status: int, operation: Operation, output: Any, input: Any, options: Any
    ) -> None:
        """After a status that is not OK: raise, unless the call has not begun. The first of its
        kind never has: the engine does not know such options yet."""
        if status != Status.ASK_AGAIN:
            self._fail_given(status, operation, output, input, options)
        if self._fail_given is not None:
            learns_options_of(operation)


def _ask_again(*_: Any) -> int:
    """In place of `run_given` where a Communicator has none."""
    return Status.ASK_AGAIN


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
            self._go_on(status, operation, tensors, None, opts)
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
            self._go_on(status, operation, output, input, opts)
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
                self._go_on(status, operation, output, input, more[2])
            return method(self, output, input, *more, **named)

        return call

    return decorate


def straight_without_tensors(operation: Operation) -> Callable[[Method], Method]:
    """Let a method that takes options alone try the engine first."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
            status = self._run_given(operation, None, None, opts)
            if not status:
                return None
            self._go_on(status, operation, None, None, opts)
            return method(self, opts, *more, **named)

        return call

    return decorate


# -- what the engine learns of torch's options ---------------------------------------------------


@functools.cache
def learns_options_of(operation: Operation) -> bool:
    """Let the engine read torch's options of an operation by itself; whether it can."""
    kind = OPTIONS[operation]
    return learn_options(operation, kind, _samples(kind), _profiler_enabled)


def _samples(kind: type) -> list[tuple[Any, tuple[int | None, ...]]]:
    """Options with values at random, so that none goes along with another, and the values."""
    chance = random.Random(len(kind.__name__))
    return [_sample(kind(), chance) for _ in range(_SAMPLES)]


def _sample(options: Any, chance: random.Random) -> tuple[Any, tuple[int | None, ...]]:
    values: list[int | None] = [None] * 4
    if hasattr(options, "asyncOp"):
        options.asyncOp = bool(chance.getrandbits(1))
        values[0] = int(options.asyncOp)
    if hasattr(options, "reduceOp"):
        options.reduceOp = chance.choice([_Type.SUM, _Type.PRODUCT, _Type.MAX, _Type.BXOR])
        values[1] = hash(options.reduceOp)  # the number of its type
    if hasattr(options, "rootRank"):
        values[2] = options.rootRank = chance.getrandbits(31)
    if hasattr(options, "timeout"):
        values[3] = timeout_ms = chance.getrandbits(40)
        options.timeout = timedelta(milliseconds=timeout_ms)
    return options, tuple(values)
