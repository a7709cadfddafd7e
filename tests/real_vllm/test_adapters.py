"""Adapters in a real engine of vLLM: a version of their own, beside base weights that stay."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import greedy, save
from safetensors.torch import save_file
from servers import Server, free_port
from trainer import connect

from unisono import WeightUpdateError

pytestmark = pytest.mark.vllm

RANK, ALPHA = 4, 8
CONFIG = {"r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def adapter(model: Any, seed: int, size: float = 0.3) -> dict[str, torch.Tensor]:
    """Tensors as in peft's files."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, module in model.named_modules():
        if name.endswith(tuple(CONFIG["target_modules"])):  # type: ignore[arg-type]
            rows, columns = module.weight.shape
            for kind, shape in {"A": (RANK, columns), "B": (rows, RANK)}.items():
                key = f"base_model.model.{name}.lora_{kind}.weight"
                made[key] = torch.randn(shape, generator=generator) * size
    return made


def merged(model: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The model with the adapter in its weights."""
    changed = copy.deepcopy(model)
    for name, module in changed.named_modules():
        key = f"base_model.model.{name}.lora_"
        if f"{key}A.weight" in tensors:
            product = tensors[f"{key}B.weight"] @ tensors[f"{key}A.weight"]
            module.weight.data += product * ALPHA / RANK
    return changed


def test_an_adapter_is_replaced(tmp_path: Path) -> None:
    model = save(tmp_path)
    first = tmp_path / "adapter"
    first.mkdir()
    save_file(adapter(model, 0, 0.0), first / "adapter_model.safetensors")
    config = CONFIG | {"peft_type": "LORA", "bias": "none"}
    (first / "adapter_config.json").write_text(json.dumps(config))
    options = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"mine={first}"]
    server = Server(tmp_path, 2, tmp_path / "server.log", *options)
    try:
        server.wait()
        base = greedy(model)
        assert server.answers(model="mine") == base
        engine = connect([server.url], free_port(), [2], model)
        for version in (1, 2):
            tensors = adapter(model, version)
            expected = greedy(merged(model, tensors))
            assert expected != base
            assert engine.send_adapter(1, CONFIG, tensors).version == version
            assert server.answers(model="mine") == expected
            assert server.answers() == base
        wrong = adapter(model, 3)
        unfit = wrong | {next(iter(wrong)): torch.ones(RANK, 5)}
        unknown = {
            f"base_model.model.model.layers.9.mlp.down_proj.lora_{k}.weight": torch.ones(4, 4)
            for k in "AB"
        }
        for number, given, why in (
            (1, unfit, "expand"),
            (1, wrong | unknown, "the model takes no adapter for model.layers.9"),
            (2, wrong, "all 1 places for adapters are taken"),
        ):
            with pytest.raises(WeightUpdateError, match=why) as caught:
                engine.send_adapter(number, CONFIG, given)
            assert not caught.value.group_ended
            assert server.answers(model="mine") == expected
        assert engine.send_adapter(1, CONFIG, wrong).version == 3
        assert server.answers(model="mine") == greedy(merged(model, wrong))
        engine.shutdown()
    finally:
        server.close()
