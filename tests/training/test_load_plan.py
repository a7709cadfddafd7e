"""What a loader reads is what is sent, and what it gets is what it would have got whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from unisono import Communicator, WeightMismatch, WeightUpdateError
from unisono.training import LoadPlan, WeightReceiver, WeightSender, WeightShard
from unisono.training.weights.shards import part_key

Pairs = Iterable[tuple[str, torch.Tensor]]
HIDDEN, HEADS, KV_HEADS, HEAD, WIDE, VOCABULARY, EXPERTS = 32, 4, 2, 8, 48, 50, 4


def checkpoint(version: int = 1, layers: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    """A model of Llama's layout, with a layer of experts as Mixtral's."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for layer in range(layers):
        shapes |= {
            f"{layer}.q": (HEADS * HEAD, HIDDEN),
            f"{layer}.k": (KV_HEADS * HEAD, HIDDEN),
            f"{layer}.v": (KV_HEADS * HEAD, HIDDEN),
            f"{layer}.o": (HIDDEN, HEADS * HEAD),
            f"{layer}.gate": (WIDE, HIDDEN),
            f"{layer}.up": (WIDE, HIDDEN),
            f"{layer}.down": (HIDDEN, WIDE),
            f"{layer}.norm": (HIDDEN,),
        }
        for expert in range(EXPERTS):
            shapes[f"{layer}.expert{expert}.up"] = (WIDE, HIDDEN)
    shapes["rotary"] = (HEAD,)  # nobody reads it
    generator = torch.Generator().manual_seed(version)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


