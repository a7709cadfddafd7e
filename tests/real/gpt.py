"""A small GPT on plain torch.distributed, in the forms in which such programs are written.

`DataParallelGPT` is nanoGPT's: one model, wrapped by DDP. `GridGPT` is picotron's: ranks in a grid
of data, pipeline, context and tensor parallelism, each axis with its own groups. Both take one step
at a time, so that two of them, on two backends, can take turns in one process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

AXES = ("dp", "pp", "cp", "tp")
BUCKET_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Sizes:
    """The model and its batch, which all ranks share."""

    vocabulary: int = 65
    width: int = 64
    heads: int = 4
    layers: int = 4
    sequence: int = 64
    batch: int = 8
    micro_batches: int = 2


class Grid:
    """The ranks as dp x pp x cp x tp, and this rank's group along every axis.

    `replicas` are the ranks that have the same parameters: dp and cp together."""

    def __init__(self, backend: str, **sizes: int) -> None:
        self.size = {axis: sizes.get(axis, 1) for axis in AXES}
        ranks = torch.arange(math.prod(self.size.values())).view(*self.size.values())
        self.rank = dict(zip(AXES, (ranks == dist.get_rank()).nonzero()[0].tolist(), strict=True))
        self.members: dict[str, list[int]] = {}
        self.group: dict[str, Any] = {}
        for name in (*AXES, "replicas"):
            varying = ("dp", "cp") if name == "replicas" else (name,)
            fixed = [axis for axis in AXES if axis not in varying]
            for place in itertools.product(*(range(self.size[axis]) for axis in fixed)):
                where = dict(zip(fixed, place, strict=True))
                index = tuple(where.get(axis, slice(None)) for axis in AXES)
                members = ranks[index].flatten().tolist()
                group = dist.new_group(members, backend=backend)
                if dist.get_rank() in members:
                    self.members[name], self.group[name] = members, group

    def neighbour(self, axis: str, distance: int) -> int:
        """The global rank this many places further along an axis, which is a ring."""
        return self.members[axis][(self.rank[axis] + distance) % self.size[axis]]


class _CopyToShards(torch.autograd.Function):
    """Before sharded weights: the gradients of all shards are summed."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: Any) -> Tensor:
        context.group = group
        return tensor

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class _SumOfShards(torch.autograd.Function):
    """After sharded weights: the results of all shards are summed."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: Any) -> Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Shift(torch.autograd.Function):
    """The tensor of the previous rank in the ring, while ours goes to the next."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, grid: Grid) -> Tensor:
        context.grid = grid
        return _exchange(tensor, grid, 1)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, context.grid, -1), None


