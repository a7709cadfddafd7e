"""Whether the sanitizer raises false alarms: correct programs of many kinds, on gloo and unisono.

    python benchmarks/sanitizer_alarms.py [--busy N] [--backend gloo] [NAME ...]

Runs under `unisono run --sanitize`: the examples, the trainers and the grids of ranks of
tests/real, and small models in torch's own forms of parallelism; DeepSpeed, Accelerate,
transformers and Lightning if they are installed. It prints proofs, which are false, and hints, and
fails if there is a proof or if a program fails. `--busy` starts as many processes that only
compute.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from unisono import watch

ROOT = Path(__file__).parents[1]
BACKENDS = ("unisono", "gloo")
RANKS, STEPS = 4, 6
START_THEMSELVES = {"replicas", "survive"}
LONGEST_S = 300
PROOFS = ("settings", "drift", "reduced", "race", "sampler")

# -- what ranks run --------------------------------------------------------------------------------


def seed_apart() -> None:
    torch.manual_seed(100 + dist.get_rank())


def blocks() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))


def train(model: Any, optimizer: Any, clip: bool = True) -> None:
    seed_apart()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().sum().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def fully_sharded(*shape: int) -> None:
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = blocks()
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def first_fsdp() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for original in (True, False):
        model = FullyShardedDataParallel(
            blocks(), device_id=torch.device("cpu"), use_orig_params=original
        )
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), clip=False)


def tensor_parallel(shards_data: bool) -> None:
    """Two by two, with sequence parallelism; DDP or FSDP2 in the other dimension."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=torch.distributed.tensor.Shard(1)),
        "3": RowwiseParallel(),
    }
    model: Any = parallelize_module(plain, mesh["tp"], plan)
    if shards_data:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for step in range(STEPS):
        torch.manual_seed(step + (100 * mesh["dp"].get_local_rank() if shards_data else 0))
        optimizer.zero_grad()
        model(torch.randn(2, 8, 16)).square().sum().backward()
        optimizer.step()


def pipeline(tied: bool) -> None:
    """Two stages by two replicas. Tied: both ends have the embedding, whose gradients they add."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    stage = mesh["pp"].get_local_rank()
    torch.manual_seed(0)
    embedding, middle = nn.Embedding(32, 16), blocks()
    head = nn.Linear(16, 32, bias=False)
    if tied:
        head.weight = embedding.weight
    part = nn.Sequential(embedding, middle) if stage == 0 else nn.Sequential(middle, head)
    made = PipelineStage(part, stage, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(
        made, 2, lambda out, goal: nn.functional.cross_entropy(out.flatten(0, 1), goal.flatten())
    )
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        tokens = torch.randint(32, (4, 8))
        schedule.step(
            *([tokens] if stage == 0 else []), **({} if stage == 0 else {"target": tokens})
        )
        if tied:
            dist.all_reduce(embedding.weight.grad, group=mesh["pp"].get_group())
        for parameter in part.parameters():
            dist.all_reduce(parameter.grad, group=mesh["dp"].get_group())
            parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()


class Experts(nn.Module):
    """One expert on each rank; tokens travel there and back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens: Any) -> Any:
        from torch.distributed.nn.functional import all_to_all_single

        mixed = self.gate(tokens)
        there = all_to_all_single(torch.empty_like(mixed), mixed)
        return mixed + all_to_all_single(torch.empty_like(there), self.expert(there))


def experts(with_ddp: bool) -> None:
    """The experts start alike; DDP ignores them, or the program averages the rest by itself."""
    torch.manual_seed(0)
    model: Any = Experts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if with_ddp:
        names = {name for name, _ in model.named_parameters() if name.startswith("expert")}
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, names
        )
        model = nn.parallel.DistributedDataParallel(model)
    seed_apart()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().sum().backward()
        for parameter in () if with_ddp else model.gate.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= RANKS
        optimizer.step()


