"""The board: what processes leave in a torch Store for each other. With a job's secret it is
sealed, and what a stranger has written is refused wherever it is read."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from made_up_hosts import join_world
from ranks import RankPool, raised
from unisono import Communicator, RendezvousError
from unisono.comm.hosts.hosts_transport import HostsTransport
from unisono.comm.meeting.board import LEADER, Board, FileBoard, Foreign, StoreGone
from unisono.comm.meeting.deadline import LimitOfEach, Waiting
from unisono.training import init_weight_update_group

SECRET, OTHER = "s" * 32, "t" * 32
DIFFERENT = "have different secrets. Set UNISONO_JOB_SECRET"
_dist: Any = dist


def board_knowing(secret: str, store: Any) -> Board:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_JOB_SECRET", secret)
        return Board(store)


@pytest.mark.parametrize("secret", ["", SECRET])
def test_a_board_keeps_texts_and_numbers(secret: str) -> None:
    board = board_knowing(secret, _dist.HashStore())
    part = board.part("a").part("b")
    assert board.get("x") == part.get("x") == ""
    board.set("x", "one")
    assert (board.get("x"), part.get("x")) == ("one", "")
    assert not board.get_all(["x", "y"])
    assert part.compare_set("x", "", "first") == "first"
    assert part.compare_set("x", "", "second") == "first"
    assert part.compare_set("x", "first", "third") == "third"
    assert board.get_all(["x", "a/b/x"]) == ["one", "third"]
    assert (board.has(["x"]), board.has(["x", "y"])) == (True, False)
    assert [board.add("n"), board.add("n", 2), board.add("n", 0)] == [1, 3, 3]


@pytest.mark.parametrize("other", ["", OTHER])
def test_a_text_of_a_stranger_is_refused(other: str) -> None:
    store = _dist.HashStore()
    board, stranger = board_knowing(SECRET, store), board_knowing(other, store)
    stranger.set("x", "hello")
    board.set("y", "hi")
    for refused in (
        lambda: board.get("x"),
        lambda: board.get_all(["y", "x"]),
        lambda: board.compare_set("x", "", "mine"),
        lambda: stranger.get("y"),
    ):
        error = raised(Foreign, refused)
        assert DIFFERENT in str(error)
        assert error.text == ("hi" if error.name == "y" else "hello")


def test_a_sealed_text_counts_under_its_own_name_alone() -> None:
    store = _dist.HashStore()
    board = board_knowing(SECRET, store)
    board.set("x", "hello")
    store.set("y", store.get("x"))
    store.set("part/x", store.get("x"))
    raised(Foreign, board.get, "y")
    raised(Foreign, board.part("part").get, "x")
    assert board.get("x") == "hello"


def test_a_store_that_does_not_answer_is_given_up() -> None:
    class Silent:
        def check(self, keys: list[str]) -> bool:
            time.sleep(5)
            return True

    error = raised(StoreGone, Board(Silent(), LimitOfEach(0.1)).has, ["x"])
    assert "did not answer within 0.1 s" in str(error)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that other hosts could reach, in a job with a secret."""
    monkeypatch.setenv("UNISONO_JOB_SECRET", SECRET)
    return _dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def test_a_growing_group_that_a_stranger_made_up_is_refused(store: Any) -> None:
    about = {"name": "job~1", "generation": 1, "global_ranks": None, "members": 1, "size": 2}
    store.set(f"unisono/grow/job/{LEADER}", json.dumps(about | {"timeout_s": 9.0}))
    begin_s = time.monotonic()
    with pytest.raises(RendezvousError, match=DIFFERENT):
        Communicator.join("job", store=store, timeout_s=60)
    assert time.monotonic() - begin_s < 30


def test_a_stranger_that_joins_is_named(store: Any) -> None:
    entry = {"number": "0", "size": 2, "pid": 4711, "machine": "far", "host": "far"}
    store.set("unisono/roll/job/1", json.dumps(entry))
    with pytest.raises(RendezvousError, match=rf"rank 1 \(pid 4711 on far\) {DIFFERENT}"):
        Communicator.join("job", 0, 2, store, timeout_s=60)


def test_a_worker_that_a_stranger_made_up_gets_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_JOB_SECRET", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def write() -> None:
        store = _dist.TCPStore("127.0.0.1", port, None, False)
        entry = {"number": "0", "size": 2, "pid": 4711, "machine": "far", "host": "far"}
        store.set("unisono/weights/weights/1", json.dumps(entry | {"backend": "auto"}))

    stranger = threading.Thread(target=write)
    stranger.start()
    try:
        with pytest.raises(RendezvousError, match=rf"rank 1 \(pid 4711 on far\) {DIFFERENT}"):
            init_weight_update_group("127.0.0.1", port, 0, 2, join_timeout_s=60)
    finally:
        stranger.join()


