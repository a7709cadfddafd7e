"""unisono's Communicator, called directly."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from unisono.bench.backends.base import Backend, Buffers, Call, Case, Unsupported, after_copy
from unisono.comm.base import Communicator

ENGINES_OWN = "direct"
"""The name of what the engine does where nobody chooses."""


def knows_algorithms() -> bool:
    """Whether the Communicator lets its caller choose an algorithm."""
    return "algorithm" in inspect.signature(Communicator.all_reduce).parameters


class Direct(Backend):
    """The methods of a Communicator, by an algorithm of the caller's choice or the engine's own."""

    def __init__(self, comm: Communicator, algorithm: str | None = None) -> None:
        self.comm = comm
        self.algorithm = None if algorithm == ENGINES_OWN else algorithm
        self.rank, self.size = comm.rank, comm.size
        self.name = "unisono" if algorithm is None else f"unisono:{algorithm}"

    def _bound(self, method: str, *arguments: Any, **more: Any) -> Call:
        """A method of the Communicator with everything it needs."""
        call = getattr(self.comm, method)
        if self.algorithm is None:
            return partial(call, *arguments, **more)
        if "algorithm" not in inspect.signature(call).parameters:
            raise Unsupported(f"{method} has no choice of algorithms")
        return partial(call, *arguments, **more, algorithm=self.algorithm)

    def all_reduce(self, case: Case, buffers: Buffers, root: int) -> Call:
        return after_copy(case, buffers, self._bound("all_reduce", buffers.output, case.op))

    def all_reduce_async(self, case: Case, buffers: Buffers, root: int) -> Call:
        start = self._bound("all_reduce", buffers.output, case.op, async_op=True)
        return lambda: start().wait()  # type: ignore[attr-defined]

    def all_gather(self, case: Case, buffers: Buffers, root: int) -> Call:
        return self._bound("all_gather", buffers.output, buffers.input)

    def reduce_scatter(self, case: Case, buffers: Buffers, root: int) -> Call:
        return self._bound("reduce_scatter", buffers.output, buffers.input, case.op)

    def broadcast(self, case: Case, buffers: Buffers, root: int) -> Call:
        call = self._bound("broadcast", buffers.output, root)
        return after_copy(case, buffers, call, self.rank == root)

    def reduce(self, case: Case, buffers: Buffers, root: int) -> Call:
        return after_copy(case, buffers, self._bound("reduce", buffers.output, root, case.op))

    def gather(self, case: Case, buffers: Buffers, root: int) -> Call:
        output = buffers.output if self.rank == root else None
        return self._bound("gather", output, buffers.input, root)

    def scatter(self, case: Case, buffers: Buffers, root: int) -> Call:
        input = buffers.input if self.rank == root else None
        return self._bound("scatter", buffers.output, input, root)

    def all_to_all(self, case: Case, buffers: Buffers, root: int) -> Call:
        return self._bound("all_to_all", buffers.output, buffers.input)

    def barrier(self, case: Case, buffers: Buffers, root: int) -> Call:
        return self._bound("barrier")

    def gradients(self, case: Case, buffers: Buffers, root: int) -> Call:
        return self._bound("all_reduce", buffers.gradients(), case.op)

    def start_send(self, tensor: Any, peer: int) -> Any:
        return self.comm.isend(tensor, peer)

    def start_recv(self, tensor: Any, peer: int) -> Any:
        return self.comm.irecv(tensor, peer)

    def wait_for(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            handle.wait()

    def ping_pong(self, case: Case, buffers: Buffers, root: int) -> Call:
        self._refuse_algorithm()
        return super().ping_pong(case, buffers, root)

    def stream(self, case: Case, buffers: Buffers, root: int) -> Call:
        self._refuse_algorithm()
        return super().stream(case, buffers, root)

    def _refuse_algorithm(self) -> None:
        if self.algorithm is not None:
            raise Unsupported("messages have no choice of algorithms")

    def close(self) -> None:
        self.comm.close()
