"""The hosts of these tests are hosts: separate, joined by a cable, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import Link, MakeNetwork, Network, network, start_on, start_torchrun

from user_programs import WriteProgram, eventually, lives, plain_environment

CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 7), timeout=0.3)
except ConnectionRefusedError:
    print("there")  # its kernel has answered
except OSError as error:
    print(error)
"""
LISTEN = r"""
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.create_server((sys.argv[1], 4000), family=family) as server:
    print("listening", flush=True)
    received = 0
    with server.accept()[0] as connection:
        while part := connection.recv(1 << 20):
            received += len(part)
    print("received", received, flush=True)
"""
SEND = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 4000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
print(time.monotonic() - began)
"""


def reaches(made: Network, address: str) -> bool:
    """Whether host 0 reaches an address."""
    return made.hosts[0].run(sys.executable, "-c", CONNECT, address).strip() == "there"


def test_hosts_reach_each_other_and_nobody_else(two_hosts: Network) -> None:
    first, second = two_hosts.hosts
    assert reaches(two_hosts, second.ipv4)
    assert reaches(two_hosts, second.ipv6)
    assert "default" not in first.run("ip", "route") + first.run("ip", "-6", "route")
    assert first.run("hostname") == "host0\n"
    assert second.run("hostname") == "host1\n"


def test_hosts_share_neither_sockets_nor_processes_nor_memory(two_hosts: Network) -> None:
    first, second = two_hosts.hosts
    first.run("touch", "/dev/shm/left-here")
    assert second.run("ls", "/dev/shm") == ""
    for kind in ("net", "ipc", "uts", "pid"):
        names = {host.run("readlink", f"/proc/self/ns/{kind}") for host in two_hosts.hosts}
        assert len(names | {os.readlink(f"/proc/self/ns/{kind}") + "\n"}) == 3


@pytest.mark.parametrize("way", ["cut", "unplug"])
def test_a_cut_cable_lets_nothing_through_until_it_is_mended(two_hosts: Network, way: str) -> None:
    second = two_hosts.hosts[1]
    getattr(second, way)()
    assert not reaches(two_hosts, second.ipv4)
    second.mend()
    assert eventually(lambda: reaches(two_hosts, second.ipv4), 10)


def test_the_rate_of_a_cable_and_its_counters(make_network: MakeNetwork, tmp_path: Path) -> None:
    payload = 2_000_000
    with make_network(2, Link(rate_bits_per_s=80_000_000, burst_bytes=64 * 1024)) as made:
        first, second = made.hosts
        environment = plain_environment()
        listen = [sys.executable, "-c", LISTEN, second.ipv4]
        server = start_on(second, listen, tmp_path / "server", environment)
        assert eventually(lambda: "listening" in server.text())
        before = first.interface_bytes()[0]
        seconds = float(first.run(sys.executable, "-c", SEND, second.ipv4, str(payload)))
        assert server.wait() == 0
        sent = first.interface_bytes()[0] - before
    assert f"received {payload}" in server.text()
    assert payload < sent < 1.08 * payload
    assert seconds > (payload - 2 * 64 * 1024) / 10_000_000


def test_a_host_without_ipv4(make_network: MakeNetwork) -> None:
    with make_network(2, ipv4=False) as made:
        assert reaches(made, made.hosts[1].ipv6)
        assert not reaches(made, made.hosts[1].ipv4)


def test_nothing_stays_of_hosts(make_network: MakeNetwork, tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), make_network(2) as made:
        host = made.hosts[0]
        sleeper = start_on(host, ["sleep", "1000"], tmp_path / "output", plain_environment())
        assert eventually(lambda: "sleep" in host.run("ps", "-eo", "comm"))
        raise ZeroDivisionError
    assert sleeper.wait(10) != 0
    assert eventually(lambda: not lives(host.pid), 10)  # the kernel takes a moment


HOLD = """
import sys
sys.path.insert(0, sys.argv[1])
from namespaces import network
with network(1) as made:
    print(made.hosts[0].pid, flush=True)
    sys.stdin.read()
"""


def test_hosts_end_with_the_process_that_made_them(make_network: MakeNetwork) -> None:
    assert make_network is network
    maker = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with maker:
        assert maker.stdout is not None
        first_process = int(maker.stdout.readline())
        assert lives(first_process)
        maker.kill()
    assert eventually(lambda: not lives(first_process), 10)


def test_killing_a_host_ends_all_its_processes(two_hosts: Network, tmp_path: Path) -> None:
    first, second = two_hosts.hosts
    sleepers = [
        start_on(host, ["sleep", "1000"], tmp_path / host.name, plain_environment())
        for host in (first, second)
    ]
    assert eventually(lambda: "sleep" in second.run("ps", "-eo", "comm"))
    second.kill()
    assert sleepers[1].wait(10) != 0
    assert not reaches(two_hosts, second.ipv4)
    assert "sleep" in first.run("ps", "-eo", "comm")
    first.kill_processes()
    assert sleepers[0].wait(10) != 0
    assert lives(first.pid)


@pytest.mark.slow
def test_torchrun_on_two_hosts(two_hosts: Network, program: WriteProgram, tmp_path: Path) -> None:
    script = program("""
        import socket, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        tensor = torch.tensor([dist.get_rank()])
        dist.all_reduce(tensor)
        print(f"\\n{socket.gethostname()} {dist.get_rank()} {tensor.item()}\\n", end="", flush=True)
        """)
    environment = plain_environment() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    nodes = start_torchrun(two_hosts.hosts, (1, 2), [str(script.path)], tmp_path, environment)
    for node in nodes:
        assert node.wait() == 0, node.text()
    assert "host0 0 3" in nodes[0].text()
    assert {"host1 1 3", "host1 2 3"} <= set(nodes[1].text().splitlines())
