"""Weight updates that fail: one clear error, and every engine serves a complete version."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_weights import endpoint

from ranks import RankPool, attempt
from unisono import Communicator, GroupAborted, WeightUpdateError
from unisono.collectives.objects import all_gather_object
from unisono.comm.work import FinishedWork
from unisono.training import WeightReceiver, WeightSender, WeightShard
from unisono.world.world import resolve
from user_programs import DEADLINE_S, read_line, write_program

SENDER, FIRST, SECOND = 0, 1, 2
BUCKET_BYTES = 4000


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {f"layer {i}": torch.full((1000,), float(version)) for i in range(8)}


def serves(weights: dict[str, torch.Tensor], version: int) -> bool:
    return all(bool(tensor.eq(version).all()) for tensor in weights.values())


class Story:
    """A rank's part in: join, update to version 1, and then the update in which something happens.
    The test checks what `update` returns."""

    def __init__(self, rank: int, name: str, **options: Any) -> None:
        self.rank = rank
        self.comm = Communicator.join(name, rank, 3, timeout_s=20, join_timeout_s=30)
        self.weights = weights_of(1 if rank == SENDER else 0)
        sender = {"bucket_bytes": BUCKET_BYTES}
        endpoint(self.comm, self.weights, sender).update()
        assert serves(self.weights, 1)
        if rank == SENDER:
            self.weights.update(weights_of(2))
        self.party = endpoint(self.comm, self.weights, sender | options, {"version": 1, **options})

    def update(self) -> dict[str, Any]:
        """Try the second update; returns how it ended, as plain data."""
        error = attempt(self.party.update)
        fields = vars(error) if isinstance(error, WeightUpdateError) else {}
        whole = [version for version in (1, 2) if serves(self.weights, version)]
        return {
            **fields,
            "error": "" if error is None else f"{type(error).__name__}: {error}",
            "serves": whole[0] if whole else None,
            "version": self.party.version,
        }

    def close(self) -> None:
        self.party.close()
        self.comm.close()


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(bucket: int) -> Callable[[int, int], None]:
    """A progress callback that kills the process in the middle."""
    return lambda done, total: die() if done >= bucket * BUCKET_BYTES else None


def outcomes_of(pool: RankPool, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What each rank returned; None for one that died."""
    name = f"test-{uuid.uuid4()}"
    outcomes = pool.outcomes(function, 3, name, *args, connected=False)
    for outcome in outcomes:
        assert outcome.error is None or "ended with -9" in outcome.error, outcome.error
    return [outcome.value for outcome in outcomes]


# -- death in the middle ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["first", "sending", "prepare"])
def test_a_receiver_that_dies_before_the_vote_keeps_all_at_the_old_version(
    fresh_pool: RankPool, where: str
) -> None:
    sender, dead, other = outcomes_of(fresh_pool, lose_a_receiver, where)
    assert dead is None
    for survivor in (sender, other):
        assert not survivor["committed"]
        assert survivor["group_ended"]
        assert list(survivor["failed"]) == [FIRST], survivor
        assert "every engine keeps its old ones; rank 1" in survivor["error"]
        assert "killed by SIGKILL" in survivor["error"] or "has ended" in survivor["error"]
        assert "Close the group and join again" in survivor["error"]
    assert (other["serves"], other["version"]) == (1, 1)


def lose_a_receiver(rank: int, _: int, __: str, name: str, where: str) -> Any:
    deaths: dict[str, Any] = {
        "first": {"progress": die_at(0)},
        "sending": {"progress": die_at(4)},
        "prepare": {"prepare": die},
    }
    story = Story(rank, name, **(deaths[where] if rank == FIRST else {}))
    ending = story.update()
    story.close()
    return ending


def test_a_sender_that_dies_in_the_middle_leaves_the_old_version(fresh_pool: RankPool) -> None:
    dead, *engines = outcomes_of(fresh_pool, lose_the_sender)
    assert dead is None
    for engine in engines:
        assert (engine["serves"], engine["version"]) == (1, 1)
        assert list(engine["failed"]) == [SENDER]
        assert engine["group_ended"]


def lose_the_sender(rank: int, _: int, __: str, name: str) -> Any:
    return Story(rank, name, **({"progress": die_at(3)} if rank == SENDER else {})).update()