def _exchange(tensor: Tensor, grid: Grid, distance: int) -> Tensor:
    received, group = torch.empty_like(tensor), grid.group["cp"]
    messages = [
        dist.P2POp(dist.isend, tensor.contiguous(), grid.neighbour("cp", distance), group),
        dist.P2POp(dist.irecv, received, grid.neighbour("cp", -distance), group),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return received


class _Linear(nn.Module):
    """A linear layer of which this rank has a shard: of the outputs, or of the inputs."""

    def __init__(self, grid: Grid, inputs: int, outputs: int, by_outputs: bool) -> None:
        super().__init__()
        self.group = grid.group["tp"] if grid.size["tp"] > 1 else None
        self.by_outputs = by_outputs
        whole = torch.randn(outputs, inputs) / math.sqrt(inputs)
        shards = whole.chunk(grid.size["tp"], 0 if by_outputs else 1)
        self.weight = nn.Parameter(shards[grid.rank["tp"]].clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return functional.linear(x, self.weight)
        if self.by_outputs:
            return functional.linear(_CopyToShards.apply(x, self.group), self.weight)
        return _SumOfShards.apply(functional.linear(x, self.weight), self.group)


class _Block(nn.Module):
    def __init__(self, grid: Grid, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.grid, self.heads = grid, sizes.heads // grid.size["tp"]
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (_Linear(grid, width, width, True) for _ in range(3))
        self.project = _Linear(grid, width, width, False)
        self.widen = _Linear(grid, width, 4 * width, True)
        self.narrow = _Linear(grid, 4 * width, width, False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.project(self.attend(self.before_attention(x)))
        return x + self.narrow(functional.gelu(self.widen(self.before_mlp(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        parts, rank = self.grid.size["cp"], self.grid.rank["cp"]
        if parts == 1:
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            held = torch.stack([key, value])
            blocks = {rank: held}
            for turn in range(1, parts):
                held = _Shift.apply(held, self.grid)
                blocks[(rank - turn) % parts] = held
            key, value = torch.cat([blocks[part] for part in range(parts)], dim=3)
            mine = rank * length + torch.arange(length)
            seen = torch.arange(parts * length) <= mine[:, None]
            out = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return out.transpose(1, 2).reshape(batch, length, -1)


class _Stage(nn.Module):
    """One rank's part of the model: its stage's blocks, and its shard of each."""

    def __init__(self, grid: Grid, sizes: Sizes) -> None:
        super().__init__()
        stages, stage = grid.size["pp"], grid.rank["pp"]
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.grid = grid
        torch.manual_seed(0)  # every rank creates the whole model, and keeps its part
        tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        positions = nn.Embedding(sizes.sequence, sizes.width)
        blocks = [_Block(grid, sizes) for _ in range(sizes.layers)]
        head = nn.Sequential(
            nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        )
        each = sizes.layers // stages
        self.tokens = tokens if self.is_first else None
        self.positions = positions if self.is_first else None
        self.blocks = nn.Sequential(*blocks[stage * each : (stage + 1) * each])
        self.head = head if self.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            length = x.shape[1]
            first = self.grid.rank["cp"] * length
            x = self.tokens(x) + self.positions(torch.arange(first, first + length))
        x = self.blocks(x)
        return self.head(x) if self.head is not None else x


class GridGPT:
    """This rank's part of a model that is trained on a grid of ranks."""

    def __init__(self, backend: str, sizes: Sizes, **axes: int) -> None:
        self.sizes = sizes
        self.grid = Grid(backend, **axes)
        self.stage = _Stage(self.grid, sizes)
        self.parameters = list(self.stage.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05, momentum=0.9)

    def step(self, number: int) -> float:
        """Train on batch `number`; returns the loss of this rank's part, 0 if it has none."""
        micro_batches = self._own_micro_batches(number)
        held = [self._forward(*micro_batch) for micro_batch in micro_batches]
        for inputs, outputs in held:
            self._backward(inputs, outputs)
        self._average_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not self.stage.is_last:
            return 0.0
        return sum(loss.item() for _, loss in held) / self.grid.size["tp"]

    def mean_loss(self, own: Sequence[float]) -> list[float]:
        """What `step` returned on all ranks, as the loss of the whole batch."""
        losses = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(losses)
        return (losses / (self.grid.size["dp"] * self.grid.size["cp"])).tolist()

    def _own_micro_batches(self, number: int) -> list[tuple[Tensor, Tensor]]:
        tokens = make_batch(self.sizes, number)
        for dim, axis in ((0, "dp"), (1, "cp")):
            tokens = [
                part.chunk(self.grid.size[axis], dim)[self.grid.rank[axis]] for part in tokens
            ]
        return list(zip(*(part.chunk(self.sizes.micro_batches) for part in tokens), strict=True))

    def _forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not self.stage.is_first:
            inputs = torch.empty(*inputs.shape, self.sizes.width)
            dist.recv(inputs, self.grid.neighbour("pp", -1), self.grid.group["pp"])
            inputs.requires_grad_()
        outputs = self.stage(inputs)
        if self.stage.is_last:
            loss = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
            return inputs, loss / self.sizes.micro_batches
        dist.send(outputs.detach(), self.grid.neighbour("pp", 1), self.grid.group["pp"])
        return inputs, outputs

    def _backward(self, inputs: Tensor, outputs: Tensor) -> None:
        gradient = None
        if not self.stage.is_last:
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, self.grid.neighbour("pp", 1), self.grid.group["pp"])
        outputs.backward(gradient)
        if not self.stage.is_first:
            dist.send(inputs.grad, self.grid.neighbour("pp", -1), self.grid.group["pp"])

    def _average_gradients(self) -> None:
        count = self.grid.size["dp"] * self.grid.size["cp"]
        if count == 1:
            return
        buckets: list[list[Tensor]] = [[]]
        for parameter in reversed(self.parameters):
            if sum(map(torch.numel, buckets[-1])) > BUCKET_ELEMENTS:
                buckets.append([])
            buckets[-1].append(parameter.grad)
        rows = [torch.cat([gradient.flatten() for gradient in bucket]) for bucket in buckets]
        group = self.grid.group["replicas"]
        works = [dist.all_reduce(row, group=group, async_op=True) for row in rows]
        for work, row, bucket in zip(works, rows, buckets, strict=True):
            work.wait()
            parts = (row / count).split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view_as(gradient))


class _Alone:
    """A grid of one rank, which needs no group."""

    def __init__(self) -> None:
        self.size = dict.fromkeys(AXES, 1)
        self.rank = dict.fromkeys(AXES, 0)
        self.group: dict[str, Any] = {}


class DataParallelGPT:
    """The whole model on every rank, under DDP, with each rank's own batch."""

    def __init__(self, backend: str, sizes: Sizes) -> None:
        self.sizes = sizes
        alone: Any = _Alone()
        self.model = DistributedDataParallel(
            _Stage(alone, sizes), process_group=dist.new_group(backend=backend)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, number: int) -> float:
        """Train on batch `number`; this rank's loss."""
        inputs, targets = make_batch(self.sizes, number * dist.get_world_size() + dist.get_rank())
        loss = functional.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def mean_loss(self, own: Sequence[float]) -> list[float]:
        """What `step` returned on all ranks, as the loss of all batches."""
        losses = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(losses)
        return (losses / dist.get_world_size()).tolist()


def make_batch(sizes: Sizes, number: int) -> list[Tensor]:
    """Inputs and targets of one batch: the alphabet, from different starting letters."""
    generator = torch.Generator().manual_seed(number)
    first = torch.randint(sizes.vocabulary, (sizes.batch, 1), generator=generator)
    stride = torch.randint(1, 4, (sizes.batch, 1), generator=generator)
    tokens = (first + stride * torch.arange(sizes.sequence + 1)) % sizes.vocabulary
    return [tokens[:, :-1], tokens[:, 1:]]


def losses_alone(sizes: Sizes, steps: int) -> list[float]:
    """The losses of one process that trains the model of `GridGPT` by itself."""
    alone: Any = _Alone()
    stage = _Stage(alone, sizes)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for number in range(steps):
        inputs, targets = make_batch(sizes, number)
        loss = functional.cross_entropy(stage(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


NANOGPT = Sizes(width=128, heads=4, layers=4, sequence=64, batch=12)
PICOTRON = Sizes()
GRIDS = (
    *({axis: 4} for axis in AXES),
    *({first: 2, second: 2} for first, second in itertools.combinations(AXES, 2)),
)
PROGRAMS: dict[str, Callable[[str], Any]] = {
    "nanoGPT, DDP": lambda backend: DataParallelGPT(backend, NANOGPT)
}
for _axes in GRIDS:
    PROGRAMS["picotron, " + " x ".join(f"{axis}{size}" for axis, size in _axes.items())] = (
        lambda backend, axes=_axes: GridGPT(backend, PICOTRON, **axes)
    )
