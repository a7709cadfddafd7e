"""Two vLLM engines, of one worker and of two, and two trainers that send a half of the layers each:
one of the five is killed in a phase of an update. All survivors serve the same version and say
which; an engine that is whole generates exactly that version's tokens. The same with the halves of
an adapter."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_engines
import pytest
import torch
import vllm.model_executor.models.llama
import vllm.v1.worker.cpu_worker  # noqa: F401  (loaded once, before the engines are forked)
from forked_engines import Engine
from models import greedy, make_model, save
from servers import free_port
from sharded_trainer import Pieces
from test_adapters import CONFIG, SLOTS, make_adapter, merge
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

from unisono import WeightUpdateError
from unisono.training.weights.vllm_plugin import UnisonoTrainerInitInfo, register
from weight_kills import AFTER, BEFORE, PHASES, TRAINERS, Kill, table

pytestmark = pytest.mark.vllm

SIZES = [1, 2]
RANKS = TRAINERS + sum(SIZES)
PHASES_HERE = [phase for phase in PHASES if phase != "any moment"] + ["load"]
"""In "load" a worker dies after the vote, while vLLM writes."""
KILLS = 30
SOON_S = 10.0
SEEDS = 21, 22


def kill_number(number: int, chance: random.Random) -> Kill:
    phase = PHASES_HERE[number % len(PHASES_HERE)]
    again = phase == "load" or (phase != "plan" and chance.random() < 0.7)
    victim = chance.randrange(TRAINERS if phase == "load" else 0, RANKS)
    return Kill(victim, phase, "parts", again, chance.random())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # OpenMP's threads would be missing in forked processes
    made = tmp_path_factory.mktemp("killed")
    save(made / "model", SEEDS[0])
    return made


@pytest.fixture
def engines(folder: Path) -> Iterator[list[Engine]]:
    started = [Engine(folder, size, folder / "model") for size in SIZES]
    yield started
    for engine in started:
        engine.close()


def worker_of(rank: int) -> tuple[int, int]:
    """The engine of a rank, and its worker there."""
    return (0, 0) if rank == TRAINERS else (1, rank - TRAINERS - 1)


def be_a_trainer(
    rank: int, port: int, engines: list[Engine], seeds: tuple[int, int], kill: Kill, path: str
) -> None:
    """Send a version, unless this is the first one to die in, and another; tell how that ended."""
    register()
    info = UnisonoTrainerInitInfo(
        "127.0.0.1", port, RANKS, engine_sizes=SIZES, timeout_s=60.0, senders=TRAINERS, rank=rank
    )
    source: Any = Pieces(make_model(seeds[0]), rank, TRAINERS)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=engines, source=source)
    party = trainer._adapters if kill.kind == "adapter" else trainer._sender

    def send(seed: int) -> None:
        if kill.kind == "adapter":
            whole = make_adapter(make_model(SEEDS[0]), seed)
            trainer.send_adapter(1, {name: whole[name] for name in [*whole][rank::2]}, CONFIG)
        else:
            trainer.source = Pieces(make_model(seed), rank, TRAINERS)
            trainer.send_weights()

    if kill.again:
        send(seeds[0])
    if rank == kill.victim:
        forked_engines.arm(party, kill, path, 0.0)
    elif rank == 0 and kill.victim >= TRAINERS:
        engine, worker = worker_of(kill.victim)
        engines[engine].ask(worker, "arm", kill, path)
    told: dict[str, Any] = {}
    try:
        send(seeds[1])
    except WeightUpdateError as error:
        told = {"text": str(error), "committed": error.committed, "failed": sorted(error.failed)}
    told |= {"told_s": time.monotonic(), "version": party.version}
    Path(f"{path}-trainer-{rank}").write_text(json.dumps(told))
    os._exit(0)


def run_story(
    folder: Path, number: int, kill: Kill, engines: list[Engine], seeds: tuple[int, int]
) -> tuple[bool, float]:
    """Whether the new version was accepted, and after how long the last survivor knew."""
    path, port = str(folder / f"story-{number}"), free_port()
    trainers = [
        forked_engines.start(be_a_trainer, rank, port, engines, seeds, kill, path)
        for rank in range(TRAINERS)
    ]
    for rank, trainer in enumerate(trainers):
        trainer.join(120)
        assert trainer.exitcode == (-signal.SIGKILL if rank == kill.victim else 0), (rank, kill)
    died_s = float(Path(f"{path}-died").read_text())
    old = int(kill.again)
    accepted, when = set(), [died_s]
    for rank in sorted({*range(RANKS)} - {kill.victim}):
        if rank < TRAINERS:
            told = json.loads(Path(f"{path}-trainer-{rank}").read_text())
            version, text, told_s = told["version"], told.get("text", ""), told["told_s"]
            assert told["failed"] == [kill.victim], told
            accepted.add(told["committed"])
            version = old + told["committed"]
        else:
            engine, worker = worker_of(rank)
            version, errors = engines[engine].ask(worker, "told", kill.kind)
            if not errors:  # the trainer died before it had called the engines
                assert (kill.victim, kill.phase, version) == (0, "announce", old), (rank, kill)
                continue
            ((told_s, text),) = errors
        accepted.add(version == old + 1)
        when.append(told_s)
        says = f"version {old + 1} had been accepted" if version > old else "keeps its old ones"
        assert says in text, (rank, kill, version, text)
        assert version in (old, old + 1), (rank, kill, version)
    assert len(accepted) == 1, (kill, accepted)
    took_s = max(when) - died_s
    assert took_s < SOON_S, (kill, took_s)
    (committed,) = accepted
    assert not (kill.phase in BEFORE and committed), kill
    assert not (kill.phase in (*AFTER, "load") and not committed), kill
    return committed, took_s


def test_thirty_kills(folder: Path, engines: list[Engine]) -> None:
    expected = {seed: greedy(make_model(seed)) for seed in SEEDS}
    chance = random.Random(0)
    took: dict[str, list[float]] = defaultdict(list)
    served, other = SEEDS
    for number in range(KILLS):
        kill = kill_number(number, chance)
        for engine in engines:
            engine.wait()
        committed, took_s = run_story(folder, number, kill, engines, (served, other))
        took[kill.phase].append(took_s)
        took["a trainer" if kill.victim < TRAINERS else "a worker"].append(took_s)
        if committed:
            served, other = other, served
        for index, engine in enumerate(engines):
            if kill.victim >= TRAINERS and worker_of(kill.victim)[0] == index:
                engine.close()
                engines[index] = restarted(folder, engine.size, served)
            else:
                assert engine.answers() == expected[served], kill
    sys.stderr.write("\n".join(["", *table(took), ""]))


def test_kills_while_an_adapter_is_sent(folder: Path) -> None:
    """The base stays; each story begins with a version of the adapter in the slots."""
    model = make_model(SEEDS[0])
    base = greedy(model)
    expected = {seed: greedy(merge(model, make_adapter(model, seed))) for seed in SEEDS}
    chance = random.Random(1)
    engines = [Engine(folder, size, folder / "model", **SLOTS) for size in SIZES]
    served, other = SEEDS
    try:
        for number, phase in enumerate(phase for phase in PHASES_HERE[:-1] if phase != "plan"):
            kill = Kill((1, 3, 0, 4, 2)[number % RANKS], phase, "adapter", True, chance.random())
            for engine in engines:
                engine.wait()
            committed, _ = run_story(folder, KILLS + number, kill, engines, (served, other))
            if committed:
                served, other = other, served
            for index, engine in enumerate(engines):
                if kill.victim >= TRAINERS and worker_of(kill.victim)[0] == index:
                    engine.close()
                    engines[index] = Engine(folder, engine.size, folder / "model", **SLOTS)
                else:
                    assert engine.answers(1) == expected[served], kill
                    assert engine.answers() == base, kill
    finally:
        for engine in engines:
            engine.close()


def restarted(folder: Path, size: int, seed: int) -> Engine:
    """A new engine loads the checkpoint of what is served."""
    model = folder / f"model-{seed}"
    if not model.exists():
        save(model, seed)
    return Engine(folder, size, model)
