"""Ranks that wait for others at the start say for which, and give up at their deadline."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import unisono
from ranks import RankPool, attempt
from resources import meeting_files, waits_at_a_meeting
from unisono import Communicator, RendezvousError
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting import deadline as waits
from unisono.comm.meeting.board import Board, FileBoard
from unisono.comm.meeting.deadline import Deadline, meeting_timeout_s
from user_programs import DEADLINE_S, Program, eventually, write_program


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4()}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun_variables(rank: int, size: int, port: int) -> dict[str, str]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    return place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


WAYS = {
    "parent": lambda name: unisono.init(rank=0, size=2, timeout_s=1),
    "init": lambda name: unisono.init(timeout_s=1),
    "unisono": lambda name: unisono.init("unisono", timeout_s=1),
    "gloo": lambda name: unisono.init("gloo", timeout_s=1),
    "join": lambda name: Communicator.join(name, 0, 2, timeout_s=1),
    "join_timeout_s": lambda name: Communicator.join(name, 0, 2, timeout_s=600, join_timeout_s=1),
}


def test_a_timeout_bounds_the_meeting_too(fresh_pool: RankPool, name: str) -> None:
    ports = [free_port() for _ in WAYS]
    errors = fresh_pool.run(come_alone, len(WAYS), name, ports, connected=False, deadline_s=25)
    for how, error in zip(WAYS, errors, strict=True):
        assert isinstance(error, RendezvousError), (how, error)
        missing = "rank 0 did not start the store" if how == "gloo" else "did not join within 1 s"
        assert missing in str(error), (how, error)


def come_alone(
    number: int, size: int, path: str, name: str, ports: list[int]
) -> BaseException | None:
    """Every process waits in a different way for one that never joins."""
    how = list(WAYS)[number]
    if how in ("init", "unisono", "gloo"):
        os.environ.update(torchrun_variables(int(how == "gloo"), 2, ports[number]))
    return attempt(WAYS[how], f"{name}-{how}")


def test_the_default_stays_where_nobody_has_said_anything() -> None:
    assert meeting_timeout_s(None) == 300
    assert meeting_timeout_s(4.0) == 4
    assert meeting_timeout_s(4.0, 7.0) == 7
    assert meeting_timeout_s(None, 7.0) == 7


# Ranks that start together wait until all of them have loaded their modules.
JOIN = """
    import sys, time
    from pathlib import Path
    from unisono import Communicator
    from unisono.comm.meeting import deadline as waits
    name, rank, together, quiet_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    waits.QUIET_S = float(*quiet_s or [waits.QUIET_S])
    Path(f"loaded-{rank}").touch()
    while not all(Path(f"loaded-{other}").exists() for other in together):
        time.sleep(0.01)
    with Communicator.join(name, rank, 3, timeout_s=50) as comm:
        comm.barrier()
