"""What a serving engine asks of a group: whole tensors in and out, along any dimension, and
dictionaries of tensors between pipeline stages. Compiled models call operators; in eager ones the
Communicator's own calls take less time."""

import json
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.work import Work

_IN_FLIGHT = 16
"""Dictionaries that may be on their way to other stages; then a sender waits for the oldest."""


class ServingCollectives:
    """The collectives of one group of an engine's workers."""

    def __init__(self, comm: Communicator) -> None:
        import unisono.operators  # noqa: F401  registers torch.ops.unisono

        self.comm = comm
        self._name, self._size = comm.name, comm.size
        self._sent: dict[int, bytes] = {}
        self._received: dict[int, Any] = {}
        self._in_flight: deque[list[tuple[Work, torch.Tensor]]] = deque()

    # -- in compiled models --------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if torch.compiler.is_compiling():
            torch.ops.unisono.all_reduce_(tensor, self._name)
        else:
            self.comm.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """All ranks' tensors, concatenated along `dim`."""
        dim %= tensor.dim()
        shape = tensor.shape
        parts = tensor.new_empty((self._size, *shape))
        if torch.compiler.is_compiling():
            torch.ops.unisono.all_gather_(parts, tensor.contiguous(), self._name)
        else:
            self.comm.all_gather(parts, tensor.contiguous())
        whole = (*shape[:dim], self._size * shape[dim], *shape[dim + 1 :])
        return parts.movedim(0, dim).reshape(whole)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's part of the sum, which is cut evenly along `dim`."""
        first = tensor.movedim(dim, 0).contiguous()
        if first.shape[0] % self._size:
            self.comm.reject_call(
                "reduce_scatter",
                f"dim {dim} of a tensor of shape {tuple(tensor.shape)} cannot be cut into "
                f"{self._size} equal parts",
            )
        part = first.new_empty((first.shape[0] // self._size, *first.shape[1:]))
        if torch.compiler.is_compiling():
            torch.ops.unisono.reduce_scatter_(part, first, self._name)
        else:
            self.comm.reduce_scatter(part, first)
        return part.movedim(0, dim).contiguous()

    # -- between layers --------------------------------------------------------------------------

    def gather(self, tensor: torch.Tensor, root: int = 0, dim: int = -1) -> torch.Tensor | None:
        """On `root`, all ranks' tensors, concatenated along `dim`; elsewhere None."""
        tensor = tensor.contiguous()
        if self.comm.rank != root:
            self.comm.gather(None, tensor, root)
            return None
        parts = [torch.empty_like(tensor) for _ in range(self._size)]
        self.comm.gather(parts, tensor, root)
        return torch.cat(parts, dim)

    def all_gatherv(self, tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """All ranks' tensors, concatenated along the first dimension: `sizes[r]` rows of rank r."""
        rows = sizes or [tensor.shape[0]] * self._size
        whole = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        self.comm.all_gather(_cut(whole, rows), tensor.contiguous())
        return whole

    def reduce_scatterv(
        self, tensor: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """This rank's `sizes[rank]` rows along `dim` of the sum."""
        if sizes is None:
            return self.reduce_scatter(tensor, dim)
        first = tensor.movedim(dim, 0).contiguous()
        part = first.new_empty((sizes[self.comm.rank], *first.shape[1:]))
        self.comm.reduce_scatter(part, _cut(first, sizes))
        return part.movedim(0, dim)

    # -- between pipeline stages -------------------------------------------------------------------

    def send_tensor_dict(self, tensors: dict[str, torch.Tensor], dst: int) -> None:
        """Send copies of these tensors to rank `dst`; returns before they have arrived."""
        shapes = [(name, list(x.shape), str(x.dtype)[6:]) for name, x in tensors.items()]
        text = json.dumps(shapes).encode()
        is_known = self._sent.get(dst) == text
        self._sent[dst] = text
        messages = [torch.tensor([0 if is_known else len(text)])]
        if not is_known:
            messages.append(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        messages += [x.clone(memory_format=torch.contiguous_format) for x in tensors.values()]
        self._in_flight.append([(self.comm.isend(x, dst), x) for x in messages])
        while self._in_flight and (
            len(self._in_flight) > _IN_FLIGHT
            or all(work.is_completed() for work, _ in self._in_flight[0])
        ):
            for work, _ in self._in_flight.popleft():
                work.wait()

    def recv_tensor_dict(self, src: int) -> dict[str, torch.Tensor]:
        """Receive what rank `src` has sent by `send_tensor_dict`."""
        length = torch.empty(1, dtype=torch.int64)
        self.comm.recv(length, src)
        if length.item():
            text = torch.empty(int(length), dtype=torch.uint8)
            self.comm.recv(text, src)
            self._received[src] = json.loads(text.numpy().tobytes())
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, shape, dtype in self._received[src]
        }
        for tensor in tensors.values():
            self.comm.recv(tensor, src)
        return tensors


def _cut(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """The rows of each rank."""
    return [tensor[first:end] for first, end in pairwise(accumulate(sizes, initial=0))]