def tied(sharded: bool) -> None:
    """The head has the embedding's weight."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, False))
    model[2].weight = model[0].weight
    model = fully_shard(model) if sharded else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seed_apart()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randint(32, (4, 8))).logsumexp(-1).sum().backward()
        optimizer.step()


def deepspeed(stage: int, dtype: str = "fp32") -> None:
    import deepspeed as library

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bf16"},
    }
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = library.initialize(model=model, optimizer=optimizer, config=config)
    seed_apart()
    for _ in range(2 * STEPS):
        x = torch.randn(4, 16, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
        engine.backward(engine(x).square().sum())
        engine.step()


FORMS: dict[str, Callable[[], None]] = {
    "FSDP2": lambda: fully_sharded(4),
    "HSDP": lambda: fully_sharded(2, 2),
    "FSDP1": first_fsdp,
    "TP with sequence parallelism": lambda: tensor_parallel(False),
    "TP with sequence parallelism, FSDP2": lambda: tensor_parallel(True),
    "PP": lambda: pipeline(False),
    "PP, tied embeddings": lambda: pipeline(True),
    "MoE": lambda: experts(False),
    "MoE, DDP": lambda: experts(True),
    "tied embeddings, DDP": lambda: tied(False),
    "tied embeddings, FSDP2": lambda: tied(True),
}
DEEPSPEED: dict[str, Callable[[], None]] = {
    "DeepSpeed 1": lambda: deepspeed(1),
    "DeepSpeed 1, bf16": lambda: deepspeed(1, "bf16"),
    "DeepSpeed 2": lambda: deepspeed(2),
    "DeepSpeed 3": lambda: deepspeed(3),
}
TRAINERS = {
    "accelerate": "accelerate",
    "transformers": "transformers",
    "lightning": "lightning",
    "fabric": "lightning",
}
"""Of tests/real/trainers.py, and what they need."""


def be_rank(name: str, backend: str) -> None:
    """Run one program on this rank."""
    sys.path[0] = str(ROOT / "tests" / "real")  # instead of our folder, which has a deepspeed.py
    dist.init_process_group(backend)
    if name in TRAINERS:
        from trainers import RUNS, Clock  # type: ignore[import-not-found]

        RUNS[name](backend, STEPS, Clock())
    elif name in FORMS | DEEPSPEED:
        (FORMS | DEEPSPEED)[name]()
    else:
        from gpt import PROGRAMS  # type: ignore[import-not-found]

        program = PROGRAMS[name](backend)
        for step in range(STEPS):
            program.step(step)
    if dist.is_initialized():
        dist.destroy_process_group()


# -- who starts them -------------------------------------------------------------------------------


def programs() -> Iterator[tuple[str, list[str], int]]:
    """Their names, what follows `unisono run`, and how many ranks they have."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        if path.stem not in START_THEMSELVES:
            yield f"examples/{path.stem}", [str(path)], RANKS
    yield "examples/parallel_gpt", [str(ROOT / "examples/parallel_gpt/train.py")], RANKS
    sys.path.insert(0, str(ROOT / "tests" / "real"))
    from gpt import PROGRAMS

    needed = {**dict.fromkeys((*FORMS, *PROGRAMS), "torch"), **TRAINERS}
    for name, package in (needed | dict.fromkeys(DEEPSPEED, "deepspeed")).items():
        if importlib.util.find_spec(package) is None:
            print(f"not run: {name}: {package} is not installed")
        else:
            yield name, [__file__, "--rank", name], RANKS


def run(arguments: list[str], ranks: int, backend: str) -> tuple[int, list[watch.Report], str]:
    """The exit code, the findings, and the end of what was said."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "unisono", "run", "--sanitize", "-n", str(ranks)]
        more = {"UNISONO_WATCH_FOLDER": folder, "UNISONO_BACKEND": backend, "OMP_NUM_THREADS": "1"}
        more |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1"}
        is_ours = arguments[0] == __file__
        done = subprocess.run(
            [*command, *arguments, *(["--backend", backend] if is_ours else [])],
            env=os.environ | more,
            capture_output=True,
            text=True,
            timeout=LONGEST_S,
        )
        reports = [watch.load(file) for file in sorted(Path(folder).glob("seen-*.json"))]
    return done.returncode, reports, done.stdout[-500:] + done.stderr[-3000:]


def compute() -> None:
    while True:
        pass


def main() -> None:
    """Run them; print what was found, and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--backend", choices=BACKENDS, action="append")
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        be_rank(given.rank, given.backend[0])
        return
    busy = [multiprocessing.Process(target=compute, daemon=True) for _ in range(given.busy)]
    for process in busy:
        process.start()
    counts: Counter[str] = Counter()
    for name, arguments, ranks in programs():
        if given.names and not any(name.startswith(wanted) for wanted in given.names):
            continue
        for backend in given.backend or BACKENDS:
            begun_s = time.monotonic()
            code, reports, said = run(arguments, ranks, backend)
            hints = [report for report in reports if report.kind == "hint"]
            proofs = [report for report in reports if report.kind in PROOFS]
            counts.update(runs=1, proofs=len(proofs), hints=len(hints), failures=code not in (0, 3))
            took_s = time.monotonic() - begun_s
            print(f"{name} on {backend}: {took_s:.0f} s, exit code {code}", flush=True)
            for report in (*proofs, *hints):
                print(f"    {report}".replace("\n", "\n    "), flush=True)
            if code not in (0, 3):
                print(said, flush=True)
    for process in busy:
        process.terminate()
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    sys.exit(bool(counts["proofs"] + counts["failures"]))


if __name__ == "__main__":
    main()
