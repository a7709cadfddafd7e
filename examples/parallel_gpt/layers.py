"""Linear layers whose weights are split over the ranks of a group (Shoeybi et al., 2019).

A column-parallel layer gives each rank some of the outputs. A row-parallel one takes each rank's
part of the inputs and adds up the results. One after the other, they need one all_reduce forward
and one backward.

A rank has one shard of each layer. Or it has several virtual ones, each with its own matrix
products: then these have the same shapes on any number of ranks, and the results the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from unisono import Communicator


def whole(name: str, *shape: int, like: torch.Tensor, std: float = 0.02) -> torch.Tensor:
    """The weight of this name, the same for all ranks, however it is split."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * std).to(like)


def shards_of(
    weight: torch.Tensor, dim: int, comm: Communicator, shards: int
) -> torch.nn.ParameterList:
    """This rank's shards of a weight: one, or its part of so many virtual ones."""
    parts = weight.chunk(shards or comm.size, dim)
    mine = parts[comm.rank * len(parts) // comm.size :][: len(parts) // comm.size]
    return torch.nn.ParameterList(
        part.clone(memory_format=torch.contiguous_format) for part in mine
    )


def total_of(parts: Sequence[torch.Tensor], comm: Communicator) -> torch.Tensor:
    """The sum over the shards of all ranks."""
    given = [part.contiguous() for part in parts]
    total = given[0].clone()
    comm.all_reduce(total, contributions=given if comm.reproducible else None)
    return total


class _Spread(torch.autograd.Function):
    """Every shard uses the same tensor: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator, count: int) -> Any:
        ctx.comm = comm
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return total_of(gradients, ctx.comm), None, None


class _Sum(torch.autograd.Function):
    """Every rank has the sum and uses it in the same way, so it has the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, comm: Communicator, *parts: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parts)
        return total_of(parts, comm)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *[gradient] * ctx.count


class ColumnParallel(torch.nn.Module):
    """`outputs / size` outputs on each rank, shard by shard, from the same inputs."""

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        comm: Communicator,
        like: torch.Tensor,
        shards: int,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.weights = shards_of(whole(name, outputs, inputs, like=like), 0, comm, shards)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        copies = _Spread.apply(x, self.comm, len(self.weights))
        return [functional.linear(*pair) for pair in zip(copies, self.weights, strict=True)]


class RowParallel(torch.nn.Module):
    """All outputs on every rank, from `inputs / size` inputs on each, shard by shard."""

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        comm: Communicator,
        like: torch.Tensor,
        std: float,
        shards: int,
    ) -> None:
        super().__init__()
        self.comm = comm
        self.weights = shards_of(whole(name, outputs, inputs, like=like, std=std), 1, comm, shards)

    def forward(self, parts: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(parts, self.weights, strict=True)
        return _Sum.apply(self.comm, *(functional.linear(*pair) for pair in pairs))


class Network(torch.nn.Module):
    """Two layers with `inner` numbers between them, split over the ranks of a group."""

    def __init__(
        self,
        name: str,
        width: int,
        inner: int,
        comm: Communicator,
        like: torch.Tensor,
        std: float,
        shards: int,
    ) -> None:
        super().__init__()
        self.up = ColumnParallel(f"{name} up", width, inner, comm, like, shards)
        self.down = RowParallel(f"{name} down", inner, width, comm, like, std, shards)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down([functional.gelu(part) for part in self.up(x)])
