"""A trainer in its own process, which kills itself: `trainer.py PORT WHEN URL...`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from models import make_model, train
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ModuleSource,
    WeightTransferTrainerFactory,
)

from unisono.training.weights.vllm_plugin import UnisonoTrainerInitInfo, register

SEED = 5


def connect(engines: Any, port: int, sizes: list[int], model: Any, limit_s: float = 60.0) -> Any:
    """The trainer's side of engines of these sizes; they are clients, or URLs of servers."""
    register()  # vLLM's own processes do so by themselves
    info = UnisonoTrainerInitInfo(
        "127.0.0.1", port, 1 + sum(sizes), engine_sizes=sizes, timeout_s=limit_s, rank=0
    )
    clients = [
        HTTPVLLMWeightSyncClient(each) if isinstance(each, str) else each for each in engines
    ]
    source = ModuleSource(model)
    return WeightTransferTrainerFactory.trainer_init(info, client=clients, source=source)


def sent_by_the_trainer() -> Any:
    """The weights that the trainer of this file would send."""
    model = make_model(SEED)
    train(model)
    return model


def end(*_: Any) -> None:
    print("the trainer ends", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def main(port: str, when: str, *engines: str) -> None:
    urls, sizes = zip(*(each.split("=") for each in engines), strict=True)
    model = sent_by_the_trainer()
    engine = connect(list(urls), int(port), [int(size) for size in sizes], model)
    if when == "while it sends":
        engine._sender._progress = end
    else:  # after the vote
        for client in engine._clients:
            client.finish_weight_update = end
    engine.send_weights()


if __name__ == "__main__":
    main(*sys.argv[1:])