def test_an_engine_that_dies_after_the_decision_keeps_nobody_back(fresh_pool: RankPool) -> None:
    sender, dead, other = outcomes_of(fresh_pool, die_in_commit)
    assert dead is None
    assert (other["serves"], other["version"]) == (2, 2)
    for survivor in (sender, other):
        assert survivor["committed"]
        assert list(survivor["failed"]) == [FIRST]
        assert (
            "version 2 had been accepted: every engine that has not failed serves it"
            in survivor["error"]
        )


def die_in_commit(rank: int, _: int, __: str, name: str) -> Any:
    return Story(rank, name, **({"commit": die} if rank == FIRST else {})).update()


def test_a_death_is_known_to_those_who_had_nothing_to_do_with_the_dead(
    fresh_pool: RankPool,
) -> None:
    """Two trainer ranks with a shard each, two engines with a shard each: four lanes of two."""
    name = f"test-{uuid.uuid4()}"
    outcomes = fresh_pool.outcomes(lose_one_of_four, 4, name, connected=False)
    assert "ended with -9" in str(outcomes.pop(2).error)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        text, failed, committed, whole = outcome.value
        assert (failed, committed, whole) == ([2], False, True), text


def lose_one_of_four(rank: int, _: int, __: str, name: str) -> Any:
    comm = Communicator.join(name, rank, 4, timeout_s=20)
    mine = torch.full((8, 500), 1.0 if rank < 2 else 0.0)
    if rank < 2:  # rows
        party: Any = WeightSender(
            comm, {"w": WeightShard(mine, (16, 500), (8 * rank, 0))}, bucket_bytes=1000
        )
    else:  # columns
        mine = mine.reshape(16, 250)
        shard = WeightShard(mine, (16, 500), (0, 250 * (rank - 2)))
        party = WeightReceiver(comm, {"w": shard}, progress=die_at(1) if rank == 2 else None)
    error = attempt(party.update)
    assert isinstance(error, WeightUpdateError), error
    whole = bool(mine.eq(mine[0, 0]).all())
    return str(error), list(error.failed), error.committed, whole


@pytest.mark.slow
def test_whenever_in_the_last_rounds_a_rank_dies_the_others_agree(fresh_pool: RankPool) -> None:
    ended = set()
    for turn in range(90):
        victim = turn % 3
        _, *both = outcomes_of(fresh_pool, die_after, victim, 0.0001 * (turn // 3))
        engines = [engine for engine in both if engine is not None]
        assert len({engine["serves"] for engine in engines}) == 1
        assert all(engine["serves"] == engine["version"] in (1, 2) for engine in engines)
        ended.add(engines[0]["serves"])
    assert ended == {1, 2}, "the deaths came on both sides of the decision"


def die_after(rank: int, _: int, __: str, name: str, victim: int, delay_s: float) -> Any:
    """The victim is killed this long after it has received, or sent, all weights."""
    begin, bell = os.pipe()

    def ring(done: int, total: int) -> None:
        if done == total:
            os.write(bell, b"now")

    story = Story(rank, name, **({"progress": ring} if rank == victim else {}))
    if rank == victim and os.fork() == 0:
        os.read(begin, 3)
        time.sleep(delay_s)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    ending = story.update()
    if rank == victim:
        signal.pause()
    return ending


# -- the decision ----------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_ranks_that_want_different_things_decide_alike(comm: Communicator) -> None:
    """By the first of them, though no two arrive at the same time."""
    decide_alike(comm, 50)


@pytest.mark.ranks(3, backend="gloo")
def test_ranks_on_gloo_decide_alike(process_group: Any) -> None:
    decide_alike(resolve(process_group), 6)


def decide_alike(comm: Communicator, turns: int) -> None:
    for turn in range(turns):
        decided = comm.decide(turn + 1, (comm.rank + turn) % comm.size)
        everyone = torch.zeros(comm.size, dtype=torch.int64)
        comm.all_gather(everyone, torch.tensor([decided], dtype=torch.int64))
        assert everyone.tolist() == [decided] * comm.size
        assert decided in range(comm.size)
    group = comm.split(range(comm.size), "ends")
    assert group is not None
    first = group.decide(1, comm.rank)
    group.abort(f"as rank {comm.rank} wants")
    assert group.decide(1, comm.size) == first, "it outlives the group"
    assert isinstance(group.errored, GroupAborted)
    reasons = all_gather_object(group.errored.reason, comm)
    assert reasons == [group.errored.reason] * comm.size, "one cause for all"
    group.close()


# -- failures in good order ------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_all_learn_of_an_exception_in_prepare_and_the_next_update_works(
    comm: Communicator,
) -> None:
    weights = weights_of(1 if comm.rank == SENDER else 0)
    if comm.rank == SENDER:
        sender = WeightSender(comm, weights)
        with pytest.raises(WeightUpdateError) as caught:
            sender.update()
        assert sender.update().version == 1
    else:
        attempts: list[int] = []

        def prepare(staged: dict[str, torch.Tensor]) -> None:
            assert serves(staged, 1)
            assert serves(weights, 0)
            attempts.append(1)
            if comm.rank == SECOND and len(attempts) == 1:
                raise KeyError("no room")

        receiver = WeightReceiver(comm, weights, prepare=prepare)
        with pytest.raises(WeightUpdateError) as caught:
            receiver.update()
        assert (serves(weights, 0), receiver.version) == (True, 0)
        receiver.update()
        assert (serves(weights, 1), receiver.version) == (True, 1)
    assert caught.value.failed == {SECOND: "KeyError: 'no room'"}
    assert not caught.value.group_ended
    assert not caught.value.committed
    assert "every engine keeps its old ones; rank 2: KeyError: 'no room'" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError) == (comm.rank == SECOND)


