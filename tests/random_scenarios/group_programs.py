"""Random programs that make groups, right and wrong ones, and what must become of each rank."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace

from ranks import attempt, connect
from unisono.comm.communicator import Communicator

TIMEOUT_S = 8.0
"""After which a rank gives up that nobody can prove to wait in vain: it has other threads."""

Named = tuple[tuple[int, ...], str, int]


@dataclass(frozen=True)
class Split:
    """A split of the world, `after_s` seconds of other work, in a thread: 0 is the main one."""

    members: tuple[int, ...]
    label: str
    thread: int
    after_s: float = 0.0


@dataclass(frozen=True)
class Programs:
    """What each rank does."""

    seed: int
    of_rank: tuple[tuple[Split, ...], ...]


def draw(seed: int) -> Programs:
    """Programs that fit together; with an odd seed one rank's is then changed."""
    dice = random.Random(seed)
    ranks, threads = dice.randint(2, 4), dice.choice((1, 1, 2))
    makings = []
    for _ in range(dice.randint(2, 5)):
        members = tuple(dice.sample(range(ranks), dice.randint(2, ranks)))
        thread = dice.randrange(threads)
        makings.append(Split(members, dice.choice(("", "a", "b")) + "t" * thread, thread))
    of_rank = [[made for made in makings if rank in made.members] for rank in range(ranks)]
    able = [rank for rank in range(ranks) if of_rank[rank]]
    if seed % 2:
        _spoil(of_rank[dice.choice(able)], dice)
    delays = (0.0, 0.0, 0.05, 0.15, 0.3)
    return Programs(
        seed,
        tuple(
            tuple(replace(made, after_s=dice.choice(delays)) for made in program)
            for program in of_rank
        ),
    )


def _spoil(program: list[Split], dice: random.Random) -> None:
    at = dice.randrange(len(program))
    made = program[at]
    match dice.choice(("order", "label", "swap", "drop", "again")):
        case "order":
            program[at] = replace(made, members=(*made.members[1:], made.members[0]))
        case "label":
            program[at] = replace(made, label=f"other{made.label}")
        case "swap":
            other = dice.randrange(len(program))
            program[at], program[other] = program[other], made
        case "drop":
            del program[at]
        case "again":
            program.insert(at, made)


@dataclass(frozen=True)
class Fate:
    """Which ranks return, and which must learn that they wait in vain for each other."""

    done: frozenset[int]
    differ: frozenset[int]


def foresee(programs: Programs) -> Fate:
    """Make every group whose members have come, until none is left."""
    queues = {
        (rank, thread): _named([made for made in program if made.thread == thread])
        for rank, program in enumerate(programs.of_rank)
        for thread in (0, 1)
    }

    def now(rank: int) -> dict[int, Named]:
        return {thread: queues[rank, thread][0] for thread in (0, 1) if queues[rank, thread]}

    ranks = range(len(programs.of_rank))
    while made := next(
        (
            one
            for rank in ranks
            for one in now(rank).values()
            if all(one in now(member).values() for member in one[0])
        ),
        None,
    ):
        for member in made[0]:
            thread = next(thread for thread, one in now(member).items() if one == made)
            del queues[member, thread][0]
    stuck = {rank: one[0] for rank in ranks if list(one := now(rank)) == [0]}
    while free := [
        rank
        for rank, one in stuck.items()
        if not any(stuck.get(member, one) != one for member in one[0])
    ]:
        for rank in free:
            del stuck[rank]
    return Fate(frozenset(rank for rank in ranks if not now(rank)), frozenset(stuck))


def _named(program: list[Split]) -> list[Named]:
    """Each making, with its number among those that are alike."""
    seen: Counter[tuple[tuple[int, ...], str]] = Counter()
    found = []
    for made in program:
        seen[made.members, made.label] += 1
        found.append((made.members, made.label, seen[made.members, made.label]))
    return found


@dataclass(frozen=True)
class End:
    """How a rank ended: what it raised, if anything, and after how long."""

    error: str
    text: str
    took_s: float


def run_programs(rank: int, size: int, path: str, programs: Programs) -> End:
    """A job for ranks that are not connected."""
    began_s = time.monotonic()
    errors: list[BaseException] = []
    with connect(path, rank, size) as comm:
        comm.timeout_s = TIMEOUT_S

        def run(thread: int) -> None:
            own = [made for made in programs.of_rank[rank] if made.thread == thread]
            error = attempt(_make, comm, own)
            errors.extend([error] if error else [])

        helper = threading.Thread(target=run, args=(1,))
        if any(made.thread for made in programs.of_rank[rank]):
            helper.start()
        run(0)
        if helper.ident:
            helper.join()
    took_s = time.monotonic() - began_s
    first = errors[0] if errors else None
    return End(type(first).__name__ if first else "", str(first or ""), took_s)


def _make(comm: Communicator, program: list[Split]) -> None:
    groups = []
    for made in program:
        time.sleep(made.after_s)
        groups.append(comm.split(made.members, made.label))
    for group in groups:
        assert group is not None
        group.close()
