"""Which ranks share a host.

Each rank publishes in the store where it is: the boot of its machine and its network namespace, to
which the sockets belong by which ranks of one host meet; or UNISONO_HOSTID instead. That is a
claim. The proof: a rank that claims the host of another connects to a socket of it that has no name
outside that host's kernel.

No dataclasses: making one takes a millisecond at the start of every process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from unisono import variables
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.roster import gather
from unisono.comm.meeting.unix_socket import descriptors_needed, peer_uid
from unisono.errors import RendezvousError
from unisono.processes import boot_id, namespace


class Hosts:
    """Where all ranks of a world are. Hosts are numbered in the order of their lowest global ranks.

    `members` has the global ranks of each host, `names` the hosts' names, `mine` is this rank's
    host; `pids` has every rank's PID on its own host. `address` is where other hosts reach this
    rank, "" if there are none. `secret` is known to the ranks of this world, and in a job
    without a secret to every reader of the store. `boots` identifies the machine that each rank
    runs on: several hosts may be namespaces of one machine.
    """

    def __init__(
        self,
        members: tuple[tuple[int, ...], ...],
        names: tuple[str, ...],
        mine: int,
        pids: tuple[int, ...],
        address: str = "",
        secret: bytes = b"",
        boots: tuple[str, ...] = (),
    ) -> None:
        self.members, self.names, self.mine, self.pids = members, names, mine, pids
        self.address = address
        self.secret = secret
        self.boots = boots

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return len(self.members)

    def host_of(self, global_rank: int) -> int:
        """The number of a rank's host."""
        return next(host for host, ranks in enumerate(self.members) if global_rank in ranks)

    def leader(self, host: int) -> int:
        """The lowest global rank of a host."""
        return self.members[host][0]

    def name_rank(self, global_rank: int) -> str:
        """ "rank 3 (pid 4711 on node7)": a rank as exceptions name it."""
        host = self.names[self.host_of(global_rank)]
        return f"rank {global_rank} (pid {self.pids[global_rank]} on {host})"


class Claim(NamedTuple):
    """Where a rank says it is. `identity` is equal on the ranks of one host; `is_given`: it
    comes from UNISONO_HOSTID; `socket` is where it is reached there, on `machine`; `carrier` is
    what UNISONO_HOSTS asks for between hosts, `boot` identifies the machine."""

    identity: str
    is_given: bool
    name: str
    pid: int
    socket: str
    secret: str
    machine: str = ""
    carrier: str = "ucx"
    boot: str = ""


def find_hosts(board: Board, rank: int, size: int, group: str = "world") -> Hosts:
    """Where the ranks of a world are; every rank calls this, and gets the same result.

    Raises RendezvousError on all ranks if two of them claim one host and cannot meet on it, or if
    hosts have no network between them.
    """
    with contextlib.ExitStack() as stack:
        with descriptors_needed():
            listener = stack.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            )
        told = gather(board, "hosts", rank, size, {"claim": _claim(listener)._asdict()}, group)
        claims = [Claim(**theirs["claim"]) for theirs in told]
        hosts = group_claims(claims, rank)
        if hosts.count == 1 and not any(claim.is_given for claim in claims):
            return hosts  # the ranks prove it when they share a segment
        if hosts.count > 1:
            _check_carriers(claims, hosts)
        from unisono.comm.meeting import network  # not needed on a single host

        hosts.secret = _make_secret(claims)
        addresses: network.Addresses = {}
        try:
            _prove(claims, rank, hosts.leader(hosts.mine))
            addresses = network.find_addresses(board.host) if hosts.count > 1 else {}
            problem = ""
        except RendezvousError as error:  # passed on to all ranks
            problem = str(error)
        seen = hashlib.sha256(hosts.secret).hexdigest()
        says = {"problem": problem, "addresses": addresses, "seen": seen}
        findings = gather(board, "proofs", rank, size, says, group)
    problems = [theirs["problem"] for theirs in findings if theirs["problem"]]
    if problems:
        raise RendezvousError(problems[0])
    if other := [at for at, theirs in enumerate(findings) if theirs["seen"] != seen]:
        raise RendezvousError(
            f"{hosts.name_rank(rank)} and {hosts.name_rank(other[0])} read different texts in the "
            "torch Store of the meeting: another process has replaced one"
        )
    if hosts.count > 1:
        hosts.address = network.choose_address(
            [theirs["addresses"] for theirs in findings],
            rank,
            name_rank=hosts.name_rank,
            may_be_loopback=all(claim.is_given for claim in claims),
        )
    return hosts


