"""Linear layers whose weights are split over the ranks of a group (Shoeybi et al., 2019).

A column-parallel layer gives each rank some of the outputs. A row-parallel one takes each rank's
part of the inputs and adds up the results. One after the other, they need one all_reduce forward
and one backward.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch.nn import functional

from unisono import Communicator


def whole(name: str, *shape: int, like: torch.Tensor, std: float = 0.02) -> torch.Tensor:
    """The weight of this name, the same for all ranks, however it is split."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * std).to(like)


class _Spread(torch.autograd.Function):
    """Every rank uses the same tensor: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.comm.all_reduce(total)
        return total, None


class _Sum(torch.autograd.Function):
    """Every rank has the sum and uses it in the same way, so it has the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: Communicator) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class ColumnParallel(torch.nn.Module):
    """`outputs / size` outputs on each rank, from the same inputs."""

    def __init__(
        self, name: str, inputs: int, outputs: int, comm: Communicator, like: torch.Tensor
    ) -> None:
        super().__init__()
        self.comm = comm
        rows = whole(name, outputs, inputs, like=like).chunk(comm.size)[comm.rank]
        self.weight = torch.nn.Parameter(rows.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(_Spread.apply(x, self.comm), self.weight)


class RowParallel(torch.nn.Module):
    """All outputs on every rank, from `inputs / size` inputs on each."""

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        comm: Communicator,
        like: torch.Tensor,
        std: float,
    ) -> None:
        super().__init__()
        self.comm = comm
        columns = whole(name, outputs, inputs, like=like, std=std).chunk(comm.size, 1)[comm.rank]
        self.weight = torch.nn.Parameter(columns.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(functional.linear(x, self.weight), self.comm)


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
    ) -> None:
        super().__init__()
        self.up = ColumnParallel(f"{name} up", width, inner, comm, like)
        self.down = RowParallel(f"{name} down", inner, width, comm, like, std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))
