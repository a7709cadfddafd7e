"""A GPT as this rank has it: its pipeline stage, its heads, its positions, its experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from layers import ColumnParallel, Network, RowParallel, whole
from torch.nn import functional

from unisono import Communicator, ProcessGroupManager
from unisono.training import ExpertParallel, shard_positions, ulysses_attention


@dataclass(frozen=True)
class Config:
    """The model and a step. The defaults have 3.6 million parameters.

    With `experts` each layer has that many networks, and a token goes through the `top_k` that
    its gate chooses; `capacity_factor` is how full an expert may be, None for any number of tokens.
    In attention, `ulysses` neighbours along cp have some heads each; a ring joins the rest of cp.
    With `shards` the layers that tp splits are cut into so many virtual shards on any tp: the same
    logits, bit for bit.
    """

    vocabulary: int = 128
    width: int = 192
    layers: int = 8
    heads: int = 8
    positions: int = 64
    batch: int = 16
    micro_batches: int = 2
    learning_rate: float = 5e-4
    warm_up: int = 20
    experts: int = 0
    top_k: int = 2
    capacity_factor: float | None = None
    ulysses: int = 1
    shards: int = 0

    def check(self, manager: ProcessGroupManager) -> None:
        """Raise ValueError, with what fits, if this layout cannot hold the model or the batch."""
        cut, cuts = ("shards", self.shards) if self.shards else ("tp", manager.tp_world_size)
        wanted = (
            ("tp", "shards", self.shards, manager.tp_world_size),
            (f"{cut} x ulysses", "heads", self.heads, cuts * self.ulysses),
            ("ulysses", "cp", manager.cp_world_size, self.ulysses),
            ("pp", "layers", self.layers, manager.pp_world_size),
            ("cp", "positions", self.positions, manager.cp_world_size),
            ("ep", "experts", self.experts, manager.ep_world_size),
            (
                "dp x ep",
                "batch / micro_batches",
                self.batch // self.micro_batches,
                manager.dp_world_size * manager.ep_world_size,
            ),
        )
        if self.batch % self.micro_batches:
            raise ValueError(f"{self.micro_batches} micro-batches do not divide {self.batch}")
        for axis, name, number, size in wanted:
            if number % size:
                fits = [str(fit) for fit in range(1, number + 1) if number % fit == 0]
                raise ValueError(
                    f"{axis} {size} does not divide {name} {number}: use {axis} {', '.join(fits)}"
                )


def mixture(
    name: str, config: Config, manager: ProcessGroupManager, like: torch.Tensor, std: float
) -> ExpertParallel:
    """Experts, split over the ranks of `ep`, and a gate, which all ranks have."""
    width = config.width
    gate = torch.nn.Linear(width, config.experts, bias=False)
    gate.weight = torch.nn.Parameter(whole(f"{name} gate", config.experts, width, like=like))
    count = config.experts // manager.ep_world_size
    experts = [
        Network(f"{name} expert {number}", width, 4 * width, manager.tp, like, std, config.shards)
        for number in range(manager.ep_rank * count, (manager.ep_rank + 1) * count)
    ]
    return ExpertParallel(
        gate, experts, config.top_k, manager.ep, capacity_factor=config.capacity_factor
    )


class Sequence:
    """How the ranks of cp split the sequence: by heads among neighbours, by a ring beyond them. The
    mask is causal, so the order is zigzag."""

    def __init__(self, config: Config, cp: Communicator) -> None:
        sizes = {"tp_size": config.ulysses, "cp_size": cp.size // config.ulysses}
        self.manager = ProcessGroupManager(**sizes, group=cp)
        self.groups = {"heads": self.manager.tp, "context": self.manager.cp}
        self.positions = shard_positions(config.positions, **self.groups, order="zigzag")

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        heads, context = self.groups.values()
        return ulysses_attention(
            query, key, value, heads, context=context, causal=True, order="zigzag"
        )


class Block(torch.nn.Module):
    """Attention and a small network, each after a norm and with a residual connection."""

    def __init__(
        self,
        name: str,
        config: Config,
        manager: ProcessGroupManager,
        sequence: Sequence,
        like: torch.Tensor,
    ) -> None:
        super().__init__()
        width, tp, shards = config.width, manager.tp, config.shards
        self.heads = config.heads // (shards or tp.size)  # in a shard
        self.sequence = sequence
        self.before_attention = torch.nn.LayerNorm(width).to(like)
        self.before_network = torch.nn.LayerNorm(width).to(like)
        # Rows in the order (head, one of query, key and value, width): whole heads in each shard.
        self.qkv = ColumnParallel(f"{name} qkv", width, 3 * width, tp, like, shards)
        std = 0.02 / (2 * config.layers) ** 0.5  # as many are added up in the residual stream
        self.out = RowParallel(f"{name} out", width, width, tp, like, std, shards)
        self.network = (
            mixture(name, config, manager, like, std)
            if config.experts
            else Network(name, width, 4 * width, tp, like, std, shards)
        )

    def attention(self, qkv: torch.Tensor) -> torch.Tensor:
        query, key, value = qkv.unflatten(2, (self.heads, 3, -1)).transpose(1, 2).unbind(3)
        return self.sequence.attention(query, key, value).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out([self.attention(part) for part in self.qkv(self.before_attention(x))])
        return x + self.network(self.before_network(x))


class Stage(torch.nn.Module):
    """The part of the model between the previous and the next pipeline stage."""

    def __init__(
        self,
        config: Config,
        manager: ProcessGroupManager,
        sequence: Sequence,
        like: torch.Tensor,
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = manager.pp_is_first_stage, manager.pp_is_last_stage
        self.sequence = sequence
        manager.tp.reproducible = config.shards > 0
        if self.is_first:
            characters = whole("characters", config.vocabulary, config.width, like=like)
            positions = whole("positions", config.positions, config.width, like=like)
            self.characters = torch.nn.Parameter(characters)
            self.positions = torch.nn.Parameter(positions)
        count = config.layers // manager.pp_world_size
        mine = range(manager.pp_rank * count, (manager.pp_rank + 1) * count)
        self.blocks = torch.nn.Sequential(
            *(Block(f"block {number}", config, manager, sequence, like) for number in mine)
        )
        if self.is_last:
            self.norm = torch.nn.LayerNorm(config.width).to(like)
            self.head = torch.nn.Parameter(
                whole("head", config.vocabulary, config.width, like=like)
            )

    def expert_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that only this rank of `ep` has."""
        layers = [block.network for block in self.blocks]
        return [
            parameter
            for layer in layers
            if isinstance(layer, ExpertParallel)
            for parameter in layer.experts.parameters()
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From characters, or the previous stage's result, to this stage's."""
        if self.is_first:
            x = functional.embedding(x, self.characters) + self.positions[self.sequence.positions]
        x = self.blocks(x)
        return functional.linear(self.norm(x), self.head) if self.is_last else x
