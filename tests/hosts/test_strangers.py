"""A job with a secret, and a process without it that reads and writes the store, connects to every
port, and even knows how the job's groups are numbered: it cannot join, and ends nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_jobs import Places, moment, places, set_moment
from namespaces import MakeNetwork

from ranks import Outcome, RankPool, attempt
from unisono import Communicator, PeerLost, RendezvousError
from unisono.comm.factory import connect
from unisono.comm.hosts.frames import Session
from unisono.comm.hosts.hosts_transport import HostsTransport
from unisono.comm.meeting.board import Board, FileBoard
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.meeting.membership import JoinRequest, Membership, meet_by
from unisono.comm.meeting.unix_socket import RendezvousServer

SECRET = "s" * 32
RANKS = 3
_dist: Any = dist
_hosted: list[Any] = []


def enter(rank: int, where: Places | None) -> str:
    """Be on this rank's host, a namespace or one by name alone; returns rank 0's address."""
    if where is None:
        os.environ["UNISONO_HOSTID"] = "abcd"[rank]
        return "127.0.0.1"
    where.host(rank).enter()
    return where.hosts[0].ipv4


def store_of(rank: int, path: str, address: str) -> Any:
    """torch's store, at rank 0; as every process reaches it, with a secret or without."""
    if rank == 0:
        made = _dist.TCPStore(address, 0, None, True, wait_for_workers=False)
        Path(f"{path}-draft").write_text(str(made.port))
        Path(f"{path}-draft").rename(f"{path}-port")
        set_moment(path, "store")
        _hosted.append(made)  # others may still ask it
        return made
    moment(path, "store")
    port = int(Path(f"{path}-port").read_text())
    return _dist.TCPStore(address, port, None, False, wait_for_workers=False)