def _make_secret(claims: Sequence[Claim]) -> bytes:
    """The secret of the ranks with these claims, which are unpredictable. The job's secret is not
    in the store; without one every reader of the store knows this, too."""
    import hmac

    text = json.dumps([claim._asdict() for claim in claims])
    return hmac.digest(variables.job_secret(), text.encode(), hashlib.sha256)


def group_claims(claims: Sequence[Claim], rank: int) -> Hosts:
    """The hosts of these ranks by their claims, seen from one of them."""
    ranks_of: dict[str, list[int]] = {}
    for member, claim in enumerate(claims):
        ranks_of.setdefault(claim.identity, []).append(member)
    members = tuple(map(tuple, ranks_of.values()))  # in the order of lowest ranks
    names = [claims[ranks[0]].name for ranks in members]
    if len(set(names)) < len(names):  # namespaces of one machine, or machines with one image
        again = {name for name, count in Counter(names).items() if count > 1}
        names = [f"{name}#{at}" if name in again else name for at, name in enumerate(names)]
    mine = next(host for host, ranks in enumerate(members) if rank in ranks)
    pids = tuple(claim.pid for claim in claims)
    boots = tuple(claim.boot for claim in claims)
    return Hosts(members, tuple(names), mine, pids, boots=boots)


def identify_host() -> str:
    """What is equal on the ranks of one host: UNISONO_HOSTID, or what the system reports. Raises
    OSError if there is no /proc."""
    return variables.HOSTID.read() or f"{boot_id()}/{namespace('net')}"


def _claim(listener: socket.socket) -> Claim:
    """This rank's claim; a process that connects to the listener has proved to be
    on this host, since the kernel admits no other."""
    name = f"unisono-{os.urandom(16).hex()}"
    listener.bind(b"\0" + name.encode())
    listener.listen(1024)
    given, machine = variables.HOSTID.read(), socket.gethostname()
    return Claim(
        identify_host(),
        bool(given),
        given or machine,
        os.getpid(),
        name,
        os.urandom(32).hex(),
        machine,
        variables.HOSTS.read() or "ucx",
        boot_id(),
    )


def _check_carriers(claims: Sequence[Claim], hosts: Hosts) -> None:
    """Raise RendezvousError, on all ranks, if they ask for different ones."""
    other = next((at for at, theirs in enumerate(claims) if theirs.carrier != claims[0].carrier), 0)
    if other:
        raise RendezvousError(
            f"{hosts.name_rank(0)} asks for {claims[0].carrier} between hosts, but "
            f"{hosts.name_rank(other)} for {claims[other].carrier}: set UNISONO_HOSTS to the same "
            "on every rank"
        )


def _prove(claims: Sequence[Claim], rank: int, leader: int) -> None:
    """Meet the first rank of this host; raises RendezvousError if that fails."""
    first, own = claims[leader], claims[rank]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as caller:
        caller.settimeout(10.0)
        try:
            caller.connect(b"\0" + first.socket.encode())
            user = peer_uid(caller)
        except OSError as error:
            raise RendezvousError(
                f"rank {leader} (pid {first.pid} on {first.machine}) and rank {rank} (pid "
                f"{own.pid} on {own.machine}) have the same host id, {own.identity}"
                f"{' (UNISONO_HOSTID)' if own.is_given else ''}, but rank {rank} cannot find the "
                f"other on its machine ({error.strerror or error}): has it ended? If they are on "
                "different machines, set a different UNISONO_HOSTID on each"
            ) from error
    if user != os.geteuid():
        raise RendezvousError(
            f"on host {own.name} rank {leader} runs as user {user} and rank {rank} as "
            f"{os.geteuid()}: ranks of one host share memory, so they must run as the same user"
        )
