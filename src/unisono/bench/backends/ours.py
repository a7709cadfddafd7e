"""unisono's Communicator, called directly."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from unisono.bench.backends.base import Backend, Buffers, Call, Case, Unsupported
from unisono.comm.communicator import Communicator
from unisono.plan.catalog import find_to_run

ENGINES_OWN = "direct"
"""The name of the engine's default."""


class Direct(Backend):
    """The methods of a Communicator, by an algorithm of the caller's choice or the engine's own."""

    def __init__(
        self, comm: Communicator, algorithm: str | None = None, device: str = "cpu"
    ) -> None:
        self.comm, self.device = comm, device
        self.algorithm = None if algorithm == ENGINES_OWN else algorithm
        self.rank, self.size = comm.rank, comm.size
        self.start_send, self.start_recv = comm.isend, comm.irecv
        self.name = "unisono" if algorithm is None else f"unisono:{algorithm}"

    def _bound(self, method: str, *arguments: Any, **more: Any) -> Call:
        call = getattr(self.comm, method)
        if self.algorithm is None:
            return partial(call, *arguments, **more)
        if "algorithm" not in inspect.signature(call).parameters:
            raise Unsupported(f"{method} takes no algorithm")
        try:
            find_to_run(method, self.algorithm)
        except ValueError as error:
            raise Unsupported(str(error)) from None
        return partial(call, *arguments, **more, algorithm=self.algorithm)

    def calls(self, case: Case, buffers: Buffers) -> Sequence[Call]:
        if not case.collective.is_collective and self.algorithm is not None:
            raise Unsupported("messages take no algorithm")
        return super().calls(case, buffers)

    def call(self, case: Case, buffers: Buffers, root: int) -> Call:
        output, input, op = buffers.output, buffers.input, case.op
        name = case.collective.name
        if name == "all_reduce_async":
            start = self._bound("all_reduce", output, op, async_op=True)
            return lambda: start().wait()  # type: ignore[attr-defined]
        if name == "gradients":
            return self._bound("all_reduce", buffers.gradients(), op)
        is_root = self.rank == root
        return self._bound(name, *case.collective.arguments(output, input, root, op, is_root))
