"""Train a small GPT on Shakespeare's sonnets, split over ranks in any combination of five ways.

    python examples/parallel_gpt/train.py
    unisono run -n 4 examples/parallel_gpt/train.py --tp 2 --pp 2
    unisono run -n 8 examples/parallel_gpt/train.py --tp 2 --cp 2 --dp 2 --backend gloo
    unisono run -n 4 examples/parallel_gpt/train.py --experts 8 --ep 2
    unisono run -n 4 examples/parallel_gpt/train.py --cp 4 --ulysses 2 --steps 5 --compare
    unisono run -n 4 examples/parallel_gpt/train.py --tp 4 --shards 4 --steps 5 --compare

tp splits heads and inner layers, cp the sequence, pp the layers, dp the batch, ep the experts and
the batch. In every layout the losses are those of one process, up to rounding:
--compare also trains on rank 0 alone, and fails if they differ. With --shards they have the same
bits at any tp, if every process has one thread.

sonnets.txt has 22 of the 154 sonnets, from Project Gutenberg's e-text 1041, which is in the public
domain.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from pipeline import Pipeline

import unisono
from model import Config, Sequence, Stage
from unisono import ProcessGroupManager
from unisono.training import GradientSync

TEXT = Path(__file__).with_name("sonnets.txt")


def batches(config: Config, device: torch.device) -> Iterator[torch.Tensor]:
    """Whole batches of characters, each row one longer than its inputs; the same on all ranks."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        begins = torch.randint(
            len(text) - config.positions - 1, (config.batch,), generator=generator
        )
        rows = [text[begin : begin + config.positions + 1] for begin in begins.tolist()]
        yield torch.stack(rows).to(device)


def train(
    config: Config,
    manager: ProcessGroupManager,
    steps: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Iterator[float]:
    """The loss of each step, the same on every rank."""
    config.check(manager)
    like = torch.empty(0, dtype=dtype, device=device)
    sequence = Sequence(config, manager.cp)
    stage = Stage(config, manager, sequence, like)
    experts = stage.expert_parameters()
    is_expert = set(map(id, experts))
    others = [parameter for parameter in stage.parameters() if id(parameter) not in is_expert]
    data = manager.along("cp", "dp", "ep").comm  # ranks with different tokens
    syncs = [GradientSync(others, data)]
    if experts:
        syncs.append(GradientSync(experts, manager.cp_dp))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / config.warm_up, 1, config.warm_up)
    pipeline = Pipeline(stage, syncs, manager.pp, like)
    for _, batch in zip(range(steps), batches(config, like.device), strict=False):
        mine = batch.chunk(manager.dp_world_size)[manager.dp_rank]
        inputs, targets = (
            [
                part.chunk(manager.ep_world_size)[manager.ep_rank]
                for part in tokens[:, sequence.positions].chunk(config.micro_batches)
            ]
            for tokens in (mine[:, :-1], mine[:, 1:])
        )
        local = pipeline.step(inputs, targets, config.width)
        loss = torch.tensor([local], dtype=torch.float64, device=like.device)
        manager.pp.broadcast(loss, manager.pp.size - 1)
        data.all_reduce(loss, "mean")
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield float(loss)


def main() -> None:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for axis in ("tp", "cp", "pp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--dp", type=int, help="default: the remaining ranks")
    parser.add_argument("--experts", type=int, default=0, help="networks per layer; 0: one for all")
    parser.add_argument("--ulysses", type=int, default=1, help="ranks of cp that share heads")
    parser.add_argument("--shards", type=int, default=0, help="virtual: the same bits on any tp")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--backend", default="auto", help="auto, unisono, gloo, nccl")
    parser.add_argument("--compare", action="store_true", help="with the losses of one process")
    options = parser.parse_args()
    world = unisono.init(options.backend)
    others = options.tp * options.cp * options.pp * options.ep
    dp = options.dp or max(1, world.size // max(1, others))
    config = Config(experts=options.experts, ulysses=options.ulysses, shards=options.shards)
    device = unisono.get_device()
    with ProcessGroupManager(options.tp, options.cp, options.pp, dp, options.ep) as manager:
        began_s = time.monotonic()
        losses = []
        for step, loss in enumerate(train(config, manager, options.steps, device=device), 1):
            losses.append(loss)
            if world.rank == 0 and (step == 1 or step % 10 == 0):
                took_s = time.monotonic() - began_s
                print(f"step {step:4}  loss {loss:.4f}  {took_s:6.1f} s", flush=True)
    if options.compare and world.rank == 0:
        config = replace(config, ulysses=1)
        with ProcessGroupManager(group=world.split([0])) as manager:
            alone = list(train(config, manager, options.steps, device=device))
        apart = max(abs(one - other) for one, other in zip(alone, losses, strict=True))
        print(
            f"losses of one process: {alone[0]:.4f} to {alone[-1]:.4f}, {apart:.1e} apart at most"
        )
        assert apart < 1e-3, f"the losses are {losses}, those of one process {alone}"
    unisono.shutdown()


if __name__ == "__main__":
    main()
