"""vLLM on CPUs with unisono between its workers, and with vLLM's own kernel.

    build/real-vllm/bin/python benchmarks/serving.py                 two workers, tensor parallel
    build/real-vllm/bin/python benchmarks/serving.py --pipeline 2 --tensor 1
    build/real-vllm/bin/python benchmarks/serving.py --compiled --batch 8 --turns 5

Each turn starts one engine of each kind, one after the other, in an order that alternates. A Llama
of random weights generates greedily; the tokens of all engines must be the same. "tokens/s" is the
median over turns of the best of a few generations. "communication" is the time that a worker spent
in all_reduce per step, counted in one more generation, without the compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROUNDS = 4


def make_model(folder: Path, layers: int, hidden: int, experts: int) -> None:
    """A model of random weights as vLLM loads it."""
    import torch
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


def count_all_reduces(worker: Any) -> None:
    """In a worker: measure every all_reduce from now on."""
    from vllm.distributed import get_tp_group

    group = get_tp_group().device_communicator
    plain, group.spent_s, group.calls = group.all_reduce, 0.0, 0

    def measured(tensor: Any) -> Any:
        began = time.perf_counter()
        result = plain(tensor)
        group.spent_s += time.perf_counter() - began
        group.calls += 1
        return result

    group.all_reduce = measured


def counted(worker: Any) -> tuple[float, int, str]:
    """In a worker: seconds, calls, and what makes them."""
    from vllm.distributed import get_tp_group

    group = get_tp_group().device_communicator
    return group.spent_s, group.calls, type(group).__name__


def serve(options: argparse.Namespace, model: str) -> None:
    """One engine; prints a line of JSON."""
    import vllm

    engine = vllm.LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=not options.compiled,
        dtype="float32",
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
    paces, tokens = [], None
    for _ in range(ROUNDS):
        began = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        paces.append(options.batch * options.tokens / (time.perf_counter() - began))
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
    result: dict[str, Any] = {"tokens": tokens, "tokens_per_s": max(paces[1:])}
    if options.tensor > 1 and not options.compiled:
        engine.collective_rpc(count_all_reduces)
        engine.generate(prompts, sampling, use_tqdm=False)
        seconds, calls, kind = engine.collective_rpc(counted)[0]
        result |= {"us_per_step": 1e6 * seconds / options.tokens, "calls": calls, "kind": kind}
    print("RESULT " + json.dumps(result), flush=True)


def run_engine(with_unisono: bool, model: str, arguments: list[str]) -> dict[str, Any]:
    """Start an engine in a process of its own."""
    environment = os.environ | {
        "UNISONO_VLLM": "1" if with_unisono else "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
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
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options, options.serve)
        return
    results: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.layers, options.hidden, options.experts)
        for turn in range(options.turns):
            for ours in (turn % 2 == 0, turn % 2 != 0):
                results[ours].append(run_engine(ours, folder, sys.argv[1:]))
    same = len({json.dumps(r["tokens"]) for rows in results.values() for r in rows}) == 1
    for ours, rows in results.items():
        pace = statistics.median(row["tokens_per_s"] for row in rows)
        spent = statistics.median(row.get("us_per_step", 0.0) for row in rows)
        kind = rows[0].get("kind", "unisono" if ours else "vLLM")
        print(f"{kind:>24} {pace:9.1f} tokens/s, communication {spent:8.0f} us a step")
    print("the same tokens" if same else "DIFFERENT TOKENS")
    sys.exit(not same)


if __name__ == "__main__":
    main()
