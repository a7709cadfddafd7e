"""Which ranks share a host: claimed in the store, proved by connecting."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
from namespaces import Host, MakeNetwork, Network

from ranks import RankPool
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.meeting.identity import Claim, Hosts, find_hosts, group_claims
from unisono.errors import RendezvousError
from user_programs import eventually


def claim(identity: str, name: str = "node", pid: int = 1) -> Claim:
    return Claim(identity, False, name, pid, "", "00")


def test_hosts_are_numbered_by_their_lowest_rank() -> None:
    claims = [claim(identity, f"node-{identity}", 10 + at) for at, identity in enumerate("babcb")]
    hosts = group_claims(claims, 3)
    assert hosts.members == ((0, 2, 4), (1,), (3,))
    assert hosts.names == ("node-b", "node-a", "node-c")
    assert hosts.mine == 2
    assert [hosts.host_of(rank) for rank in range(5)] == [0, 1, 0, 2, 0]
    assert [hosts.leader(host) for host in range(3)] == [0, 1, 3]
    assert hosts.name_rank(4) == "rank 4 (pid 14 on node-b)"


def test_hosts_of_one_name_are_told_apart() -> None:
    hosts = group_claims([claim("a"), claim("b"), claim("c", "other")], 0)
    assert hosts.names == ("node#0", "node#1", "other")


# -- with processes ------------------------------------------------------------------------------

Where = tuple[Host | None, str]
"""A rank's host, if it is not the machine itself, and its UNISONO_HOSTID."""


def find(rank: int, size: int, path: str, where: Sequence[Where], setup: dict[str, str]) -> Hosts:
    host, given = where[rank]
    if host is not None:
        host.enter()
    os.environ.update(setup)
    os.environ["UNISONO_HOSTID"] = given
    hosts = find_hosts(Board(dist.FileStore(path, size), Deadline(20.0)), rank, size)
    assert hosts.pids[rank] == os.getpid()
    return hosts


def test_ranks_of_one_machine_share_a_host(pool: RankPool) -> None:
    found = pool.run(find, 3, [(None, "")] * 3, {}, connected=False)
    assert [hosts.members for hosts in found] == [((0, 1, 2),)] * 3
    assert {hosts.address for hosts in found} == {""}


def test_ranks_that_are_given_one_id_share_a_host(pool: RankPool) -> None:
    found = pool.run(find, 2, [(None, "east")] * 2, {}, connected=False)
    assert [hosts.members for hosts in found] == [((0, 1),)] * 2


def test_the_variable_decides(pool: RankPool) -> None:
    where = [(None, "east"), (None, "west"), (None, "east")]
    found = pool.run(find, 3, where, {"MASTER_ADDR": "127.0.0.1"}, connected=False)
    assert {hosts.members for hosts in found} == {((0, 2), (1,))}
    assert {hosts.names for hosts in found} == {("east", "west")}
    assert [hosts.mine for hosts in found] == [0, 1, 0]
    assert {hosts.address for hosts in found} == {"127.0.0.1"}
    secrets = {hosts.secret for hosts in found}
    assert len(secrets) == 1
    assert len(secrets.pop()) == 32


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_namespaces_are_hosts(fresh_pool: RankPool, two_hosts: Network, family: str) -> None:
    first, second = two_hosts.hosts
    where = [(first, ""), (second, ""), (first, ""), (second, "")]
    setup = {"MASTER_ADDR": getattr(first, family), "GLOO_SOCKET_IFNAME": ""}
    found = fresh_pool.run(find, 4, where, setup, connected=False)
    assert {hosts.members for hosts in found} == {((0, 2), (1, 3))}
    assert {hosts.names for hosts in found} == {("host0", "host1")}
    places = [getattr(host, family) for host, _ in where if host is not None]
    assert [hosts.address for hosts in found] == places


def test_the_named_interface_wins(fresh_pool: RankPool, make_network: MakeNetwork) -> None:
    with make_network(2, ipv4=False) as made:
        where = [(host, "") for host in made.hosts]
        setup = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
        found = fresh_pool.run(find, 2, where, setup, connected=False)
    assert [hosts.address for hosts in found] == ["fd77::1", "fd77::2"]


def test_a_name_that_means_loopback_on_its_own_host(
    fresh_pool: RankPool, two_hosts: Network
) -> None:
    """As if /etc/hosts had 127.0.1.1 for the host's own name: the route to the others decides."""
    where = [(host, "") for host in two_hosts.hosts]
    found = fresh_pool.run(find_with_own_master, 2, where, connected=False)
    assert [hosts.address for hosts in found] == ["10.77.0.1", "10.77.0.2"]


