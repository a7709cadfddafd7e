"""The Promela models match the code: real ranks take the same steps in the same order."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from genmc import ENGINE, SMALLER, Change
from weaken import WEAKENINGS

from ranks import RankPool, connect
from unisono import Communicator
from unisono.comm.hosts import growing
from unisono.comm.hosts.control_line import ControlLines
from unisono.comm.hosts.frames import Session
from unisono.comm.meeting import announcements
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.roster import Roster
from unisono.comm.meeting.survivors import SegmentVote
from unisono.comm.meeting.unix_socket import Connection
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.training.weights.protocol import UpdateProtocol

RANKS = 3

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None, reason="spin is not installed: apt-get install spin"
)


def steps_in(model: str) -> dict[int, list[str]]:
    """What each process of a model does, in order, if nothing goes wrong."""
    with tempfile.TemporaryDirectory() as folder:  # spin writes files into its current folder
        said = subprocess.run(
            ["spin", "-DQUIET", "-T", Path(__file__).resolve().with_name(model)],
            check=True, capture_output=True, text=True, cwd=folder,
        ).stdout  # fmt: skip
    steps = defaultdict(list)
    for line in said.splitlines():
        if line.startswith("MSC: "):
            rank, step = line.removeprefix("MSC: ").split(" ", 1)
            steps[int(rank)].append(step)
    return dict(steps)


def vote(comm: Communicator) -> list[str]:
    steps: list[str] = []
    protocol = UpdateProtocol(comm)
    protocol._serial, protocol._votes = 1, True
    exchange, decide = protocol._exchange, comm.decide

    def note_exchange(*mine: int) -> Any:
        steps.append("exchange")
        return exchange(*mine)

    def note_decision(serial: int, value: int) -> int:
        decided = decide(serial, value)
        steps.append("decide")
        return decided

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "_exchange", note_exchange)
        patch.setattr(comm, "decide", note_decision)
        protocol.decide(lambda: steps.append("commit"))
    return steps


@needs_spin
def test_a_vote_takes_the_steps_of_its_model(pool: RankPool) -> None:
    assert dict(enumerate(pool.run(vote, RANKS))) == steps_in("vote.pml")


_KINDS = {
    "key": "hello",
    "nonce": "invitation",
    "opened": "opened",
    "go": "go",
}


@contextmanager
def noting_messages(steps: list[str]) -> Iterator[None]:
    """Record what this process sends while groups are created."""
    send = Connection.send

    def note_send(self: Connection, message: dict[str, Any], *descriptors: int) -> None:
        steps.append("sends " + next(kind for key, kind in _KINDS.items() if key in message))
        send(self, message, *descriptors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "send", note_send)
        yield


def meet(rank: int, size: int, path: str) -> list[str]:
    steps: list[str] = []
    with noting_messages(steps), connect(path, rank, size):
        return steps


def split(comm: Communicator) -> list[str]:
    steps: list[str] = []
    with noting_messages(steps):
        part = comm.split(range(comm.size))
    assert part is not None
    part.close()
    return steps


@needs_spin
@pytest.mark.parametrize("made_by", [meet, split])
def test_a_group_is_made_by_the_messages_of_its_model(
    pool: RankPool, made_by: Callable[..., list[str]]
) -> None:
    recorded = pool.run(made_by, RANKS, connected=made_by is split)
    assert dict(enumerate(recorded)) == steps_in("rendezvous.pml")


def grow(rank: int, size: int, path: str) -> list[str]:
    """Ranks 0 and 1 are a group, and rank 2 joins it."""
    steps: list[str] = []

    def note(patch: pytest.MonkeyPatch, of: Any, name: str, step: Callable[..., str]) -> None:
        function = getattr(of, name)

        def noted(*given: Any, **named: Any) -> Any:
            taken = step(*given)
            if taken and taken not in steps:
                steps.append(taken)
            return function(*given, **named)

        patch.setattr(of, name, noted)

    with contextlib.ExitStack() as stack:
        comm = stack.enter_context(connect(path, rank, 2)) if rank < 2 else None
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        note(patch, announcements, "announce", lambda _, it: "announces" * ("members" in it))
        note(patch, SharedMemory, "exchange_integers", lambda *_: "exchanges")
        note(patch, Roster, "publish", lambda _: "publishes")
        note(patch, Board, "set", lambda _, name, text: "agrees" * (text == "agreed"))
        note(patch, growing, "connect_once", lambda *_: "meets")
        note(patch, Board, "settle", lambda _, name, made: "settles made" * (made is True))
        stack.enter_context(Communicator.join(path) if comm is None else comm.grow(path))
        return steps


@needs_spin
def test_a_newcomer_is_let_in_by_the_steps_of_the_model(pool: RankPool) -> None:
    recorded = pool.run(grow, RANKS, connected=False)
    assert dict(enumerate(recorded)) == steps_in("grow.pml")


def shrink(comm: Communicator) -> list[str]:
    """Continue after the group was aborted; all of its ranks are alive."""
    steps: list[str] = []
    say = SegmentVote.say

    def note_said(self: SegmentVote, text: str) -> None:
        steps.append(f"says {json.loads(text)[0]}")
        say(self, text)

    comm.abort("to shrink it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentVote, "say", note_said)
        with comm.shrink() as rest:
            assert rest.size == comm.size
            steps.append("goes on")
    return steps


@needs_spin
def test_survivors_go_on_by_the_steps_of_the_model(pool: RankPool) -> None:
    recorded = pool.run(shrink, RANKS)
    assert dict(enumerate(recorded)) == steps_in("shrink.pml")


@needs_spin
def test_a_line_carries_what_its_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[int, list[str]] = {0: [], 1: []}
    encode_goodbye = Session.encode_goodbye
    has_left, had = threading.Event(), [threading.Event(), threading.Event()]

    def note_goodbye(self: Session) -> bytes:
        steps[1 - self.peer].append("sends goodbye")
        return encode_goodbye(self)

    def hear_goodbye(peer: int) -> None:
        steps[1 - peer].append("hears goodbye")
        has_left.set()

    def open_lines(me: int) -> ControlLines:
        return ControlLines(
            "127.0.0.1", me, b"secret" * 4,
            on_message=lambda *_: had[me].set(),
            on_lost=lambda *_: steps[me].append("hears of a loss"),
            on_left=hear_goodbye,
        )  # fmt: skip

    monkeypatch.setattr(Session, "encode_goodbye", note_goodbye)
    lines = [open_lines(me) for me in range(2)]
    lines[0].want(1, lines[1].where, 10)
    lines[1].connect(0, lines[0].where, 10)
    lines[0].connect(1, lines[1].where, 10)
    for me in range(2):
        steps[me].append("sends message")
        lines[me].send(1 - me, {})
        assert had[1 - me].wait(10)
    lines[0].close()
    assert has_left.wait(10)
    lines[1].close()
    assert steps == steps_in("lines.pml")


def test_a_run_that_could_explore_nothing_has_failed(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parent
    ended = subprocess.run(
        [sys.executable, folder], env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert ended.returncode == 1, ended.stderr
    assert "the models were not explored: spin, or a C compiler, is not installed" in ended.stdout


def test_what_the_model_checker_would_change_stands_once() -> None:
    """So that GenMC, which few machines have, finds it."""
    changes = {change for weakening in WEAKENINGS for change in weakening.changes}
    for change in changes | {Change(*smaller) for smaller in SMALLER}:
        assert (ENGINE / change.file).read_text().count(change.old) == 1, change
