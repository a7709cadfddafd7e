"""Quantised weights in vLLM's engines, which are sent what their checkpoints have.

vLLM 0.32 serves two of the three forms on CPUs, with AMX: int8 per channel (compressed-tensors) and
fp8 in blocks. Its fp8 per tensor needs an operator that its builds for CPUs do not have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import NEW_TOKENS, PROMPTS, save_tokenizer
from servers import START_S, Server, environment, free_port
from trainer import SEED
from transformers import LlamaConfig, LlamaForCausalLM

from unisono.training import QuantizedWeights, WeightShard

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
FORMS: dict[str, dict[str, Any]] = {
    "fp8": _FP8,
    "fp8_blocks": _FP8 | {"weight_block_size": [128, 128]},
    "int8_channels": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "all": {
                "targets": ["Linear"],
                "weights": _INT8 | {"strategy": "channel", "dynamic": False},
                "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
            }
        },
    },
}


def make_model(seed: int) -> LlamaForCausalLM:
    """Of whole blocks of 128 x 128."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    return LlamaForCausalLM(config).bfloat16()


def is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def quantized(model: torch.nn.Module, form: Any) -> QuantizedWeights:
    return QuantizedWeights(dict(model.named_parameters()), form, is_quantized)


def save(folder: Path, model: LlamaForCausalLM, form: str) -> None:
    """A checkpoint of the quantised model."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    tensors = {
        name: (given.tensor if isinstance(given, WeightShard) else given.detach()).contiguous()
        for name, given in quantized(model, form)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": FORMS[form]}
    (folder / "config.json").write_text(json.dumps(config))


def start_engine(folder: Path) -> Any:
    import vllm
    from vllm.config import WeightTransferConfig

    return vllm.LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=128,
        seed=0,
        distributed_executor_backend="uni",
        weight_transfer_config=WeightTransferConfig(backend="unisono"),
    )


def tokens(engine: Any) -> list[list[int]]:
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    given = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = engine.generate(prompts, given, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs]


def served(engine: Any) -> dict[str, torch.Tensor]:
    """The bytes of all that the engine computes with, as its kernels have packed it."""
    found: dict[str, torch.Tensor] = {}

    def read(worker: Any) -> None:
        model = worker.weight_transfer_engine.model
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            found[name] = tensor.detach().clone().reshape(-1).view(torch.uint8)

    engine.collective_rpc(read)
    return found


def main(form: str, path: str) -> None:
    """An engine that is sent version 2 equals one that loads a checkpoint of it."""
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    from unisono import WeightUpdateError
    from unisono.training.weights.vllm_plugin import UnisonoTrainerInitInfo

    class Source(ModuleSource):
        def __iter__(self) -> Any:
            return iter(quantized(self._module, form))

    models = [make_model(seed) for seed in (1, 2)]
    for number, model in enumerate(models):
        save(Path(path, str(number)), model, form)
    fresh = start_engine(Path(path, "1"))
    expected, expected_tokens = served(fresh), tokens(fresh)
    engine = start_engine(Path(path, "0"))
    assert tokens(engine) != expected_tokens
    info = UnisonoTrainerInitInfo("127.0.0.1", free_port(), 2, timeout_s=60.0, rank=0)
    source = Source(models[1])
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=engine, source=source)

    def check() -> None:
        now = served(engine)
        assert now.keys() == expected.keys()
        assert all(torch.equal(now[name], each) for name, each in expected.items())
        assert tokens(engine) == expected_tokens

    for _ in range(2):
        trainer.send_weights()
        check()
    with torch.no_grad():
        models[0].model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    trainer.source = Source(models[0])
    try:
        trainer.send_weights()
    except (ValueError, WeightUpdateError) as error:
        print(f"REFUSED {error}", flush=True)
    check()
    trainer.source = source
    trainer.send_weights()
    check()
    print("SERVED", flush=True)
    os._exit(0)


def test_the_numbers_are_those_of_vllm() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    with set_current_vllm_config(VllmConfig()):
        whole = QuantFP8(static=False, group_shape=GroupShape.PER_TENSOR)
    quantizers = {
        ("fp8_blocks", "scale_inv"): per_block_cast_to_fp8,
        ("fp8", "scale"): whole.forward_native,
    }
    torch.manual_seed(0)
    for exponent in range(-2, 5):  # its own for activations has a least scale
        weight = (torch.randn(300, 384) * 10.0**exponent).bfloat16()
        for (form, suffix), quantizer in quantizers.items():
            values, scales = quantizer(weight)
            given: Any = form
            ours = {
                name: getattr(each, "tensor", each)
                for name, each in QuantizedWeights({"w": weight}, given, lambda _: True)
            }
            assert torch.equal(ours["w"].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(ours[f"w_{suffix}"].flatten(), scales.flatten())


HAS_AMX = torch.cpu._is_amx_tile_supported()


@pytest.mark.parametrize("form", FORMS if HAS_AMX else ["int8_channels"])
def test_what_is_sent_is_what_a_checkpoint_has(form: str, tmp_path: Path) -> None:
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    ended = subprocess.run(
        [sys.executable, __file__, form, str(tmp_path)],
        env=environment() | settings,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    said = ended.stdout + ended.stderr
    if form == "fp8":  # it cannot load its own checkpoint
        assert "static_scaled_fp8_quant() expected at most 0 argument(s)" in said, said[-3000:]
        return
    if not HAS_AMX:
        assert "they need a CPU with AMX" in said, said[-3000:]
        return
    assert ended.returncode == 0, said[-3000:]
    assert "SERVED" in ended.stdout
    assert "REFUSED" in ended.stdout
    assert "layers.1.mlp.up_proj.weight' has NaN or infinite elements" in ended.stdout


@pytest.mark.skipif(not HAS_AMX, reason="vLLM's int8 cannot be loaded anew without AMX")
def test_trainers_send_shards_quantised(tmp_path: Path) -> None:
    """Four trainers with FSDP2's shards, to one engine."""
    answers = []
    for seed in (SEED, 0):
        folder = tmp_path / str(seed)
        save(folder, make_model(seed), "int8_channels")
        save_tokenizer(folder)
        server = Server(folder, 1, tmp_path / f"{seed}.log", "--dtype", "bfloat16")
        try:
            server.wait()
            answers.append(server.answers())
            if seed == SEED:
                continue
            command = ["-m", "unisono", "run", "-n", "4", str(HERE / "sharded_trainer.py")]
            ended = subprocess.run(
                [sys.executable, *command, str(free_port()), "int8_channels", f"{server.url}=1"],
                capture_output=True,
                text=True,
                timeout=START_S,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
            answers.append(server.answers())
        finally:
            server.close()
    loaded, before, sent = answers
    assert sent == loaded != before


if __name__ == "__main__":
    main(*sys.argv[1:])