def find_with_own_master(rank: int, size: int, path: str, where: Sequence[Where]) -> Hosts:
    master = "127.0.0.1" if rank == 0 else "10.77.0.1"
    return find(rank, size, path, where, {"MASTER_ADDR": master, "GLOO_SOCKET_IFNAME": ""})


def errors_of(pool: RankPool, where: Sequence[Where], setup: dict[str, str]) -> list[str]:
    """What each rank raises, which must be a RendezvousError of one sentence."""
    outcomes = pool.outcomes(find, len(where), where, setup, connected=False)
    texts = [str(outcome.error) for outcome in outcomes]
    assert all(RendezvousError.__name__ in text for text in texts), texts
    return [text.partition(f"{RendezvousError.__name__}: ")[2] for text in texts]


@pytest.mark.parametrize("others", [0, 1])
def test_machines_with_one_id_are_told_of_the_variable(
    fresh_pool: RankPool, two_hosts: Network, others: int
) -> None:
    """Whether they appear to be all ranks, or one host of several."""
    first, second = two_hosts.hosts
    where = [(first, "a"), (second, "a"), *[(second, "b")] * others]
    texts = errors_of(fresh_pool, where, {"MASTER_ADDR": "10.77.0.1"})
    assert len(set(texts)) == 1
    assert re.match(
        r"rank 0 \(pid \d+ on host0\) and rank 1 \(pid \d+ on host1\) have the same host id, a "
        r"\(UNISONO_HOSTID\), but rank 1 .* different UNISONO_HOSTID",
        texts[0],
    )


def test_loopback_between_hosts_is_refused(fresh_pool: RankPool, two_hosts: Network) -> None:
    where = [(host, "") for host in two_hosts.hosts]
    texts = errors_of(fresh_pool, where, {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": ""})
    assert re.match(
        r"rank 1 \(pid \d+ on host1\) .*loopback.* 127.0.0.1.*MASTER_ADDR",
        texts[1],
    )


def test_an_interface_that_one_host_lacks(fresh_pool: RankPool, two_hosts: Network) -> None:
    where = [(two_hosts.hosts[0], "a"), (None, "b"), (None, "b")]
    two_hosts.hosts[0].run("ip", "link", "set", "lo", "name", "loop0")
    texts = errors_of(fresh_pool, where, {"GLOO_SOCKET_IFNAME": "loop0"})
    assert len(set(texts)) == 1
    assert re.match(r"GLOO_SOCKET_IFNAME is loop0, but \S+ has no such interface: it has", texts[0])


# -- the secret of a job -------------------------------------------------------------------------

SECRET, OTHER = "s" * 32, "t" * 32


def find_knowing(rank: int, size: int, path: str, secrets: Sequence[str]) -> bytes:
    setup = {"MASTER_ADDR": "127.0.0.1", "UNISONO_JOB_SECRET": secrets[rank]}
    return find(rank, size, path, [(None, host) for host in "abc"], setup).secret


def find_and_read_the_store(rank: int, size: int, path: str) -> tuple[bytes, bytes]:
    kept = dist.FileStore(path, size)  # otherwise the file is removed with its last user
    secret = find_knowing(rank, size, path, [SECRET] * size)
    told = Path(path).read_bytes()
    kept.add("readers", 1)
    assert eventually(lambda: kept.add("readers", 0) == size)
    return secret, told


def test_the_store_does_not_tell_the_secret(fresh_pool: RankPool) -> None:
    found = fresh_pool.run(find_and_read_the_store, 3, connected=False)
    ((secret, told), *_) = found
    assert {theirs for theirs, _ in found} == {secret}
    assert b"unisono/proofs" in told
    assert SECRET.encode() not in told
    assert secret.hex().encode() not in told


@pytest.mark.parametrize("other", ["", OTHER])
def test_a_rank_with_another_secret_is_told_so_and_all_are(
    fresh_pool: RankPool, other: str
) -> None:
    secrets = [SECRET, SECRET, other]
    outcomes = fresh_pool.outcomes(find_knowing, 3, secrets, connected=False)
    for rank, outcome in enumerate(outcomes):
        pair = (rank, 2) if rank < 2 else (2, 0)
        assert re.search(
            r"RendezvousError: group world: rank {} \(pid \d+ on .\) and rank {} \(pid \d+ on .\) "
            r"have different secrets. Set UNISONO_JOB_SECRET".format(*pair),
            str(outcome.error),
        )
        assert SECRET not in str(outcome.error)
