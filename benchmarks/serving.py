"""vLLM on CPUs with unisono between its workers, and with vLLM's own kernel.

    build/real-vllm/bin/python benchmarks/serving.py                 two workers, tensor parallel
    build/real-vllm/bin/python benchmarks/serving.py --pipeline 2 --tensor 1
    build/real-vllm/bin/python benchmarks/serving.py --compiled --batch 8 --rounds 20
    build/real-vllm/bin/python benchmarks/serving.py --engines       what two of them agree on

A Llama of random weights generates greedily, in an engine with unisono and in one without, by
turns: the processes of the other one are stopped meanwhile. The tokens must be the same. Each
worker is bound to a core (VLLM_CPU_OMP_THREADS_BIND, which vLLM does by itself where it can), if
there are as many.

Without the compiler every turn generates once more, and notes each all_reduce, all_gather and
gather of the workers. "communication" is their time in a step, in the mean of the workers, in
microseconds, and "waiting" the part of it until the last worker had come to the call. From then on
a call takes the last worker "last" microseconds, and the others "others", which sleep or spin.

--engines calls what vLLM's data-parallel engines ask each other after every step, over the group
that vLLM makes of gloo and over the one that UNISONO_REPLACE=gloo makes of it, by turns in the same
two processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

KERNELS = ["unisono", "vLLM"]
SHARED_MEMORY = Path("/dev/shm")
CALLS = ("all_reduce", "all_gather", "gather")
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


def note_calls(worker: Any, is_on: bool) -> list[tuple[float, float]]:
    """In a worker: from now on note its tensor-parallel calls, or no longer; returns those noted,
    when each began and ended."""
    from vllm.distributed import get_tp_group

    group = get_tp_group().device_communicator
    if not is_on:
        for name, plain in group.plain.items():
            setattr(group, name, plain)
        noted: list[tuple[float, float]] = group.noted
        return noted
    group.noted, group.plain = [], {name: getattr(group, name) for name in CALLS}
    for name, plain in group.plain.items():

        def call(*arguments: Any, plain: Any = plain, **named: Any) -> Any:
            began_s = time.perf_counter()
            result = plain(*arguments, **named)
            group.noted.append((began_s, time.perf_counter()))
            return result

        setattr(group, name, call)
    return []


def serve(options: argparse.Namespace, model: str) -> None:
    """One engine; for each line of input it generates, and prints a line of JSON."""
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

    def generate() -> list[list[int]]:
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    generate()  # a first generation warms up
    print("RESULT {}", flush=True)
    for _ in sys.stdin:
        began_s = time.perf_counter()
        tokens = [generate()]
        pace = options.batch * options.tokens / (time.perf_counter() - began_s)
        result: dict[str, Any] = {"tokens/s": pace}
        if options.tensor > 1 and not options.compiled:
            engine.collective_rpc(note_calls, args=(True,))
            tokens.append(generate())
            result |= parts_us(engine.collective_rpc(note_calls, args=(False,)), options.tokens)
        print("RESULT " + json.dumps(result | {"tokens": tokens}), flush=True)


def parts_us(workers: list[list[tuple[float, float]]], steps: int) -> dict[str, float]:
    """Microseconds of the calls of all steps, in the mean of the workers."""
    spent_s = waiting_s = last_s = others_s = 0.0
    for calls in zip(*workers, strict=True):
        came_s = max(began_s for began_s, _ in calls)
        spent_s += sum(ended_s - began_s for began_s, ended_s in calls) / len(calls)
        waiting_s += sum(came_s - began_s for began_s, _ in calls) / len(calls)
        after_s = [ended_s - came_s for began_s, ended_s in calls if began_s == came_s]
        last_s += after_s[0]
        others_s += sum(ended_s - came_s for began_s, ended_s in calls if began_s < came_s)
    count = len(workers[0])
    return {
        "communication": 1e6 * spent_s / steps,
        "waiting": 1e6 * waiting_s / steps,
        "last": 1e6 * last_s / count,
        "others": 1e6 * others_s / count / (len(workers) - 1),
    }


class Engine:
    """An engine in a process of its own, whose processes are stopped while it is not asked."""

    def __init__(self, kernel: str, model: str, bind: str, arguments: list[str], log: Path) -> None:
        own = {
            "UNISONO_VLLM": str(int(kernel == KERNELS[0])),
            "VLLM_CPU_OMP_THREADS_BIND": bind,
        }
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--serve", model, *arguments],
                env=os.environ | SETTINGS | own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.result()

    def ask(self) -> dict[str, Any]:
        os.killpg(self.process.pid, signal.SIGCONT)
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self.result()

    def result(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if line.startswith("RESULT "):
                os.killpg(self.process.pid, signal.SIGSTOP)
                result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return result
        self.end()
        sys.exit("".join(said)[-3000:] + self.log.read_text()[-6000:] + "\nthe engine failed")

    def end(self) -> None:
        """Let it end by itself; what it then leaves of vLLM's own shared memory is removed."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            try:
                self.process.communicate(timeout=60)
            finally:
                os.killpg(self.process.pid, signal.SIGKILL)


