"""OpenRLHF's calls: the trainer announces each parameter to every engine, and broadcasts it to all.

The trainer is rank 0 of a group with all workers of all engines; engine i begins at rank
i x tensor_parallel_size + 1. Every engine gets the calls and passes each to its workers.

    python examples/weight_update/as_openrlhf.py [unisono|gloo]
"""

from __future__ import annotations

import sys

import torch
from engine import Engine, LetterModel, generate
from trainer import TEXT, free_port, train

from unisono.training import WeightUpdateGroup, init_weight_update_group

ENGINES, TENSOR_PARALLEL_SIZE = 2, 1
PROMPT = "the ranks "


def make_group(engines: list[Engine], backend: str) -> WeightUpdateGroup:
    """The group of the trainer and all workers, at an address that the trainer chooses."""
    address, port = "127.0.0.1", free_port()
    world_size = len(engines) * TENSOR_PARALLEL_SIZE + 1
    for number, engine in enumerate(engines):
        offset = number * TENSOR_PARALLEL_SIZE + 1
        where = (address, port, offset, world_size, "openrlhf", backend)
        engine.begin("init_weight_update_group", *where)
    group = init_weight_update_group(address, port, 0, world_size, "openrlhf", backend)
    for engine in engines:
        engine.results()
    return group


def broadcast_to_engines(
    model: torch.nn.Module, group: WeightUpdateGroup, engines: list[Engine]
) -> None:
    """Every parameter: tell all engines, broadcast, and wait until all have loaded it."""
    for name, parameter in model.named_parameters():
        for engine in engines:
            engine.begin("update_weight", name, parameter.dtype, parameter.shape)
        group.broadcast(parameter.data, src=0)
        for engine in engines:
            engine.results()


def main(backend: str = "auto") -> None:
    torch.set_num_threads(1)
    engines = [Engine(TENSOR_PARALLEL_SIZE) for _ in range(ENGINES)]
    try:
        model = LetterModel(seed=1)
        with make_group(engines, backend) as group:
            before = ""
            for steps in (3, 60):
                loss = train(model, steps)
                broadcast_to_engines(model, group, engines)
                expected = generate(model, PROMPT, 40)
                assert expected != before, "the training has changed nothing"
                for number, engine in enumerate(engines):
                    (before,) = engine.call("generate", PROMPT, 40)
                    assert before == expected, f"engine {number} serves other weights: {before!r}"
                print(f"loss {loss:.3f}, by {group.comm.backend}: {expected!r}")
        assert before == TEXT[: len(before)], "the engines have not learnt the text"
    finally:
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
