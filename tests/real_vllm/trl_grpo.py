"""GRPO with TRL's own trainer and a server of vLLM: `trl_grpo.py URL PORT FOLDER HOW`.

Weights go to the server by the client of docs/weights-in-frameworks.md, or in the reference by the
checkpoint in FOLDER, which the server loads again. It prints what each step generated."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from models import make_model
from safetensors.torch import save_file
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

STEPS = 4


class Reloading(vllm_generation.VLLMClient):  # type: ignore[misc]
    """Weights by way of a checkpoint."""

    folder: Path

    def init_communicator(self, device: Any = 0) -> None:
        pass

    def update_named_params(
        self, metadata: Any, named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in named_params}
        save_file(tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        self._post(f"{self.base_url}/collective_rpc", json={"method": "reload_weights"})


def main(url: str, port: str, folder: str, how: str) -> None:
    if how == "checkpoint":
        Reloading.folder = Path(folder)
        vllm_generation.VLLMClient = Reloading
    else:
        import client_of_the_page  # noqa: F401
    told = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        """More for small tokens."""
        rewards = [sum(token < 256 for token in tokens) / 16 for tokens in completion_ids]
        told.append((completion_ids, rewards))
        return rewards

    torch.set_num_threads(1)
    options = GRPOConfig(
        output_dir=f"{folder}/trainer",
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_group_port=int(port),
        generation_kwargs={"seed": 1},
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=16,
        max_steps=STEPS,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=make_model(3),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_list([{"prompt": f"w{token}"} for token in range(7, 7 + STEPS)]),
    )
    trainer.train()
    print(f"TOLD {json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