def ports() -> list[int]:
    """Where processes of this network listen."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return sorted({int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A"})


# -- the job ---------------------------------------------------------------------------------------


def start(rank: int, path: str, where: Places | None) -> Communicator:
    address = enter(rank, where)
    before = set(ports())
    store = store_of(rank, path, address)
    os.environ["UNISONO_JOB_SECRET"] = SECRET
    comm = connect(Board(store), rank, RANKS, timeout_s=30)
    transport = comm.transport
    assert isinstance(transport, HostsTransport)
    links = transport.links
    own = [port for port in ports() if port not in before]
    about = {"address": links.hosts.address, "ports": own, "key": transport.key}
    about |= {"worker": links._contacts[rank].worker, "proof": links.workers([1])[0][2]}
    Path(f"{path}-about-{rank}").write_text(json.dumps(about))
    assert comm.decide(1, 5) == 5
    comm.barrier()
    set_moment(path, f"works-{rank}")
    return comm


def work(rank: int, path: str, where: Places | None, victim: bool) -> Any:
    comm = start(rank, path, where)
    sums = set()
    is_over = torch.zeros(1)
    while not is_over:
        is_over = torch.tensor([float(rank == 0 and Path(f"{path}-attacked").exists())])
        comm.all_reduce(is_over)
        x = torch.full((5000,), float(rank))
        comm.all_reduce(x)
        sums.add(float(x.sum()))
    assert sums == {5000 * 3.0}
    assert comm.decide(2, 7) == 7
    comm.barrier()
    if victim:
        os.kill(os.getpid(), signal.SIGKILL)
    error = attempt(lambda: [comm.all_reduce(torch.ones(1)) for _ in range(100_000)])
    assert isinstance(error, PeerLost), error
    left = comm.shrink()
    x = torch.full((5000,), 1.0 + left.rank)
    left.all_reduce(x)
    assert x.eq(3.0).all(), (left.global_ranks, x.unique())
    left.barrier()
    left.close()
    return left.global_ranks


# -- the stranger ----------------------------------------------------------------------------------


def attack(path: str, where: Places | None) -> dict[str, Any]:
    """Everything, while the job runs; returns what it found out."""
    address = enter(RANKS, where)
    store = store_of(RANKS, path, address)
    for rank in range(RANKS):
        moment(path, f"works-{rank}")
    about = [json.loads(Path(f"{path}-about-{rank}").read_text()) for rank in range(RANKS)]
    seen = {key: store.get(key) for key in store.list_keys()}
    for name in guesses(about[0]["key"]):
        for text in (b"7", json.dumps({"text": "[9, 1]", "gone": [0, 1]}).encode(), *seen.values()):
            if not store.check([name]):
                store.set(name, text)
    for one in about:
        for port in {*one["ports"], store.port}:
            for first in greetings(about):
                knock(one["address"], port, first)
    speak_as_rank(1, about, path, proofs=(0, 0))
    time.sleep(1.0)  # for what it has set off, if anything, to reach every rank
    set_moment(path, "attacked")
    return {"keys": list(seen), "texts": list(seen.values()), "key": about[0]["key"]}


def guesses(key: int) -> Iterator[str]:
    """Names under which the job would look, if it used any that can be guessed."""
    for number in range(4):
        yield f"unisono/end/{number}"
        yield f"unisono/decision/{key:x}/{number}"
        yield f"unisono/survivors/{key:x}/said/{number}"
        yield f"unisono/survivors/{key:x}/choice/{number}"
        yield f"unisono/survivors/{key:x}/outcome/{number}"
        for meeting in ("hosts", "proofs", "contacts"):
            yield f"unisono/{meeting}/2/{number}"


def greetings(about: list[dict[str, Any]]) -> Iterator[bytes]:
    yield b""
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield os.urandom(4096)
    for rank in range(RANKS):
        for other in range(RANKS):
            caller = Session(b"t" * 32, rank, other, is_summons=rank > other)
            yield caller.first_bytes() + bytes(96)
        yield struct.pack("<IQ", 0xCAFEBABE, 1) + bytes.fromhex(about[rank]["worker"])


def knock(address: str, port: int, first: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection((address, port), 5.0) as caller:
        caller.sendall(first)
        caller.settimeout(0.02)
        caller.recv(4096)


def speak_as_rank(
    rank: int, about: list[dict[str, Any]], path: str, proofs: tuple[int, int]
) -> None:
    """Send the end of the group to rank 0 by UCX, with the number of the group, which only its
    ranks know."""
    from unisono.comm.engine import native
    from unisono.comm.hosts import ucx

    ucx.load(ucx.find())
    here = enter_address(about[rank]["address"])
    native.open_network(ucx.settings(ucx.find(), here))
    request = JoinRequest(
        "stranger", 0, 1, Deadline(30), 30.0, segments=[([rank], RANKS, 1), ([0], 1, 1)]
    )
    with contextlib.closing(RendezvousServer()) as server:
        met: Membership = meet_by(FileBoard(f"{path}-stranger"), server, request)
    assert met.inner is not None
    hosts = [0, 1, 2]
    workers = [(bytes.fromhex(one["worker"]), *proofs) for one in about]
    workers[rank] = b"", 0, 0
    met.group.span(met.inner, hosts, about[0]["key"], workers)
    met.group.abort("a stranger says so")
    met.group.close()


def enter_address(of_the_job: str) -> str:
    """Where this process reaches the job from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((of_the_job, 9))
        return str(probe.getsockname()[0])


# -- while a job runs ------------------------------------------------------------------------------


def run_and_attack(rank: int, size: int, path: str, where: Places | None) -> Any:
    return attack(path, where) if rank == RANKS else work(rank, path, where, victim=rank == 2)


def check(outcomes: list[Outcome]) -> None:
    assert outcomes[2].exit_code == -signal.SIGKILL, outcomes[2]
    for outcome in outcomes[:2]:
        assert outcome.value == (0, 1), outcome.error
    found = outcomes[RANKS].value
    assert found, outcomes[RANKS].error
    for told in (*found["texts"], *(key.encode() for key in found["keys"])):
        assert SECRET.encode() not in told
        assert f"{found['key']:x}".encode() not in told


