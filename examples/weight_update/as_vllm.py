"""vLLM's calls: `collective_rpc` calls a method of the extension on each worker of an engine.

One engine of two workers, each with its half of the output: `load_weights` gets whole tensors and
keeps its part.

    python examples/weight_update/as_vllm.py [unisono|gloo]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from engine import Engine, LetterModel, generate
from trainer import TEXT, free_port, train

from unisono.training import WeightUpdateGroup, init_weight_update_group

WORKERS = 2
PROMPT = "and nobody "


class LLM:
    """vLLM's names for what this example needs."""

    def __init__(self, tensor_parallel_size: int) -> None:
        self.engine = Engine(tensor_parallel_size)

    def generate(self, prompt: str, letters: int) -> str:
        """The text of the first worker; all have the same."""
        return str(self.engine.call("generate", prompt, letters)[0])


def update(
    parameters: Iterable[tuple[str, torch.Tensor]], group: WeightUpdateGroup, llm: LLM
) -> None:
    for name, parameter in parameters:
        type_name = str(parameter.dtype).removeprefix("torch.")
        llm.engine.begin("update_weight", name, type_name, tuple(parameter.shape))
        group.broadcast(parameter, src=0)
        llm.engine.results()


def main(backend: str = "auto") -> None:
    torch.set_num_threads(1)
    llm = LLM(tensor_parallel_size=WORKERS)
    try:
        address, port = "127.0.0.1", free_port()
        how = (WORKERS + 1, "vllm", backend)
        llm.engine.begin("init_weight_update_group", address, port, 1, *how)
        group = init_weight_update_group(address, port, 0, *how)
        llm.engine.results()
        with group:
            before = llm.generate(PROMPT, 30)
            model = LetterModel(seed=1)
            loss = train(model, 80)
            update(model.named_parameters(), group, llm)
            after, expected = llm.generate(PROMPT, 30), generate(model, PROMPT, 30)
            assert before != after == expected, f"the engine serves other weights: {after!r}"
            assert after in TEXT, f"the model has not learnt the text: {after!r}"
            print(f"loss {loss:.3f}, by {group.comm.backend}: {after!r}")
    finally:
        llm.engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