"""


def read_error_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


@pytest.fixture
def joiner(tmp_path: Path) -> Program:
    return write_program(tmp_path, JOIN)


def test_whoever_waits_long_says_for_whom(joiner: Program, name: str) -> None:
    """The late one joins once the others have said that they wait."""
    begin_s = time.monotonic()
    early = [joiner.start(name, rank, "01", "1") for rank in "01"]
    lines = [read_error_line(process) for process in early]
    assert time.monotonic() - begin_s >= 1.0
    for rank, line in enumerate(lines):
        assert line.startswith(f"unisono: rank {rank} is waiting for rank 2: 2 of 3 have joined"), (
            line
        )
    for process in (*early, joiner.start(name, "2", "2")):
        _, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, err) == (0, ""), "said once"


def test_nobody_says_anything_where_all_come_soon(joiner: Program, name: str) -> None:
    processes = [joiner.start(name, rank, "012") for rank in "012"]
    for process in processes:
        _, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("waits", [0, 1])
def test_ctrl_c_ends_the_wait_and_leaves_nothing(joiner: Program, name: str, waits: int) -> None:
    process = joiner.start(name, str(waits), str(waits))
    with process:
        assert eventually(lambda: waits_at_a_meeting(process.pid))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert "KeyboardInterrupt" in err
    assert not meeting_files(name)


class InterruptedOnceSaid(FileBoard):
    """Ctrl-C comes between the announcement and the wait."""

    def set(self, name: str, text: str) -> None:
        super().set(name, text)
        if text:
            raise KeyboardInterrupt


def test_ctrl_c_before_the_wait_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        connect_on_host(InterruptedOnceSaid(tmp_path / "meeting"), 0, 2)
    assert not list(tmp_path.iterdir())


def test_in_a_store_all_ranks_know_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks 1, 2 and 5 of 8 wait without rank 0, then with it."""
    monkeypatch.setattr(waits, "QUIET_S", 0.3)
    store = dist.HashStore()
    errors: dict[int, BaseException | None] = {}

    def come(rank: int, within_s: float) -> None:
        errors[rank] = attempt(connect_on_host, Board(store, Deadline(within_s)), rank, 8)

    everyone = (0, 1, 2, 5)
    for ranks, awaited in (
        (everyone[1:], "rank 0"),
        (everyone, "ranks 3, 4, 6 and 7: 4 of 8 have joined"),
    ):
        caplog.clear()
        threads = [threading.Thread(target=come, args=(rank, 1.0)) for rank in ranks]
        with caplog.at_level(logging.WARNING, "unisono"):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        expected = {f"unisono: rank {rank} is waiting for {awaited}" for rank in ranks}
        assert {record.getMessage().partition(" (")[0] for record in caplog.records} == expected
        assert all(isinstance(errors[rank], RendezvousError) for rank in ranks)


def test_a_group_that_is_split_says_it_too(pool: RankPool) -> None:
    ((_, text),) = [line for line in pool.run(split_late, 2) if line]
    assert text.startswith(
        "unisono: rank 0 is waiting for rank 1: 1 of 2 have joined (group world/[0,1]"
    )


def split_late(comm: Communicator) -> tuple[str, str] | None:
    if comm.rank == 0:
        waits.QUIET_S = 0.2
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append  # type: ignore[method-assign,assignment]
        logging.getLogger("unisono").addHandler(handler)
        threading.Thread(target=free_when, args=(records, comm)).start()
    else:
        comm.recv(torch.zeros(1), 0)
    group = comm.split([0, 1])
    assert group is not None
    group.close()
    if comm.rank == 0:
        waits.QUIET_S = 5.0
        logging.getLogger("unisono").removeHandler(handler)
        return records[0].levelname, records[0].getMessage()
    return None


def free_when(records: list[logging.LogRecord], comm: Communicator) -> None:
    """Let rank 1 continue once rank 0 has said that it waits."""
    while not records:
        time.sleep(0.01)
    comm.send(torch.ones(1), 1)


def test_a_store_whose_host_ends_is_named(fresh_pool: RankPool) -> None:
    """Rank 0 hosts the store, and exits while rank 1 waits in it for rank 2."""
    _, waited = fresh_pool.outcomes(lose_the_host, 2, free_port(), connected=False)
    assert isinstance(waited.value, RendezvousError), waited
    assert "torch Store of the meeting does not answer" in str(waited.value)


def lose_the_host(rank: int, size: int, path: str, port: int) -> BaseException | None:
    os.environ.update(torchrun_variables(rank, 3, port))
    waits.QUIET_S = 0.3
    handler = logging.Handler()
    logging.getLogger("unisono").addHandler(handler)
    if rank == 1:
        handler.emit = lambda record: Path(path).touch()  # type: ignore[method-assign]
    else:
        threading.Thread(target=end_when_it_exists, args=(path,)).start()
    return attempt(unisono.init, timeout_s=20)


def end_when_it_exists(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)
    os._exit(0)


def test_infinite_patience_is_patience(tmp_path: Path) -> None:
    """A timeout that a socket does not accept works here."""
    errors: list[BaseException | None] = []

    def come(rank: int) -> None:
        name = f"{tmp_path}"
        errors.append(attempt(lambda: Communicator.join(name, rank, 2, timeout_s=float("inf"))))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert errors == [None, None]
    assert not unisono.is_distributed()
