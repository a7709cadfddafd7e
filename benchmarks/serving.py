"""vLLM on CPUs with unisono between its workers, and with vLLM's own kernel.

    build/real-vllm/bin/python benchmarks/serving.py                 two workers, tensor parallel
    build/real-vllm/bin/python benchmarks/serving.py --pipeline 2 --tensor 1
    build/real-vllm/bin/python benchmarks/serving.py --compiled --batch 8 --rounds 20

A Llama of random weights generates greedily, in an engine with unisono and in one without; the
tokens must be the same. Without the compiler, the first engine also calls vLLM's kernel, by turns:
compare the two in its rows. "communication" is the mean over workers of the time in all_reduce and
all_gather.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

KERNELS = ["unisono", "vLLM"]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def make_model(folder: Path, layers: int, hidden: int, experts: int) -> None:
    """A model of random weights as vLLM loads it."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    heads = max(4, hidden // 64)
    sizes: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if experts:
        config = MixtralConfig(**sizes, num_local_experts=experts, num_experts_per_tok=2)
        MixtralForCausalLM(config).float().save_pretrained(folder)
    else:
        LlamaForCausalLM(LlamaConfig(**sizes)).float().save_pretrained(folder)


def choose(worker: Any, kernel: str, is_measured: bool) -> None:
    """In a worker: from now on the tensor-parallel group calls this kernel."""
    from vllm.distributed import get_tp_group
    from vllm.distributed.device_communicators import cpu_communicator

    group = get_tp_group().device_communicator
    group.spent_s = 0.0
    if group.dist_module is torch.distributed:
        group.dist_module = cpu_communicator._CPUSHMDistributed(group)
    owner = type(group) if kernel == "unisono" else cpu_communicator.CpuCommunicator
    for name in ("all_reduce", "all_gather"):
        plain = functools.partial(getattr(owner, name), group)

        def measured(*arguments: Any, plain: Any = plain) -> Any:
            began = time.perf_counter()
            result = plain(*arguments)
            group.spent_s += time.perf_counter() - began
            return result

        setattr(group, name, measured if is_measured else plain)


def spent_s(worker: Any) -> float:
    """In a worker: the time in these calls since `choose`."""
    from vllm.distributed import get_tp_group

    spent: float = get_tp_group().device_communicator.spent_s
    return spent


def serve(options: argparse.Namespace, model: str) -> None:
    """One engine; prints a line of JSON."""
    import vllm

    engine = vllm.LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=not options.compiled,
        dtype=options.dtype,
        max_model_len=128,
        tensor_parallel_size=options.tensor,
        pipeline_parallel_size=options.pipeline,
        enable_expert_parallel=options.experts > 0,
        distributed_executor_backend="mp",
    )
    prompts = [{"prompt_token_ids": [7 + i, 9, 11, 3 + i]} for i in range(options.batch)]
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=options.tokens, ignore_eos=True, detokenize=False
    )
    paces: dict[str, list[float]] = {}
    spent: dict[str, list[float]] = {}
    tokens: set[str] = set()

    def generate(kernel: str) -> None:
        began = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        pace = options.batch * options.tokens / (time.perf_counter() - began)
        paces.setdefault(kernel, []).append(pace)
        tokens.add(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))

    mine = "unisono" if os.environ["UNISONO_VLLM"] == "1" else "vLLM"
    by_turns = mine == "unisono" and options.tensor > 1 and not options.compiled
    for turn in range(options.rounds + 1):
        for kernel in KERNELS[:: 1 if turn % 2 else -1] if by_turns else [mine]:
            if by_turns:
                engine.collective_rpc(choose, args=(kernel, False))
            generate(kernel)
            if not turn:
                paces.clear()  # a first generation warms up
            if by_turns:
                engine.collective_rpc(choose, args=(kernel, True))
                outputs = engine.generate(prompts, sampling, use_tqdm=False)
                tokens.add(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
                each = [1e6 * s / options.tokens for s in engine.collective_rpc(spent_s)]
                spent.setdefault(kernel, []).append(statistics.mean(each))
    result = {"tokens": sorted(tokens), "tokens_per_s": paces, "us_per_step": spent}
    print("RESULT " + json.dumps(result), flush=True)


def run_engine(with_unisono: bool, model: str, arguments: list[str]) -> dict[str, Any]:
    """Start an engine in a process of its own."""
    environment = os.environ | SETTINGS | {"UNISONO_VLLM": "1" if with_unisono else "0"}
    command = [sys.executable, __file__, "--serve", model, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("RESULT ")]
    if ended.returncode or not lines:
        sys.exit(f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}\nthe engine failed")
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def main() -> None:
    summary, _, text = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensor", type=int, default=2)
    parser.add_argument("--pipeline", type=int, default=1)
    parser.add_argument("--experts", type=int, default=0, help="a Mixtral, with expert parallelism")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--dtype", default="float32", help="bfloat16, say; default: float32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options, options.serve)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.layers, options.hidden, options.experts)
        results = [run_engine(ours, folder, sys.argv[1:]) for ours in (True, False)]
    for result in results:
        for kernel, paces in result["tokens_per_s"].items():
            spent = result["us_per_step"].get(kernel)
            print(
                f"{kernel:>8} {statistics.median(paces):9.1f} tokens/s, at best {max(paces):9.1f}",
                f"communication {statistics.median(spent):8.0f} us a step" if spent else "",
            )
        print()
    same = len({tokens for result in results for tokens in result["tokens"]}) == 1
    print("the same tokens" if same else "DIFFERENT TOKENS")
    sys.exit(not same)


if __name__ == "__main__":
    main()
