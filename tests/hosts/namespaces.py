"""Hosts for tests and benchmarks: Linux namespaces on one machine, joined by virtual cables.

Each host has its own network, IPC, host name, processes and /dev/shm, and one interface, eth0,
whose cable ends in a switch, which is a namespace, too. Nothing has a name outside: a host ends
with its first process, and that process ends with the one that created it. The kernel then removes
all processes, cables and mounts, whatever has happened. Needs root, ip, tc and unshare.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

COMMAND_S = 30.0
"""How long a set-up command may take."""

# The first process says that it is ready, and stays until the other end of its input is closed.
_FIRST_PROCESS = "hostname {name} && mount -t tmpfs tmpfs /dev/shm && echo here && exec cat"

_RANDOM_WORD = 0xFFFFF000 + 56
"""SKF_AD_OFF + SKF_AD_RANDOM of linux/filter.h: where a packet filter reads a random number."""

_WHERE_THREADS_WAIT = (
    "cd /proc; grep -as . [0-9]*/cmdline [0-9]*/task/*/comm [0-9]*/task/*/wchan || true"
)


@functools.cache
def why_not() -> str:
    """Why this machine cannot create hosts; "" if it can."""
    if os.geteuid() != 0:
        return "hosts as network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"hosts as network namespaces need {' and '.join(missing)}"
    trial = "ip link add name a type veth peer name b"
    made = subprocess.run(
        ["unshare", "--net", "--ipc", "--uts", "--pid", "--fork", "--mount-proc", *trial.split()],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    return f"no network namespaces here: {made.stderr.strip()}" if made.returncode else ""


@dataclass(frozen=True)
class Link:
    """What a cable carries, each way; without a rate, as much as the machine can."""

    rate_bits_per_s: int = 0
    burst_bytes: int = 256 * 1024
    queue_bytes: int = 4 * 1024 * 1024

    def shape(self, device: str) -> str:
        """As an argument of tc."""
        return (
            f"qdisc add dev {device} root tbf rate {self.rate_bits_per_s}bit "
            f"burst {self.burst_bytes} limit {self.queue_bytes}\n"
        )


@dataclass(frozen=True)
class Host:
    """One host; `pid` is its first process, as seen from outside, `port` its end in the switch."""

    name: str
    ipv4: str
    ipv6: str
    pid: int
    port: str
    holder_pid: int
    switch_pid: int

    def command(self, *command: str, folder: str | Path = "/") -> list[str]:
        """The command prefix that runs a command on this host."""
        enter = ["nsenter", "-t", str(self.pid), "--net", "--ipc", "--uts", "--pid", "--mount"]
        return [*enter, "env", "-C", str(folder), *command]

    def run(self, *command: str) -> str:
        """Run a short command here, and return what it prints."""
        return _run(self.command(*command))

    def enter(self) -> None:
        """Move this process, which has one thread, to the host: to its network, IPC and name. Its
        pid and parent stay the same, so `kill` does not end it."""
        libc = ctypes.CDLL(None, use_errno=True)
        for kind in ("net", "ipc", "uts"):
            with open(f"/proc/{self.pid}/ns/{kind}") as namespace:
                if libc.setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns to the {kind} of {self.name}")

    def interface_bytes(self) -> tuple[int, int]:
        """How many bytes eth0 has sent and received, with the packets' headers."""
        for line in self.run("cat", "/proc/net/dev").splitlines():
            name, _, counts = line.partition(":")
            if name.strip() == "eth0":
                numbers = [int(number) for number in counts.split()]
                return numbers[8], numbers[0]
        raise AssertionError(f"{self.name} has no eth0")

    def cut(self) -> None:
        """Nothing passes any more, and no host is told: as when a switch fails."""
        _in_network(self.switch_pid, "ip", f"link set {self.port} nomaster\n")

    def cut_for(self, seconds: float) -> subprocess.Popen[str]:
        """The same; the process that this returns mends the cable in time, which one that is still
        to start may not do on a busy machine, and ends."""
        cable = f"ip link set {self.port}"
        script = f"{cable} nomaster && echo cut && sleep {seconds} && exec {cable} master switch up"
        command = ["nsenter", "-t", str(self.switch_pid), "--net", "sh", "-c", script]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "cut\n"
        return process

    def unplug(self) -> None:
        """As if the cable were pulled: the interface knows that it has no carrier."""
        _in_network(self.switch_pid, "ip", f"link set {self.port} down\n")

    def shape(self, link: Link) -> None:
        """From now on its cable carries only that, each way."""
        _in_network(self.switch_pid, "tc", link.shape(self.port))
        _in_network(self.pid, "tc", link.shape("eth0"))

    def lose_packets(self, share: float) -> None:
        """From now on its cable loses this share of the packets, each way, at random."""
        # Load a random word; from so much on continue, else drop. netem is not in every kernel.
        program = f"4,32 0 0 {_RANDOM_WORD},53 0 1 {int(share * 2**32)},6 0 0 0,6 0 0 2"
        for pid, device in ((self.switch_pid, self.port), (self.pid, "eth0")):
            at = f"qdisc add dev {device} clsact\nfilter add dev {device} egress"
            _in_network(pid, "tc", f'{at} bpf direct-action bytecode "{program}"\n')

    def mend(self) -> None:
        """After `cut` or `unplug`."""
        _in_network(self.switch_pid, "ip", f"link set {self.port} master switch up\n")

    def send_signal(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a process of this host, by its pid there."""
        self.run("kill", f"-{int(number)}", str(pid))

    def kill(self) -> None:
        """End every process of this host at once, with its network, as in a power failure. Its
        cable goes, too, so that no packet tells the others."""
        self.cut()
        os.kill(self.holder_pid, signal.SIGKILL)  # its child, the first process, ends with it

    def kill_processes(self, number: int = int(signal.SIGKILL)) -> None:
        """End every process but the first; the network stays up, and tells the others."""
        script = "for p in /proc/[0-9]*; do p=${p#/proc/}; "
        script += f"[ $p = 1 ] || [ $p = $$ ] || kill -{number} $p 2>/dev/null; done; true"
        self.run("sh", "-c", script)


@dataclass(frozen=True)
class Network:
    """Hosts on one switch."""

    hosts: tuple[Host, ...]

    def name_hosts(self, folder: Path) -> None:
        """Let them find each other by name, as with a cluster's name service."""
        lines = [f"{host.ipv4} {host.name}\n" for host in self.hosts]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        for host in self.hosts:
            host.run("mount", "--bind", str(folder / "hosts"), "/etc/hosts")


def _make_room_for_neighbours(hosts: int) -> None:
    """All namespaces of a machine share the kernel's table; it stays larger."""
    most = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
    if most.exists() and int(most.read_text()) < 2 * hosts**2:
        most.write_text(str(2 * hosts**2))


@contextlib.contextmanager
def network(
    count: int, link: Link | None = None, *, ipv4: bool = True, ipv6: bool = True
) -> Iterator[Network]:
    """`count` hosts, named host0, host1, ..., which reach each other by eth0. They have the
    addresses 10.77.0.1, ... and fd77::1, ..., which are unreachable from outside.
    """
    link = link or Link()
    _make_room_for_neighbours(count)
    with contextlib.ExitStack() as stack:
        _, switch = stack.enter_context(_first_process(["--net"], "echo here && exec cat"))
        hosts = []
        separate = ["--net", "--ipc", "--uts", "--pid", "--mount-proc"]
        for number in range(count):
            name = f"host{number}"
            script = _FIRST_PROCESS.format(name=name)
            holder, pid = stack.enter_context(_first_process(separate, script))
            addresses = f"10.77.0.{number + 1}", f"fd77::{number + 1:x}"
            hosts.append(Host(name, *addresses, pid, f"port{number}", holder, switch))
        _in_network(switch, "ip", "link add switch type bridge\nlink set switch up\n")
        for host in hosts:
            cable = f"link add {host.port} type veth peer name eth0 netns {host.pid}\n"
            _in_network(switch, "ip", f"{cable}link set {host.port} master switch up\n")
            addresses = ""
            if ipv4:
                addresses += f"addr add {host.ipv4}/24 dev eth0\n"
            if ipv6:  # without waiting to see whether another host already has it
                addresses += f"addr add {host.ipv6}/64 dev eth0 nodad\n"
            _in_network(host.pid, "ip", f"link set lo up\n{addresses}link set eth0 up\n")
            if link.rate_bits_per_s:
                host.shape(link)
        yield Network(tuple(hosts))


MakeNetwork = Callable[..., AbstractContextManager[Network]]
"""The fixture `make_network`, which is `network` if the machine can create one."""


@contextlib.contextmanager
def _first_process(separate: Sequence[str], script: str) -> Iterator[tuple[int, int]]:
    """A process with its own namespaces: the pid of its parent, which it does not survive, and its
    own."""
    holder = subprocess.Popen(
        ["unshare", *separate, "--fork", "--kill-child", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with holder:
        try:
            assert holder.stdout is not None
            assert holder.stderr is not None
            if holder.stdout.readline() != "here\n":
                raise RuntimeError(f"cannot make a namespace: {holder.stderr.read()}")
            children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
            yield holder.pid, int(children)
        finally:
            holder.kill()


def _in_network(pid: int, tool: str, lines: str) -> None:
    _run(["nsenter", "-t", str(pid), "--net", tool, "-batch", "-"], lines)


def _run(command: Sequence[str], text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=COMMAND_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()} {text}")
    return done.stdout


# -- jobs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostProcess:
    """A process that was started on a host, and the file with what it has printed so far."""

    host: Host
    process: subprocess.Popen[bytes]
    output: Path

    def text(self) -> str:
        """What it has printed so far, including errors."""
        return self.output.read_text(errors="replace")

    def wait(self, timeout_s: float = 120.0, beside: Sequence[HostProcess] = ()) -> int:
        """Its exit code. If it does not end in time, the error has the stacks of all processes of
        its host, and of the hosts of those `beside` it."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = f"{self.output.name} on {self.host.name} not done in {timeout_s:g} s:\n"
            ended = [self, *(other for other in beside if other is not self)]
            raise AssertionError(late + "".join(each.end_with_stacks() for each in ended)) from None

    def end_with_stacks(self) -> str:
        """End every process of its host; returns where their threads were, and what it has
        printed, with the stacks that faulthandler adds unless a process was past Python's end."""
        where = self.host.run("sh", "-c", _WHERE_THREADS_WAIT)
        for number in (signal.SIGABRT, signal.SIGCONT):
            self.host.kill_processes(int(number))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(COMMAND_S)
        return f"{self.output.name} on {self.host.name}:\n{where}{self.text()}\n"

    def send_signal(self, number: int) -> None:
        """Send a signal to the process itself, a child of the one that entered the host."""
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), number)


def start_on(
    host: Host,
    command: Sequence[str],
    output: Path,
    environment: Mapping[str, str],
    folder: str | Path = "/",
) -> HostProcess:
    """Start a command on a host; what it prints goes to a file."""
    with open(output, "wb") as file:
        process = subprocess.Popen(
            host.command(*command, folder=folder),
            env={"PYTHONFAULTHANDLER": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return HostProcess(host, process, output)


def start_ranks(
    hosts: Sequence[Host],
    placement: Sequence[int],
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    master: str = "",
) -> list[HostProcess]:
    """Start one process per rank; `placement` gives the number of each rank's host, so (0, 0, 1, 1)
    is in blocks and (0, 1, 0, 1) is cyclic. Rank 2's output is in `folder`/rank2."""
    started = []
    for rank, number in enumerate(placement):
        own = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(placement)),
            "LOCAL_RANK": str(placement[:rank].count(number)),
            "LOCAL_WORLD_SIZE": str(placement.count(number)),
            "MASTER_ADDR": master or hosts[placement[0]].ipv4,
            "MASTER_PORT": "29400",
        }
        output = folder / f"rank{rank}"
        started.append(start_on(hosts[number], command, output, {**environment, **own}, folder))
    return started


def start_torchrun(
    hosts: Sequence[Host],
    ranks: Sequence[int],
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    master: str = "",
) -> list[HostProcess]:
    """Start torchrun once on each host, for as many ranks as `ranks` says; `command` is the script
    and its arguments. Host 1's output is in `folder`/node1."""
    started = []
    for number, (host, count) in enumerate(zip(hosts, ranks, strict=True)):
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += ["--nnodes", str(len(hosts)), "--node-rank", str(number)]
        torchrun += ["--nproc-per-node", str(count), "--master-port", "29400"]
        torchrun += ["--master-addr", master or hosts[0].ipv4]
        output = folder / f"node{number}"
        started.append(start_on(host, [*torchrun, *command], output, environment, folder))
    return started
