"""Weight updates in which a trainer or an engine is killed, in a certain phase: all survivors must
serve one version, the old one or the new one, and say which."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ranks import RankPool, attempt
from unisono import Communicator, WeightUpdateError
from unisono.training import (
    LoadPlan,
    QuantizedWeights,
    WeightReceiver,
    WeightSender,
    WeightShard,
)
from unisono.training.weights.transfers import Transfers

BEFORE = ["announce", "plan", "transfer", "checksum", "vote"]
AFTER = ["swap", "acknowledge"]
PHASES = [*BEFORE, "decision", *AFTER, "any moment"]
TOPS = {"fp8": 448, "fp8_blocks": 448, "int8_channels": 127}
KINDS = ["whole", "parts", "adapter", *TOPS]
TRAINERS, RANKS = 2, 4
SHAPE = ROWS, COLUMNS = 256, 128
NAMES = [f"layer.{i}" for i in range(6)]
KNOWN_WITHIN_S = 5.0
"""On a busy machine; what is printed are the times of this one."""


@dataclass(frozen=True)
class Kill:
    """Who dies, in which phase of which update; `again`: of one with the plan of the last one."""

    victim: int
    phase: str
    kind: str
    again: bool
    chance: float

    @classmethod
    def random(cls, number: int, chance: random.Random) -> Kill:
        phase = PHASES[number % len(PHASES)]
        again = phase == "any moment" or (phase != "plan" and chance.random() < 0.5)
        kind = chance.choice(["whole", "parts", "adapter", chance.choice(list(TOPS))])
        return cls(chance.randrange(RANKS), phase, kind, again, chance.random())


# -- what trainers and engines hold ----------------------------------------------------------------


def held_by_trainer(rank: int, kind: str) -> dict[str, Any]:
    """Half of the rows of all layers, or half of the layers; both have the norm."""
    held: dict[str, Any] = {"norm": torch.ones(16)}
    if kind in ("whole", "adapter"):
        return held | {name: torch.ones(SHAPE) for name in NAMES[rank::TRAINERS]}
    part = (ROWS // TRAINERS, COLUMNS)
    offset = (rank * part[0], 0)
    return held | {name: WeightShard(torch.ones(part), SHAPE, offset) for name in NAMES}


def served_by_engine(kind: str) -> dict[str, torch.Tensor]:
    """All of version 1, as it is or quantised: its largest value, and 1 over that as scales."""
    norm = {"norm": torch.ones(16)}
    top = TOPS.get(kind)
    if top is None:
        return norm | {name: torch.ones(SHAPE) for name in NAMES}
    dtype = torch.int8 if kind == "int8_channels" else torch.float8_e4m3fn
    suffix, shape = {
        "fp8": ("scale", (1,)),
        "fp8_blocks": ("scale_inv", (ROWS // 128, COLUMNS // 128)),
        "int8_channels": ("scale", (ROWS, 1)),
    }[kind]
    scales = {f"{name}_{suffix}": torch.full(shape, 1 / top) for name in NAMES}
    return norm | scales | {name: torch.full(SHAPE, top).to(dtype) for name in NAMES}


def versions_of(served: dict[str, torch.Tensor], kind: str) -> set[int]:
    """All versions of which there is an element. Half of a version is one of another one."""
    found = set()
    for name, tensor in served.items():
        value = tensor.double()
        if "_scale" in name:
            value = value * TOPS[kind]
        elif kind in TOPS and name in NAMES:
            assert value.eq(TOPS[kind]).all()
            continue
        found |= {round(float(each), 4) for each in value.aminmax()}
    assert all(each in (1, 2) for each in found), found
    return set(map(int, found))


def load_plan(served: dict[str, torch.Tensor]) -> LoadPlan:
    """For an engine that serves every second column of blocks, and holds the rest too."""

    def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            for into, part in zip(served[name].chunk(2), tensor.chunk(2), strict=True):
                into.copy_(part)

    return LoadPlan(load, served)


# -- one story -------------------------------------------------------------------------------------


def be_killed_or_survive(
    rank: int, _: int, path: str, kill: Kill, name: str, store: Any = None
) -> Any:
    """Update, perhaps twice; the victim dies meanwhile. Survivors tell what they serve, and when
    they knew."""
    comm = Communicator.join(name, rank, RANKS, store, timeout_s=60)
    trainers = comm.split(range(TRAINERS)) if rank < TRAINERS else None
    kind = kill.kind
    base_weights = {"base": torch.full((100,), 1.0 if rank < TRAINERS else 0.0)}
    base: Any = None
    if kind == "adapter":  # beside base weights, which stay
        base = (WeightSender if rank < TRAINERS else WeightReceiver)(comm, base_weights)
        base.update()
    party: Any
    if rank < TRAINERS:
        held = held_by_trainer(rank, kind)
        weights: Any = held
        if kind in TOPS:
            form: Any = kind
            weights = QuantizedWeights(held, form, lambda each: each in NAMES, group=trainers)
        party = WeightSender(comm, weights, bucket_bytes=100_000)
        party.version = 1
    else:
        served = served_by_engine(kind)
        if kind == "adapter":
            party = WeightReceiver(comm, commit=served.update, version=1)
        else:
            has_plan = kind == "parts" or (kind in TOPS and rank == RANKS - 1)
            weights = load_plan(served) if has_plan else served
            party = WeightReceiver(comm, weights, version=1)
    took_s = 0.0
    if kill.again:
        begin_s = time.monotonic()
        party.update(**({"version": 1} if rank < TRAINERS else {}))
        took_s = time.monotonic() - begin_s
    if rank < TRAINERS:
        for each in held.values():
            (each.tensor if isinstance(each, WeightShard) else each).fill_(2)
    comm.barrier()
    if rank == kill.victim:
        arm(party, kill, path, took_s)
    error = attempt(party.update)
    told_s = time.monotonic()
    if rank == kill.victim:
        signal.pause()
    assert error is None or isinstance(error, WeightUpdateError), error
    serves = versions_of(served, kind) if rank >= TRAINERS else {party.version}
    if base is not None:
        assert base.version == 1
        assert base_weights["base"].eq(1).all()
    text = "" if error is None else str(error).splitlines()[0]
    failed = [] if error is None else sorted(error.failed)
    for each in (party, base, trainers, comm):
        if each is not None:
            each.close()
    return told_s, serves, party.version, error is None or error.committed, failed, text


def arm(party: Any, kill: Kill, path: str, took_s: float) -> None:
    """Let this process die when its update comes to the phase."""
    protocol = party._protocol

    def note(when_s: float) -> None:
        Path(f"{path}-died").write_text(str(when_s))

    def die(*_: Any) -> None:
        note(time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)

    def die_in_transfer(done: int, total: int) -> None:
        if done >= kill.chance * total:
            die()

    if kill.phase == "any moment":
        delay_s = max(1e-6, kill.chance**3 * took_s)  # the update before it made the plan
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        note(time.monotonic() + delay_s)
        signal.setitimer(signal.ITIMER_REAL, delay_s)
    elif kill.phase == "announce":
        early, at = (party, "_read") if kill.chance < 0.3 else (protocol, "meet")
        setattr(early, at, die)
    elif kill.phase == "plan":
        at = "agree" if kill.chance < 0.5 else "begin"
        setattr(protocol, at, die)
    elif kill.phase == "transfer":
        party._progress = die_in_transfer
    elif kill.phase == "checksum":
        Transfers._find_damage = die  # type: ignore[assignment]
    elif kill.phase == "vote":
        protocol.decide = die
    elif kill.phase == "decision":  # all votes are seen
        Communicator.decide = die  # type: ignore[assignment]
    elif kill.phase == "swap" and kill.victim < TRAINERS:
        party._exported.keep = die
    elif kill.phase == "swap":
        party._change_over = die
    else:
        assert kill.phase == "acknowledge"
        exchange = protocol.exchange
        protocol.exchange = lambda *mine: die() if protocol.committed else exchange(*mine)


def run_kills(
    pool: RankPool, kills: Iterable[Kill], job: Any, *args: Any
) -> dict[str, list[float]]:
    """Of each phase, the seconds from the deaths until the last survivor's exceptions."""
    took: dict[str, list[float]] = defaultdict(list)
    for kill in kills:
        name = f"kill-{uuid.uuid4()}"
        outcomes = pool.outcomes(job, RANKS, kill, name, *args, connected=False)
        assert outcomes[kill.victim].exit_code in (-signal.SIGKILL, -signal.SIGALRM), outcomes
        stories = [each.value for rank, each in enumerate(outcomes) if rank != kill.victim]
        told = kill, [each.value or each.error for each in outcomes]
        assert all(each.error is None for each in outcomes if each.exit_code is None), told
        died_s = float(Path(f"{pool.folder}/rendezvous-{pool._jobs}-died").read_text())
        accepted = {committed for _, _, _, committed, _, _ in stories}
        assert len(accepted) == 1, told
        (committed,) = accepted
        for _, serves, version, _, failed, text in stories:
            assert serves == {version} == {1 + committed}, told
            says = "version 2 had been accepted" if committed else "every engine keeps its old ones"
            assert says in text or (not text and kill.phase == "any moment"), told
            assert failed == [kill.victim] or not text, told
        assert not (kill.phase in BEFORE and committed), told
        assert not (kill.phase in AFTER and not committed), told
        if all(text for *_, text in stories):
            took[kill.phase].append(max(told_s for told_s, *_ in stories) - died_s)
            assert took[kill.phase][-1] < KNOWN_WITHIN_S, told
    return took


def table(took: dict[str, list[float]]) -> Iterator[str]:
    for phase, times in took.items():
        times = sorted(times)
        yield (
            f"{phase:<12}{len(times):5} kills: all exceptions after a median of "
            f"{1e3 * statistics.median(times):.1f} ms, 99% within "
            f"{1e3 * times[int(0.99 * len(times))]:.1f} ms, the last "
            f"{1e3 * times[-1]:.1f} ms"
        )