def read_what_a_stranger_wrote(rank: int, size: int, path: str) -> tuple[str, str, int]:
    """The last words of rank 1, before and after a stranger writes some under the name that they
    have without a secret; and how many are left by a vote with a choice of the stranger's."""
    os.environ["UNISONO_JOB_SECRET"] = SECRET
    world = join_world(rank, path, "ab")
    assert isinstance(world.transport, HostsTransport)
    links, store = world.transport.links, _dist.FileStore(f"{path}-store", size)
    if rank == 1:
        links.reopen_board(5.0).set("unisono/end/1", "exits with status 3")
    world.barrier()
    before = links.last_words_of(1)
    world.barrier()
    choice = {"members": "0", "token": "0", "refusal": "the stranger forbids it"}
    if rank == 0:
        store.set("unisono/end/1", "was taken over")
        store.set(f"unisono/survivors/{world.transport.key:x}/choice/1", json.dumps(choice))
    world.barrier()
    after = links.last_words_of(1)
    world.barrier()
    left = world.shrink()
    world.close()
    return before, after, left.size


def test_neither_last_words_nor_votes_are_a_strangers(fresh_pool: RankPool) -> None:
    for *told, left in fresh_pool.run(read_what_a_stranger_wrote, 2, connected=False):
        assert told == ["exits with status 3"] * 2
        assert left == 2


def test_hidden_names_are_those_of_ranks_that_know_the_key() -> None:
    store = _dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    plain = board_knowing(SECRET, store).part("a")
    mine, other = plain.hidden(b"k"), plain.hidden(b"l")
    assert mine.compare_set("x", "", "one") == mine.hidden(b"k").get("x") == "one"
    assert mine.add("n") == 1
    assert other.get("x") == plain.get("x") == ""
    assert not any("x" in key or "a/" in key for key in store.list_keys())
    assert board_knowing("", store).hidden(b"k").add("seen") == 1
    assert "seen" in store.list_keys()


def test_numbers_are_sealed() -> None:
    store = _dist.HashStore()
    board = board_knowing(SECRET, store)
    assert [board.add("n"), board.add("n", 2), board.add("n", 0)] == [1, 3, 3]
    store.set("n", "7")
    raised(Foreign, board.add, "n")


def test_processes_add_to_a_sealed_number_at_once() -> None:
    store = _dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    sums: list[int] = []

    def count() -> None:
        board = board_knowing(SECRET, store.clone())
        sums.extend(board.add("n") for _ in range(25))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(sums) == list(range(1, 101))


def test_processes_write_to_an_inherited_file_one_at_a_time() -> None:
    """They share its open file, but no lock on it; nor does one stay locked."""
    descriptor = os.memfd_create("board")
    board = FileBoard(descriptor)
    board.set(LEADER, "{}")
    writers = []
    for _ in range(4):
        if not (pid := os.fork()):
            for _ in range(200):
                board.add("count", 1)
            os._exit(0)
        writers.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in writers] == [0] * 4
    assert board.get("count") == "800"
    with open(f"/proc/self/fd/{descriptor}") as another:
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_a_missing_file_waits_for_no_lock_of_a_stranger(tmp_path: Path) -> None:
    with open(os.devnull) as null:  # which everybody may lock
        fcntl.flock(null, fcntl.LOCK_EX)
        began_s = time.monotonic()
        assert FileBoard(tmp_path / "nothing").get(LEADER) == ""
        assert time.monotonic() - began_s < 5


def test_texts_of_a_file_that_another_replaces_meanwhile_are_not_there(tmp_path: Path) -> None:
    board = FileBoard(tmp_path / "file")
    for name in (LEADER, "0", "1"):
        board.set(name, "{}")
    assert board.get_all(["0", "1"]) == ["{}", "{}"]
    check = board.store.check

    def check_before_a_new_leader(keys: list[str]) -> bool:
        found = bool(check(keys))
        board.set(LEADER, "{}")
        return found

    board.store.check = check_before_a_new_leader
    assert board.get_all(["0", "1"]) == []


@pytest.mark.parametrize("change", ["announced", "added", "in an inherited file", "in another"])
def test_who_waits_at_a_file_wakes_once_it_changes(tmp_path: Path, change: str) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    where = os.memfd_create("board") if change == "in an inherited file" else path
    board = writer = FileBoard(where, other)
    if change == "in another":
        writer = FileBoard(other)
    elif change != "announced":
        board.set(LEADER, "{}")
    board.sleep(0.01)
    assert not board.sleep(0.01)  # nothing has changed since
    name = "text" if board.get(LEADER) else LEADER
    timer = threading.Timer(0.2, writer.set, (name, "{}"))
    timer.start()
    began_s, before_s = time.monotonic(), time.thread_time()
    assert board.part("a").sleep(60.0)
    assert time.monotonic() - began_s < 30
    assert time.thread_time() - before_s < 0.1
    timer.join()
    assert board.get(name) == "{}"
    if isinstance(where, int):
        os.close(where)


def test_a_wait_looks_often_again_once_something_changes() -> None:
    asked: list[float] = []
    waiting = Waiting(
        0, 2, "world", LimitOfEach(60), 0.001, lambda s: asked.append(s) or len(asked) == 9
    )
    for _ in range(11):
        waiting.pause()
    assert asked[:9] == sorted(asked[:9])
    assert asked[8] > 0.02
    assert asked[9:] == [0.001, 0.0015]
