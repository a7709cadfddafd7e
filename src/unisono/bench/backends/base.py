"""What every backend offers: for a case and its buffers, the calls that are timed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from unisono.bench.collectives import gradient_counts, messages, neighbour
from unisono.cases.primitives import Primitive

if TYPE_CHECKING:
    import torch

BACKENDS = ("unisono", "unisono-torch", "gloo", "nccl", "mpi")
"""unisono is the Communicator called directly, unisono-torch the same under torch.distributed."""

Call: TypeAlias = Callable[[], object]


class Unsupported(Exception):
    """A backend lacks this, or is not installed: the message says what, `install` how to get it."""

    def __init__(self, reason: str, install: str | None = None) -> None:
        super().__init__(reason)
        self.install = install


@dataclass(frozen=True)
class Case:
    """One row before it is measured: which collective, how, and how large."""

    collective: Primitive
    size_bytes: int
    dtype: str
    op: str
    roots: tuple[int, ...]
    ranks: int

    @property
    def where(self) -> str:
        return f"{self.collective.name} of {self.size_bytes} bytes"


@dataclass(frozen=True)
class Buffers:
    """One rank's memory for a case. In place, both sides are the same."""

    output: torch.Tensor
    input: torch.Tensor

    @classmethod
    def make(cls, case: Case, device: str) -> Buffers:
        import torch

        dtype = getattr(torch, case.dtype)
        counts = case.collective.counts(case.size_bytes, dtype.itemsize, case.ranks)

        output = torch.zeros(counts.output, dtype=dtype, device=device)
        if case.collective.is_in_place:
            return cls(output, output)
        return cls(output, torch.zeros(counts.input, dtype=dtype, device=device))

    def parts(self, side: str, ranks: int) -> list[torch.Tensor]:
        """The part of a wide side that each rank has."""
        wide: torch.Tensor = getattr(self, side)
        return list(wide.view(ranks, -1))

    def gradients(self) -> list[torch.Tensor]:
        import torch

        return list(torch.split(self.output, list(gradient_counts(self.output.numel()))))


class Backend(ABC):
    """One way to run collectives, connected to its peers in the other ranks."""

    name: str
    device = "cpu"
    rank: int
    size: int
    start_send: Callable[[Any, int], Any]
    """Start to send a tensor to a rank; returns a handle for `wait_for`."""
    start_recv: Callable[[Any, int], Any]
    """Start to receive a tensor from a rank; returns a handle for `wait_for`."""

    def calls(self, case: Case, buffers: Buffers) -> Sequence[Call]:
        """What is timed, one call per root. Raises Unsupported."""
        if not case.collective.is_collective:
            return [self._ping_pong_or_stream(case, buffers)]
        roots = case.roots if case.collective.is_rooted else (0,)
        return [self.call(case, buffers, root) for root in roots]

    @abstractmethod
    def call(self, case: Case, buffers: Buffers, root: int) -> Call:
        """The collective of the case, once. Raises Unsupported."""

    def wait_for(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            handle.wait()

    def native(self, tensor: torch.Tensor) -> Any:
        """The tensor in the form that the backend's calls take."""
        return tensor

    def _ping_pong_or_stream(self, case: Case, buffers: Buffers) -> Call:
        """A message there and back, or many one way and one element back. The even rank starts."""
        output, input = self.native(buffers.output), self.native(buffers.input)
        peer = neighbour(self.rank, self.size)
        if peer is None:
            return lambda: None
        send, recv, wait = self.start_send, self.start_recv, self.wait_for
        is_even = self.rank % 2 == 0

        def ask() -> None:
            wait([send(input, peer)])
            wait([recv(output, peer)])

        def answer() -> None:
            wait([recv(output, peer)])
            wait([send(input, peer)])

        if case.collective.name == "ping_pong":
            return ask if is_even else answer
        each = range(messages(case.collective.name, case.size_bytes))
        reply = self.native(buffers.output.new_zeros(1))

        def give() -> None:
            wait([send(input, peer) for _ in each])
            wait([recv(reply, peer)])

        def take() -> None:
            wait([recv(output, peer) for _ in each])
            wait([send(reply, peer)])

        return give if is_even else take