class Engine:
    """One worker of `size`: tensors of several names in one, rows, columns, experts, a padded
    vocabulary, a transposed tensor, and another dtype."""

    def __init__(self, rank: int, size: int, layers: int = 2) -> None:
        self.rank, self.size = rank, size
        rows = -(-VOCABULARY // 8) * 8 // size
        heads, wide = HEADS * HEAD // size, WIDE // size
        kv = KV_HEADS * HEAD // size
        self.served = {"embed": torch.full((rows, HIDDEN), 7.0), "norm": torch.zeros(HIDDEN)}
        self.served["head"] = torch.zeros(rows, HIDDEN)
        for layer in range(layers):
            self.served |= {
                f"{layer}.qkv": torch.zeros(heads + 2 * kv, HIDDEN),
                f"{layer}.o": torch.zeros(HIDDEN, heads),
                f"{layer}.gate_up": torch.zeros(2, wide, HIDDEN),
                f"{layer}.down": torch.zeros(wide, HIDDEN, dtype=torch.float64),
                f"{layer}.norm": torch.zeros(HIDDEN),
                f"{layer}.experts": torch.zeros(EXPERTS // size, WIDE, HIDDEN),
            }

    def load(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            layer, _, kind = name.rpartition(".")
            mine = tensor.narrow(0, 0, 0) if not tensor.dim() else tensor
            if kind in "qkv":
                mine = tensor.view(-1, HEAD, HIDDEN).chunk(self.size)[self.rank].flatten(0, 1)
                begin = {"q": 0, "k": -2 * KV_HEADS, "v": -KV_HEADS}[kind] * HEAD // self.size
                qkv = self.served[f"{layer}.qkv"]
                qkv[begin % len(qkv) :][: len(mine)].copy_(mine)
            elif kind == "o":
                width = HEADS * HEAD // self.size
                self.served[name].copy_(tensor[:, self.rank * width : (self.rank + 1) * width])
            elif kind in ("gate", "up") and "expert" not in name:
                mine = tensor.to(torch.float32).chunk(self.size)[self.rank]
                self.served[f"{layer}.gate_up"][int(kind == "up")] = mine
            elif kind == "down":
                mine = tensor.t().contiguous().tensor_split(self.size)[self.rank]
                self.served[name].copy_(mine)
            elif "expert" in name:
                number, each = int(layer[-1]), EXPERTS // self.size
                if number // each == self.rank:
                    self.served[f"{layer[0]}.experts"][number % each] = tensor
            elif name == "embed":
                for into in ("embed", "head"):
                    rows = len(self.served[into])
                    mine = tensor[self.rank * rows : (self.rank + 1) * rows]
                    self.served[into][: len(mine)].copy_(mine)
                    self.served[into][len(mine) :].fill_(0)
            elif kind == "norm":
                self.served[name].copy_(tensor)

    def expect(self, version: int) -> None:
        """What it serves is what its loader makes of whole tensors, bit for bit."""
        other = Engine(self.rank, self.size)
        other.load(checkpoint(version).items())
        for name, tensor in other.served.items():
            assert torch.equal(tensor, self.served[name]), name


def on_meta(version: int = 1) -> dict[str, torch.Tensor]:
    return {name: tensor.to("meta") for name, tensor in checkpoint(version).items()}


@pytest.mark.parametrize("size", [1, 2])
def test_a_plan_has_a_workers_share_alone(size: int) -> None:
    whole = sum(tensor.nbytes for tensor in checkpoint().values())
    norms = 3 * HIDDEN * 4
    read = whole - HEAD * 4 - norms
    plans = [LoadPlan(Engine(rank, size).load, on_meta()) for rank in range(size)]
    assert [plan.whole for plan in plans] == [()] * size
    assert sum(plan.bytes for plan in plans) == read + size * norms
    assert all(plan.parts["rotary"] == [] for plan in plans)


def test_a_plan_writes_nothing() -> None:
    engine = Engine(0, 1)
    before = {name: tensor.clone() for name, tensor in engine.served.items()}
    LoadPlan(engine.load, on_meta())
    assert all(torch.equal(before[name], each) for name, each in engine.served.items())


LOADERS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "computes": lambda to, tensor: to.copy_(tensor[2:4] * 2 + tensor[0]),
    "adds": lambda to, tensor: to.add_(tensor[2:4]),
    "joins": lambda to, tensor: to.copy_(torch.cat([tensor[4:5], tensor[7:8]])),
    "casts first": lambda to, tensor: to.copy_(tensor.to(torch.bfloat16)[3:5]),
    "every other row": lambda to, tensor: to.copy_(tensor[1:5:2]),
    "one column for all": lambda to, tensor: to.copy_(tensor[2:4, 1:2].expand(2, 6)),
    "a row as a matrix": lambda to, tensor: to[:, :3].copy_(tensor[5].view(2, 3)),
    "flat": lambda to, tensor: to.view(-1).copy_(tensor.reshape(-1)[6:18]),
    "across rows": lambda to, tensor: to.view(-1).copy_(tensor.view(-1)[4:16]),
    "bits": lambda to, tensor: to.view(torch.int32).copy_(tensor.view(torch.int32)[2:4]),
    "halves": lambda to, tensor: to.view(torch.int16).copy_(tensor.view(torch.int16)[2:4]),
    "looks": lambda to, tensor: to.copy_(tensor[2:4] * (2 if tensor.sum() > 0 else 3)),
    "a copy": lambda to, tensor: to.copy_(tensor.clone().t().contiguous()[:2, :6]),
    "through another": lambda to, tensor: to.copy_(torch.zeros(2, 6).copy_(tensor[:2])),
    "looks later": lambda to, tensor: to.copy_(tensor[2:4]).fill_(
        float(torch.zeros(2, 6).copy_(tensor[:2]).sum() > 100)
    ),
    "picks": lambda to, tensor: to.copy_(tensor[torch.tensor([3, 1])]),
    "swaps": lambda to, tensor: to.copy_(tensor[2:4].flip(0)),
}


@pytest.mark.parametrize("way", LOADERS)
def test_any_loader_gets_what_it_reads(way: str) -> None:
    tensor = torch.randn(8, 6)
    expected, served = torch.ones(2, 6), torch.ones(2, 6)
    LOADERS[way](expected, tensor)
    plan = LoadPlan(
        lambda pairs: [LOADERS[way](served, each) for _, each in pairs],
        {"w": torch.empty(8, 6, device="meta")},
    )
    shards = plan.weights["w"]
    cut = []
    for shard in shards:
        part = tensor
        for dim, (begin, length) in enumerate(zip(shard.offset, shard.tensor.shape, strict=True)):
            part = part.narrow(dim, begin, length)
        cut.append(part.clone())
    assert plan.whole == (("w",) if "looks" in way else ())
    assert plan.bytes == sum(part.nbytes for part in cut)
    assert (plan.bytes < tensor.nbytes) == (way not in ("looks", "looks later", "picks"))
    plan.prepare({part_key("w", index): part for index, part in enumerate(cut)})
    assert bool(served.eq(1).all())
    plan.commit()
    assert torch.equal(served, expected)


def test_a_loader_that_is_different_each_time_is_refused() -> None:
    served, calls = torch.zeros(2), []

    def load(pairs: Pairs) -> None:
        for _, tensor in pairs:
            calls.append(1)
            served.copy_(tensor[:2] * len(calls))

    with pytest.raises(WeightUpdateError, match="of 1 writes 0 are equal"):
        LoadPlan(load, {"w": torch.empty(4, device="meta")})


def test_what_a_loader_raises_is_raised() -> None:
    def load(pairs: Pairs) -> None:
        served = torch.zeros(2)
        for _, tensor in pairs:
            served.copy_(tensor)

    with pytest.raises(RuntimeError, match="expand"):
        LoadPlan(load, {"w": torch.empty(4, device="meta")})
    served = torch.zeros(2)

    def read_back(pairs: Pairs) -> None:
        for _, tensor in pairs:
            served.copy_(tensor)
            torch.add(served, 1)

    with pytest.raises(WeightUpdateError, match="what it has written before"):
        LoadPlan(read_back, {"w": torch.empty(2, device="meta")})


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_what_cannot_be_written_is_refused_before_a_vote(tmp_path: Path) -> None:
    numpy.save(tmp_path / "w.npy", numpy.zeros(4, numpy.int8))
    mapped = torch.from_numpy(numpy.load(tmp_path / "w.npy", mmap_mode="r"))
    served = torch.zeros(4, dtype=torch.int8)

    def refuse(error: type[Exception], why: str, write: Callable[[torch.Tensor], object]) -> None:
        with pytest.raises(error, match=why):
            LoadPlan(
                lambda pairs: [write(each) for _, each in pairs],
                {"w": torch.empty(4, dtype=torch.int8, device="meta")},
            )

    refuse(ValueError, "'w' is in read-only memory", mapped.copy_)
    refuse(ValueError, "'w' is expanded", served[:1].expand(4).copy_)
    refuse(RuntimeError, "must match the size", lambda each: served.add_(each[:3]))
    refuse(RuntimeError, "overflow", lambda each: served.fill_(1000))
    assert served.eq(0).all()
    plan = LoadPlan(lambda pairs: [served.copy_(each) for _, each in pairs], {"w": served})
    served.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="'w' has no memory"):
        plan.prepare({part_key("w", 0): torch.ones(4, dtype=torch.int8)})


# -- updates -----------------------------------------------------------------------------------


def shard_of(tensor: torch.Tensor, rank: int, size: int, dim: int) -> WeightShard:
    """A rank's share of a dimension, uneven if it must be."""
    ends = [len(range(tensor.shape[dim])) * n // size for n in (rank, rank + 1)]
    part = tensor.narrow(dim, ends[0], ends[1] - ends[0]).clone()
    offset = tuple(ends[0] if each == dim else 0 for each in range(tensor.dim()))
    return WeightShard(part, tuple(tensor.shape), offset)


def trainer_weights(version: int, rank: int, size: int, layout: str) -> dict[str, Any]:
    """What one of `size` trainers holds: rows of all as FSDP, or columns or rows of its layers."""
    weights = checkpoint(version)
    if layout == "whole":
        return weights if rank == 0 else {}
    if layout == "fsdp":
        return {name: shard_of(each, rank, size, 0) for name, each in weights.items()}
    half = size // 2  # tensor parallel in halves, of pipelines of two stages
    held = {}
    for name, each in weights.items():
        stage = int(name[0]) % 2 if name[0].isdigit() else int(name == "norm")
        if rank // half == stage:
            dim = int(name.endswith((".o", ".down")))
            held[name] = shard_of(each, rank % half, half, dim)
    return held


@pytest.mark.ranks(7)
@pytest.mark.parametrize("layout", ["fsdp", "tp x pp", "whole"])
def test_shards_go_to_shards(comm: Communicator, layout: str) -> None:
    """Four trainers; an engine of one worker and one of two. The bytes are those of the shards."""
    trainers = 4
    if comm.rank < trainers:
        weights = trainer_weights(1, comm.rank, trainers, layout)
        with WeightSender(comm, weights, bucket_bytes=4096) as sender:
            for version in (1, 2):
                weights.update(trainer_weights(version, comm.rank, trainers, layout))
                assert sender.update().version == version
        return
    engine = Engine(0, 1) if comm.rank == trainers else Engine(comm.rank - trainers - 1, 2)
    plan = LoadPlan(engine.load, on_meta())
    assert not plan.whole
    with WeightReceiver(comm, plan) as receiver:
        for version in (1, 2):
            update = receiver.update()
            assert update.bytes == plan.bytes
            engine.expect(version)


@pytest.mark.ranks(3)
def test_all_take_a_version_or_none(comm: Communicator) -> None:
    engine = Engine(0, 1)
    fails: list[int] = []

    def load(pairs: Pairs) -> None:
        engine.load(pairs)
        if fails and comm.rank == 2:
            raise MemoryError("no room")

    if comm.rank == 0:
        weights = checkpoint(1)
        with WeightSender(comm, weights) as sender:
            sender.update()
            weights.update(checkpoint(2))
            with pytest.raises(WeightUpdateError, match="no room"):
                sender.update()
            assert sender.update().version == 2
        return
    with WeightReceiver(comm, LoadPlan(load, on_meta())) as receiver:
        receiver.update()
        engine.expect(1)
        fails.append(1)
        with pytest.raises(WeightUpdateError, match="rank 2: MemoryError: no room"):
            receiver.update()
        assert receiver.version == 1
        engine.expect(1)
        fails.clear()
        receiver.update()
        assert receiver.version == 2
        engine.expect(2)


@pytest.mark.ranks(2)
def test_a_checkpoint_that_the_trainer_does_not_have(comm: Communicator) -> None:
    if comm.rank == 0:
        with pytest.raises(WeightMismatch, match=r"embed +bfloat16 \(50, 32\) +rank 1: float32"):
            WeightSender(comm, checkpoint(1, dtype=torch.bfloat16)).update()
    else:
        with pytest.raises(WeightMismatch):
            WeightReceiver(comm, LoadPlan(Engine(0, 1).load, on_meta())).update()


@pytest.mark.ranks(2)
def test_several_parts_of_a_tensor(comm: Communicator) -> None:
    whole = torch.arange(24.0).view(6, 4)
    if comm.rank == 0:
        parts = [WeightShard(whole[i : i + 2], (6, 4), (i, 0)) for i in (4, 0, 2)]
        WeightSender(comm, {"w": parts}, bucket_bytes=20).update()
    else:
        held = [WeightShard(torch.zeros(3, 2), (6, 4), at) for at in ((0, 2), (3, 0))]
        WeightReceiver(comm, {"w": held}).update()
        assert torch.equal(held[0].tensor, whole[:3, 2:])
        assert torch.equal(held[1].tensor, whole[3:, :2])
        twice = [WeightShard(torch.zeros(3, 2), (6, 4), (0, 0))] * 2
    wrong: Any = [] if comm.rank == 0 else twice
    endpoint = WeightSender if comm.rank == 0 else WeightReceiver
    with pytest.raises(WeightUpdateError, match=r"has no parts.*overlap"):
        endpoint(comm, {"w": wrong}).update()