@pytest.mark.ranks(3)
def test_all_learn_of_a_commit_that_fails(comm: Communicator) -> None:
    weights = weights_of(1 if comm.rank == SENDER else 0)

    def fail(staged: dict[str, torch.Tensor]) -> None:
        raise OSError("disk full")

    party = endpoint(comm, weights, receiver={"commit": fail if comm.rank == FIRST else None})
    with pytest.raises(WeightUpdateError, match="version 1 had been accepted") as caught:
        party.update()
    assert caught.value.failed == {FIRST: "OSError: disk full"}
    assert caught.value.committed
    assert party.version == (0 if comm.rank == FIRST else 1)  # the sender's, too
    assert serves(weights, 0 if comm.rank == FIRST else 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["", "prepare", "commit", "abort"])
def test_what_an_update_needed_goes_with_the_last_reference(comm: Communicator, where: str) -> None:
    """Without a close, and without the garbage collector: the exception keeps nothing alive."""

    def fail(staged: Any) -> None:
        if where == "abort":
            comm.abort("it is over")
        raise KeyError(where)

    def update() -> None:
        options = {where.replace("abort", "prepare"): fail} if where else {}
        endpoint(comm, weights_of(1), receiver=options).update()

    def groups() -> set[int]:
        return {id(group) for group in gc.get_objects() if issubclass(type(group), Communicator)}

    gc.collect()
    gc.disable()
    try:
        before = groups()
        assert (attempt(update) is None) == (not where)
        assert groups() == before
    finally:
        gc.enable()