@pytest.mark.parametrize("hosts", [0, 2], ids=["one-host", "two-hosts"])
def test_a_running_job_is_its_own(
    fresh_pool: RankPool, make_network: MakeNetwork, hosts: int
) -> None:
    with contextlib.ExitStack() as stack:
        where = None
        if hosts:
            made = stack.enter_context(make_network(hosts + 1))
            where = places(made, (0, 1, 1, 2))
        check(fresh_pool.outcomes(run_and_attack, RANKS + 1, where, connected=False))


def be_ended_by_one_that_knows_all(rank: int, size: int, path: str) -> Any:
    if rank < RANKS:
        comm = start(rank, path, None)
        return str(attempt(lambda: [comm.barrier() for _ in range(100_000)]))
    enter(RANKS, None)
    for rank in range(RANKS):
        moment(path, f"works-{rank}")
    about = [json.loads(Path(f"{path}-about-{rank}").read_text()) for rank in range(RANKS)]
    return speak_as_rank(1, about, path, proofs=(about[0]["proof"], 0))


def test_only_the_proof_kept_it_out(fresh_pool: RankPool) -> None:
    told = fresh_pool.run(be_ended_by_one_that_knows_all, RANKS + 1, connected=False)
    assert "a stranger says so" in told[0] or "rank 1 " in told[0]


# -- while a job starts ----------------------------------------------------------------------------


def meet_while(
    rank: int, size: int, path: str, disturb: Callable[[Any, Any, str], None]
) -> str | None:
    """Rank 2 comes once the stranger has done its work. It knows what ranks said in an earlier
    job, with the same secret."""
    if rank == RANKS:
        earlier, store = (store_of(rank, at, "127.0.0.1") for at in (f"{path}-earlier", path))
        for one in range(2):
            moment(path, f"said-{one}")
        disturb(earlier, store, path)
        set_moment(path, "disturbed")
        return None
    os.environ |= {"UNISONO_JOB_SECRET": SECRET, "UNISONO_HOSTID": "abc"[rank]}
    earlier = store_of(rank, f"{path}-earlier", "127.0.0.1")
    connect(Board(earlier), rank, RANKS).close()
    store = store_of(rank, path, "127.0.0.1")
    if rank == 2:
        moment(path, "disturbed")
    board = Board(store, Deadline(6.0), lambda: say_that_it_waits(store, rank, path))
    error = attempt(connect, board, rank, RANKS)
    assert isinstance(error, RendezvousError), error
    return str(error)


def say_that_it_waits(store: Any, rank: int, path: str) -> None:
    if rank < 2 and not Path(f"{path}-said-{rank}").exists():
        set_moment(path, f"said-{rank}")


def delete(earlier: Any, store: Any, path: str) -> None:
    assert store.delete_key("unisono/hosts/1/0")


def replay(earlier: Any, store: Any, path: str) -> None:
    store.set("unisono/hosts/1/0", earlier.get("unisono/hosts/1/0"))


def make_up(earlier: Any, store: Any, path: str) -> None:
    store.set("unisono/hosts/1/0", json.dumps({"number": "0", "pid": 1, "host": "far"}))


DAMAGED = "rank 0 wrote to the torch Store of the meeting, and another process has deleted"


@pytest.mark.parametrize(
    ("disturb", "told"),
    [
        (delete, [DAMAGED] * 3),
        (replay, [DAMAGED, "did not join", "did not join"]),
        (make_up, ["have different secrets"] * 3),
    ],
)
def test_who_disturbs_a_meeting_is_told(
    fresh_pool: RankPool, disturb: Callable[..., None], told: list[str]
) -> None:
    errors = fresh_pool.run(meet_while, RANKS + 1, disturb, connected=False)
    for error, expected in zip(errors, told, strict=False):
        assert expected in error, errors
