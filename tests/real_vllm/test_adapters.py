"""LoRA adapters in the slots of two vLLM engines, of one worker and of two."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_engines import Engine
from models import greedy, make_model, save, train
from safetensors.torch import save_file
from servers import Server, free_port
from trainer import connect
from transformers import LlamaForCausalLM

from unisono import WeightUpdateError

pytestmark = pytest.mark.vllm

SIZES = [1, 2]
RANK = 16
SLOTS: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}
CONFIG = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    torch.set_num_threads(1)  # OpenMP's threads would be missing in forked processes
    save(tmp_path / "model")
    started = [Engine(tmp_path, size, tmp_path / "model", **SLOTS) for size in SIZES]
    for engine in started:
        engine.wait()
    yield started
    for engine in started:
        engine.close()


def make_adapter(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """With the names of PEFT's files."""
    torch.manual_seed(seed)
    made = {}
    for name, weight in model.named_parameters():
        if name.split(".")[-2] in CONFIG["target_modules"]:
            rows, columns = weight.shape
            at = f"base_model.model.{name.removesuffix('.weight')}"
            made[f"{at}.lora_A.weight"] = torch.randn(RANK, columns) / 8
            made[f"{at}.lora_B.weight"] = torch.randn(rows, RANK) / 8
    return made


def save_adapter(folder: Path, adapter: dict[str, torch.Tensor]) -> str:
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"peft_type": "LORA"}))
    return str(folder)


def test_all_engines_or_none_have_an_adapter(engines: list[Engine], tmp_path: Path) -> None:
    model = make_model(0)
    base = greedy(model)
    trainer = connect(engines, free_port(), SIZES, model)
    adapters = [make_adapter(model, seed) for seed in range(4)]
    paths = [save_adapter(tmp_path / str(seed), each) for seed, each in enumerate(adapters)]
    expected = [engines[0].answers(100 + seed, path) for seed, path in enumerate(paths)]
    assert len({json.dumps(each) for each in [base, *expected]}) == 5

    def check(number: int, seed: int) -> None:
        for engine in engines:
            assert engine.answers(number) == expected[seed]
            assert engine.answers() == base

    assert trainer.send_adapter(1, adapters[0], CONFIG).version == 1
    check(1, 0)
    assert trainer.send_adapter(1, adapters[1], CONFIG).version == 2  # in its place
    check(1, 1)
    assert trainer.send_adapter(2, adapters[2], CONFIG).version == 3
    check(2, 2)
    check(1, 1)
    trainer.send_adapter(3, adapters[3], CONFIG)  # there are two slots: vLLM's oldest one goes
    check(3, 3)

    wrong = dict(adapters[0])
    wrong["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.ones(RANK, 128)
    for tensors, config, why in [
        (wrong, CONFIG, "no modules model.layers.9.mlp.up_proj"),
        (adapters[0], CONFIG | {"r": 64}, "greater than max_lora_rank"),
        (adapters[0], {"r": RANK}, "Missing required configuration"),
    ]:
        with pytest.raises(WeightUpdateError, match=why) as caught:
            trainer.send_adapter(3, tensors, config)
        assert not caught.value.committed
        assert not caught.value.group_ended
        check(3, 3)
    took = [trainer.send_adapter(3, adapters[0], CONFIG).seconds for _ in range(9)]
    print(f"an adapter: {1e3 * statistics.median(took):.1f} ms")
    check(3, 0)
    trainer.shutdown()


def merge(model: LlamaForCausalLM, adapter: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    """A model whose weights have the adapter added."""
    merged = make_model(0)
    merged.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, weight in merged.named_parameters():
            at = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{at}.lora_A.weight" in adapter:
                weight += 2 * adapter[f"{at}.lora_B.weight"] @ adapter[f"{at}.lora_A.weight"]
    return merged


def test_base_weights_beside_adapters(engines: list[Engine]) -> None:
    model = make_model(0)
    adapter = make_adapter(model, 1)
    trainer = connect(engines, free_port(), SIZES, model)
    trainer.send_adapter(1, adapter, CONFIG)
    train(model)
    trainer.send_weights()
    for engine in engines:
        assert engine.answers() == greedy(model)
        assert engine.ask(0, "adapters") == []  # vLLM forgets all of them
    trainer.send_adapter(1, adapter, CONFIG)
    merged = merge(model, adapter)
    for engine in engines:
        assert engine.answers(1) == greedy(merged)
    trainer.shutdown()


def test_a_server_replaces_the_adapter_that_it_was_started_with(tmp_path: Path) -> None:
    save(tmp_path / "model")
    model = make_model(0)
    first, second = (make_adapter(model, seed) for seed in (1, 2))
    path = save_adapter(tmp_path / "first", first)
    options = ["--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"policy={path}"]
    server = Server(tmp_path / "model", 1, tmp_path / "server.log", *options)
    try:
        server.wait()
        assert server.answers(model="policy") == greedy(merge(model, first))
        trainer = connect([server.url], free_port(), [1], model)
        trainer.send_adapter(1, second, CONFIG)
        assert server.answers(model="policy") == greedy(merge(model, second))
        assert server.answers() == greedy(model)
        trainer.shutdown()
    finally:
        server.close()