class FlipsABit(FinishedWork):
    """A transfer that is damaged on its way."""

    def __init__(self, work: Any, tensors: list[torch.Tensor]) -> None:
        self._work, self._tensors = work, tensors

    def wait(self, timeout_s: float | None = None) -> None:
        self._work.wait(timeout_s)
        self._tensors[0].view(torch.int32)[3] ^= 1


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transactional", [True, False])
def test_a_damaged_bucket_is_noticed(
    comm: Communicator, transactional: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = weights_of(1 if comm.rank == SENDER else 0)
    sound = Communicator.broadcast
    buckets: list[int] = []

    def damaging(self: Any, tensors: Any, root: int = 0, *, async_op: bool = False) -> Any:
        work = sound(self, tensors, root, async_op=async_op)
        buckets.append(1)
        return FlipsABit(work, tensors) if async_op and len(buckets) == 3 else work

    if comm.rank == FIRST:
        monkeypatch.setattr(Communicator, "broadcast", damaging)
    options = {"bucket_bytes": BUCKET_BYTES, "transactional": transactional}
    party = endpoint(comm, weights, sender=options)
    with pytest.raises(WeightUpdateError) as caught:
        party.update()
    text = r"bucket 2 from rank 0 \(layer 2\) was damaged"
    assert re.search(text, caught.value.failed[FIRST])
    assert list(caught.value.failed) == [FIRST]
    if transactional:
        assert comm.rank == SENDER or serves(weights, 0)
    else:
        assert "engines may hold parts of two versions" in str(caught.value)
    party.update()
    assert serves(weights, 1)


@pytest.mark.ranks(2)
def test_a_sender_that_fails_in_the_middle_ends_the_update_for_all(comm: Communicator) -> None:
    weights = weights_of(1 if comm.rank == SENDER else 0)

    def fail(done: int, total: int) -> None:
        if done > total / 2:
            raise ZeroDivisionError("in a callback")

    if comm.rank == SENDER:
        with pytest.raises(ZeroDivisionError):
            WeightSender(comm, weights, bucket_bytes=BUCKET_BYTES, progress=fail).update()
    else:
        with pytest.raises(WeightUpdateError, match=r"ZeroDivisionError.*in a callback") as caught:
            WeightReceiver(comm, weights).update()
        assert caught.value.group_ended
        assert list(caught.value.failed) == [SENDER]
        assert serves(weights, 0)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("where", ["receiving", "prepare"])
def test_a_receiver_that_falls_behind_is_named(comm: Communicator, where: str) -> None:
    weights = weights_of(1 if comm.rank == SENDER else 0)

    def dawdle(*_: Any) -> None:
        end = time.monotonic() + 30
        while comm.errored is None and time.monotonic() < end:
            time.sleep(0.01)  # until the others have given up

    options: Any = {}
    if comm.rank == SECOND:
        options = {"progress": dawdle} if where == "receiving" else {"prepare": dawdle}
    party = endpoint(comm, weights, {"bucket_bytes": BUCKET_BYTES}, options)
    with pytest.raises(WeightUpdateError) as caught:
        party.update(timeout_s=2 if comm.rank != SECOND else 20)
    assert caught.value.group_ended
    if comm.rank == SENDER or where == "prepare":
        assert SECOND in caught.value.failed
        assert FIRST not in caught.value.failed
    assert comm.rank == SENDER or serves(weights, 0)


# -- programs that were started separately -----------------------------------------------------

PROGRAM = """
    import signal, sys
    import torch
    from unisono import Communicator, WeightUpdateError
    from unisono.training import WeightReceiver, WeightSender

    torch.set_num_threads(1)
    name, rank = sys.argv[1], int(sys.argv[2])
    say = lambda *values: print(*values, flush=True)

    def weights_of(version):
        return {f"layer {i}": torch.full((50_000,), float(version)) for i in range(4)}

    def join():
        return Communicator.join(name, rank, 2, timeout_s=30, join_timeout_s=60)

    def train():
        comm = join()
        weights = {}
        sender = WeightSender(comm, weights)
        for version in (1, 2, 3):
            weights.update(weights_of(version))
            while True:
                try:
                    sender.update(version)
                    say("sent", version)
                    break
                except WeightUpdateError as error:
                    say("failed", version, sorted(error.failed), error.committed)
                    comm.close()
                    comm = join()
                    sender.attach(comm)
        comm.close()

    def serve(dies_at):
        def prepare(staged):
            if receiver.version + 1 == dies_at:
                say("waits for its end")
                signal.pause()

        weights = weights_of(0)
        comm = join()
        receiver = WeightReceiver(comm, weights, prepare=prepare)
        while receiver.version < 3:
            receiver.update()
            assert all(weight.eq(receiver.version).all() for weight in weights.values())
            say("serves", receiver.version)
        comm.close()

    train() if rank == 0 else serve(int(sys.argv[3]))
"""


def test_an_engine_that_restarts_meets_the_trainer_again(tmp_path: Path) -> None:
    script = write_program(tmp_path, PROGRAM)
    name = f"test-{uuid.uuid4()}"
    trainer, engine = script.start(name, "0"), script.start(name, "1", "2")
    started = [trainer, engine]
    try:
        assert [read_line(engine), read_line(engine)] == ["serves 1", "waits for its end"]
        engine.kill()
        assert [read_line(trainer), read_line(trainer)] == ["sent 1", "failed 2 [1] False"]
        started.append(script.start(name, "1", "0"))
        out, err = started[-1].communicate(timeout=DEADLINE_S)
        assert out == "serves 2\nserves 3\n", err
        out, err = trainer.communicate(timeout=DEADLINE_S)
        assert (out, trainer.returncode) == ("sent 2\nsent 3\n", 0), err
    finally:
        for process in started:
            process.kill()
            process.communicate()