def agree(rank: int, ports: list[int], rounds: int) -> None:
    """One of two engines: microseconds of `has_unfinished_dp` over each group."""
    import torch.distributed as dist
    from vllm.config import ParallelConfig
    from vllm.distributed import utils

    from unisono.serving.vllm_plugin import group_outside_the_world

    makers = {"gloo": utils.init_gloo_process_group, "unisono": group_outside_the_world}
    groups, taken_us = {}, {}
    for (name, make), port in zip(makers.items(), ports, strict=True):
        utils.init_gloo_process_group = make
        groups[name] = utils.stateless_init_torch_distributed_process_group(
            "127.0.0.1", port, rank, 2, "gloo"
        )
        taken_us[name] = [0.0] * rounds
    for turn in range(rounds):
        for name, group in groups.items():
            dist.barrier(group)
            began_s = time.perf_counter()
            for _ in range(200):
                ParallelConfig.has_unfinished_dp(group, False)
            taken_us[name][turn] = (time.perf_counter() - began_s) * 1e6 / 200
    if rank == 0:
        for name, each_us in taken_us.items():
            print(f"{name:>8} {statistics.median(each_us):8.1f} us to agree, of {rounds} turns")
    dist.barrier(groups["gloo"])


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


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
    parser.add_argument(
        "--nobind", action="store_true", help="leave it to the kernel where each runs"
    )
    parser.add_argument("--engines", action="store_true", help="only what engines agree on")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options, options.serve)
        return
    if options.engines:
        torch.multiprocessing.spawn(agree, (free_ports(2), options.rounds), 2)
        return
    with tempfile.TemporaryDirectory() as folder:
        workers, cores = options.tensor * options.pipeline, sorted(os.sched_getaffinity(0))
        bind = "|".join(map(str, cores[:workers]))
        if options.nobind or workers > len(cores):
            bind = "nobind"
        make_model(Path(folder), options.layers, options.hidden, options.experts)
        there = set(SHARED_MEMORY.glob("vllm_dist_*"))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        engines: dict[str, Engine] = {}
        turns = []
        try:
            for kernel in KERNELS:
                log = Path(folder, f"log {kernel}")
                engines[kernel] = Engine(kernel, folder, bind, sys.argv[1:], log)
            for turn in range(options.rounds):
                order = KERNELS[:: 1 if turn % 2 else -1]
                turns.append({kernel: engines[kernel].ask() for kernel in order})
        finally:
            for engine in engines.values():
                engine.end()
            for left in set(SHARED_MEMORY.glob("vllm_dist_*")) - there:
                left.unlink()
    names = [name for name in turns[0][KERNELS[0]] if name != "tokens"]
    print(f"{'median of ' + str(len(turns)):>16}" + "".join(f"{name:>15}" for name in names))
    for kernel in KERNELS:
        medians = [statistics.median(turn[kernel][name] for turn in turns) for name in names]
        print(f"{kernel:>16}" + "".join(f"{median:15,.1f}" for median in medians))
    ratios = [
        statistics.median(turn[KERNELS[0]][name] / turn[KERNELS[1]][name] for turn in turns)
        for name in names
    ]
    print(f"{'ratio of turns':>16}" + "".join(f"{ratio:15.2f}" for ratio in ratios))
    told = {
        json.dumps(tokens)
        for turn in turns
        for kernel in KERNELS
        for tokens in turn[kernel]["tokens"]
    }
    print("the same tokens" if len(told) == 1 else "DIFFERENT TOKENS")
    sys.exit(len(told) != 1)


if __name__ == "__main__":
    main()
