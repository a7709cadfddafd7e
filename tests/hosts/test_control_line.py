"""Lines between processes of different hosts, with real processes in namespaces."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from namespaces import Host, Network

from ranks import RankPool, raised
from resources import assert_given_back, held_resources
from unisono.comm.hosts.control_line import ControlLines
from unisono.errors import RendezvousError
from user_programs import eventually

SOON_S = 20.0


class Talker:
    """A process with a line to each other process, and what they have told it."""

    def __init__(
        self,
        rank: int,
        size: int,
        path: str,
        addresses: Sequence[str],
        secret: bytes = b"s" * 32,
        on_summons: Callable[[int], None] = lambda peer: None,
    ) -> None:
        self.rank, self.size = rank, size
        self.store = dist.FileStore(path, size)
        self.messages: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self.losses: queue.Queue[tuple[int, str, float]] = queue.Queue()
        self._address, self._secret, self._on_summons = addresses[rank], secret, on_summons

    def make(self) -> ControlLines:
        lines = ControlLines(
            self._address,
            self.rank,
            self._secret,
            lambda peer, message: self.messages.put((peer, message)),
            lambda peer, why: self.losses.put((peer, why, time.monotonic())),
            self._on_summons,
        )
        self.store.set(f"where/{self.rank}", json.dumps(lines.where))
        return lines

    def where_is(self, peer: int) -> tuple[str, int]:
        address, port = json.loads(self.store.get(f"where/{peer}"))
        return address, port

    def connect(self, timeout_s: float = SOON_S) -> ControlLines:
        lines = self.make()
        try:
            for peer in range(self.size):
                if peer != self.rank:
                    lines.connect(peer, self.where_is(peer), timeout_s)
        except BaseException:
            lines.close()
            raise
        return lines

    def send_all(self, lines: ControlLines, message: dict[str, Any]) -> None:
        for peer in range(self.size):
            lines.send(peer, message)  # which has no line to itself

    def receive(self) -> tuple[int, dict[str, Any]]:
        return self.messages.get(timeout=SOON_S)


LOCAL = ("127.0.0.1",) * 4


def talk(rank: int, size: int, path: str, addresses: Sequence[str], hosts: Sequence[Host]) -> Any:
    if hosts:
        hosts[rank].enter()
    talker = Talker(rank, size, path, addresses)
    before = held_resources()
    lines = talker.connect()
    talker.send_all(lines, {"from": rank})
    for number in range(100):
        lines.send((rank + 1) % size, {"number": number, "text": "x" * 10_000})
    talker.send_all(lines, {"done": True})
    arrived = [talker.receive() for _ in range(2 * (size - 1) + 100)]
    lines.close()
    lines.close()
    lines.send(1 - min(rank, 1), {"too": "late"})
    assert_given_back(before)
    assert talker.losses.empty()
    assert talker.messages.empty()
    assert sum("done" in message for _, message in arrived) == size - 1
    heard = sorted(message["from"] for _, message in arrived if "from" in message)
    numbers = [(host, message["number"]) for host, message in arrived if "number" in message]
    return heard, numbers


@pytest.mark.parametrize("size", [2, 4])
def test_messages_arrive_in_order_and_nothing_is_left(pool: RankPool, size: int) -> None:
    results = pool.run(talk, size, LOCAL, (), connected=False)
    for rank, (heard, numbers) in enumerate(results):
        assert heard == [other for other in range(size) if other != rank]
        assert numbers == [((rank - 1) % size, number) for number in range(100)]


def test_ipv6(fresh_pool: RankPool, two_hosts: Network) -> None:
    addresses = [host.ipv6 for host in two_hosts.hosts]
    results = fresh_pool.run(talk, 2, addresses, two_hosts.hosts, connected=False)
    assert [len(numbers) for _, numbers in results] == [100, 100]


def summon(rank: int, size: int, path: str, caller: int) -> Any:
    summons: queue.Queue[int] = queue.Queue()
    talker = Talker(rank, size, path, LOCAL, on_summons=summons.put)
    lines = talker.make()
    other = 1 - rank
    where = talker.where_is(other)
    if rank == caller:
        lines.want(other, where, SOON_S, summons=True)
        lines.connect(other, where, SOON_S)
        lines.send(other, {"from": rank})
        assert talker.receive() == (other, {"from": other})
        assert summons.empty()
    else:
        if caller == 0:  # of two, the higher one connects
            assert summons.get(timeout=SOON_S) == other
            lines.connect(other, where, SOON_S)
        assert talker.receive() == (other, {"from": other})
        lines.send(other, {"from": rank})
    lines.close()
    assert talker.losses.empty()


@pytest.mark.parametrize("caller", [0, 1])
def test_a_rank_that_knows_of_nothing_is_summoned(pool: RankPool, caller: int) -> None:
    pool.run(summon, 2, caller, connected=False)


# -- losses --------------------------------------------------------------------------------------


def die(rank: int, size: int, path: str) -> Any:
    talker = Talker(rank, size, path, LOCAL)
    lines = talker.connect()
    if rank == 1:
        child = os.fork()  # it must not keep the line open
        if child == 0:
            signal.pause()
        talker.send_all(lines, {"child": child, "time": time.monotonic()})
        for _ in range(2):
            talker.receive()
        os.kill(os.getpid(), signal.SIGKILL)
    _, told = talker.receive()
    lines.send(1, {"heard": True})
    try:
        host, why, lost = talker.losses.get(timeout=SOON_S)
    finally:
        if rank == 0:
            os.kill(told["child"], signal.SIGKILL)
    lines.send(1, {"to": "nobody"})
    other = 2 - rank
    lines.send(other, {"still": "here"})
    assert talker.receive() == (other, {"still": "here"})
    lines.close()
    assert talker.losses.empty()
    return host, why, lost - told["time"]


def test_a_killed_process_is_lost_at_once_and_once(fresh_pool: RankPool) -> None:
    outcomes = fresh_pool.outcomes(die, 3, connected=False)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error is None
        host, why, took_s = outcome.value
        assert (host, why) == (1, "has ended")
        assert took_s < 3.5  # silence would show it after 4 s


def be_cut_off(rank: int, size: int, path: str, hosts: Sequence[Host], way: str) -> Any:
    hosts[rank].enter()
    talker = Talker(rank, size, path, [host.ipv4 for host in hosts])
    lines = talker.connect()
    talker.send_all(lines, {"ready": True})
    for _ in range(size - 1):
        talker.receive()
    if rank == 1:
        getattr(hosts[1], way)()
        talker.store.set("cut", str(time.monotonic()))
    cut = float(talker.store.get("cut"))
    losses = [talker.losses.get(timeout=SOON_S) for _ in range(size - 1 if rank == 1 else 1)]
    lines.close()
    return [(host, why, lost - cut) for host, why, lost in losses]


@pytest.mark.parametrize("way", ["cut", pytest.param("unplug", marks=pytest.mark.slow)])
def test_a_cut_cable_shows_on_both_sides(fresh_pool: RankPool, make_network: Any, way: str) -> None:
    with make_network(3) as made:
        results = fresh_pool.run(be_cut_off, 3, made.hosts, way, connected=False)
    for rank, losses in enumerate(results):
        assert sorted(host for host, _, _ in losses) == ([0, 2] if rank == 1 else [1])
        for _, why, took_s in losses:
            assert why.startswith("no longer answers (")
            assert took_s < 5 + 1.5  # for a busy machine


def leave_in_turn(rank: int, size: int, path: str) -> Any:
    talker = Talker(rank, size, path, LOCAL)
    lines = talker.connect()
    if rank == 0:
        lines.close()
        talker.store.set("left", "")
        return
    talker.store.get("left")
    other = 3 - rank
    lines.send(0, {"to": "nobody"})
    lines.send(other, {"hello": rank})
    assert talker.receive() == (other, {"hello": other})
    lines.close()
    assert talker.losses.empty()


def test_a_goodbye_is_no_loss(pool: RankPool) -> None:
    pool.run(leave_in_turn, 3, connected=False)


def be_stopped(rank: int, size: int, path: str) -> Any:
    talker = Talker(rank, size, path, LOCAL)
    lines = talker.connect()
    if rank == 1:
        lines.send(0, {"pid": os.getpid()})
        talker.receive()
        lines.close()
        return None
    pid = talker.receive()[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(queue.Empty):
        talker.losses.get(timeout=4.5)
    os.kill(pid, signal.SIGCONT)
    lines.send(1, {"go": "on"})
    lines.close()
    return None


@pytest.mark.slow
def test_a_stopped_process_is_not_lost(fresh_pool: RankPool) -> None:
    fresh_pool.run(be_stopped, 2, connected=False)


# -- strangers -----------------------------------------------------------------------------------


def meet_strangers(rank: int, size: int, path: str) -> Any:
    """Rank 2 is not in the job, and connects wherever it can."""
    if rank == 2:
        store = dist.FileStore(path, 2)
        address, port = "127.0.0.1", int(store.get("port"))
        callers = [socket.create_connection((address, port)) for _ in range(200)]
        for number, caller in enumerate(callers):
            if number % 3 == 0:
                caller.sendall(b"GET / HTTP/1.1\r\n" * 10)
            elif number % 3 == 1:
                caller.close()
        store.set("strangers", "")
        for caller in callers:
            caller.close()
        return None
    talker = Talker(rank, 2, path, LOCAL)
    if rank == 1:
        talker.store.get("strangers")
        lines = talker.connect()
    else:
        finder = threading.Thread(target=tell_port, args=(path,))
        finder.start()
        lines = talker.connect()
        finder.join()
    talker.send_all(lines, {"from": rank})
    assert talker.receive() == (1 - rank, {"from": 1 - rank})
    lines.close()
    return None


def tell_port(path: str) -> None:
    """As soon as rank 0 has announced where it listens."""
    store = dist.FileStore(path, 2)
    assert eventually(lambda: store.check(["where/0"]))
    store.set("port", str(json.loads(store.get("where/0"))[1]))


def test_strangers_are_ignored(pool: RankPool) -> None:
    pool.run(meet_strangers, 3, connected=False)


def disagree(rank: int, size: int, path: str) -> str:
    before = held_resources()[1]
    talker = Talker(rank, size, path, LOCAL, secret=bytes([rank]) * 32)
    error = raised(RendezvousError, talker.connect, 1.0)
    assert eventually(lambda: held_resources()[1] <= before, 20)
    return str(error)


def test_without_the_same_secret_there_is_no_line(pool: RankPool) -> None:
    texts = pool.run(disagree, 2, connected=False)
    assert re.match(r"no connection to 127.0.0.1 port \d+ within 1 s \(", texts[0])
    assert "does not know the secret" in texts[1]


def find_nobody(rank: int, size: int, path: str, hosts: Sequence[Host]) -> Any:
    hosts[rank].enter()
    talker = Talker(rank, size, path, [host.ipv4 for host in hosts])
    if rank == 1:
        hosts[1].cut()
    return str(raised(RendezvousError, talker.connect, 1.0))


def test_a_host_that_cannot_be_reached(fresh_pool: RankPool, two_hosts: Network) -> None:
    began = time.monotonic()
    texts = fresh_pool.run(find_nobody, 2, two_hosts.hosts, connected=False)
    assert texts[0].startswith("no connection to 10.77.0.2 port")
    assert texts[1].startswith("no connection to 10.77.0.1 port")
    assert time.monotonic() - began < SOON_S
