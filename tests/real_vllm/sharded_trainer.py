"""One of several trainers, each of which sends its shards: `sharded_trainer.py PORT LAYOUT URL...`.

`unisono run` starts them. FSDP2 shards the model, or its layers are split as in tensor and pipeline
parallelism; nobody gathers a tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import test_quantized
import torch
from models import make_model
from trainer import SEED
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)

import unisono
from unisono.training import WeightShard
from unisono.training.weights.vllm_plugin import ShardSource, UnisonoTrainerInitInfo, register

COLUMNS = ("o_proj.weight", "down_proj.weight")


class Pieces(ModuleSource):
    """Half of the layers on half of the ranks; of each tensor rows or columns."""

    def __init__(self, model: torch.nn.Module, rank: int, size: int) -> None:
        super().__init__(model)
        self.half, self.stage, self.place = size // 2, rank // (size // 2), rank % (size // 2)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._module.named_parameters():
            if self.stage == int("layers.1" in name or "lm_head" in name):
                dim = int(name.endswith(COLUMNS))
                part = tensor.detach().chunk(self.half, dim)[self.place].clone()
                begin = self.place * part.shape[dim]
                offset = tuple(begin if each == dim else 0 for each in range(tensor.dim()))
                yield name, WeightShard(part, tuple(tensor.shape), offset)


def main(port: str, layout: str, *engines: str) -> None:
    urls, sizes = zip(*(each.split("=") for each in engines), strict=True)
    comm = unisono.init()
    model = test_quantized.make_model(SEED) if layout == "int8_channels" else make_model(SEED)
    source: ModuleSource
    if layout == "tp x pp":
        source = Pieces(model, comm.rank, comm.size)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        source = ShardSource(model)
        if layout == "int8_channels":
            source = ShardSource(model, layout, test_quantized.is_quantized, group=comm)
    register()
    workers = [int(size) for size in sizes]
    info = UnisonoTrainerInitInfo(
        "127.0.0.1",
        int(port),
        comm.size + sum(workers),
        engine_sizes=workers,
        timeout_s=60.0,
        senders=comm.size,
        rank=comm.rank,
    )
    clients = [HTTPVLLMWeightSyncClient(url) for url in urls]
    engine = WeightTransferTrainerFactory.trainer_init(info, client=clients, source=source)
    update = engine.send_weights()
    sent = torch.tensor(update.bytes)
    comm.all_reduce(sent)
    if comm.rank == 0:
        print(f"sent {int(sent)} bytes", flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
