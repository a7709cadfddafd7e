"""The machine: kernel features, memory, limits, cores, loopback; each check returns a finding."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unisono.comm import engine
from unisono.comm.meeting.network import MORE_NEIGHBOURS
from unisono.errors import EngineUnavailable
from unisono.launcher import share
from unisono.plan.sizes import format_bytes

DOCKER_SHM_BYTES = 64 << 20
FEW_FILES = 256
FILES_PER_RANK = 8
"""Pipes, a pidfd and a socket for each rank that a process starts or is connected to."""
RANK_BYTES = 150 << 20
"""Private memory of a rank that has imported torch: measured, 2.13 on Linux."""


Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """`text` says what was found, `advice` in one sentence what to do; empty if nothing is. "warn":
    it works, but not as well as it could, or it may surprise. "fail": it does not work."""

    topic: str
    level: Level
    text: str
    advice: str = ""


def ok(topic: str, text: str) -> Finding:
    return Finding(topic, "ok", text)


def warn(topic: str, text: str, advice: str) -> Finding:
    return Finding(topic, "warn", text, advice)


def fail(topic: str, text: str, advice: str) -> Finding:
    return Finding(topic, "fail", text, advice)


def findings(ranks: int) -> Iterator[Finding]:
    yield _kernel()
    yield _memory(ranks)
    yield _shared_folder()
    yield from _limits(ranks)
    yield _cores(ranks)
    yield _threads(ranks)
    yield from _load(ranks)
    yield _loopback()
    yield from _host_name()
    yield from neighbours()


def _kernel() -> Finding:
    if sys.platform != "linux":
        return fail("kernel", sys.platform, "Use Linux: only it has memfd, pidfd and futex.")
    text = f"Linux {platform.release()}"
    if not _opens(lambda: os.memfd_create("unisono-doctor")):
        if not _opens(lambda: os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)):
            return fail("kernel", f"{text} without memfd and /dev/shm", "Allow memfd_create.")
        advice = "Allow memfd_create in the sandbox; until then a file in /dev/shm is used."
        return warn("kernel", f"{text}; memfd is refused", advice)
    if not _opens(lambda: os.pidfd_open(os.getpid())):
        advice = "Allow pidfd_open (Linux 5.3): without it a peer's death shows only as a timeout."
        return warn("kernel", f"{text}; pidfd is refused", advice)
    return ok("kernel", f"{text}: memfd, pidfd")


def _opens(open_descriptor: Callable[[], int]) -> bool:
    try:
        os.close(open_descriptor())
    except OSError:
        return False
    return True


# -- memory and limits -----------------------------------------------------------------------------


def _memory(ranks: int) -> Finding:
    try:
        room = engine.native.memory_room()
    except EngineUnavailable:
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fitting = room // RANK_BYTES
    text = f"{format_bytes(room)} free below all limits: room for about {fitting} ranks with torch"
    if fitting < ranks:
        return fail("memory", text, "Raise the container's memory limit or start fewer ranks.")
    if fitting < 2 * ranks:
        return warn("memory", text, f"{ranks} ranks leave little for models: raise the limit.")
    return ok("memory", text)


def _shared_folder() -> Finding:
    """unisono's own memory is anonymous and not limited by /dev/shm; that of others is."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError as error:
        text = f"not there ({error.strerror}); unisono does not need it"
        return warn("/dev/shm", text, "Mount a tmpfs on it: NCCL and data loaders use it.")
    total, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    text = f"{format_bytes(free)} of {format_bytes(total)} free; unisono does not need it"
    if free <= DOCKER_SHM_BYTES:
        advice = "NCCL and data loaders do: start the container with --shm-size=1g or --ipc=host."
        return warn("/dev/shm", text, advice)
    return ok("/dev/shm", text)


def _limits(ranks: int) -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(FEW_FILES, FILES_PER_RANK * ranks + 64)
    if files != resource.RLIM_INFINITY and files < wanted:
        text = f"{files} allowed, {_bound(most)} possible"
        advice = f"Run `ulimit -n {wanted}` or more before starting many ranks."
        yield warn("open files", text, advice)
    else:
        yield ok("open files", f"{_bound(files)} allowed")
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        advice = "Run `ulimit -v unlimited`: a rank maps the memory of all ranks of its groups."
        yield warn("address space", f"limited to {format_bytes(space)}", advice)


def _bound(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


# -- cores -----------------------------------------------------------------------------------------


def _cores(ranks: int) -> Finding:
    usable, allowed = share.core_count(), len(share.cores())
    text = f"{usable} usable: {os.cpu_count()} in the machine, {allowed} by affinity"
    if usable < allowed:
        text += f", {usable} by the CPU quota"
    if ranks > usable:
        advice = "Ranks will share cores: fewer of them run faster."
        return warn("cores", f"{text}, {ranks} ranks", advice)
    return ok("cores", text)


def _threads(ranks: int) -> Finding:
    usable = share.core_count()
    fitting = max(1, usable // ranks)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads:
        text = f"OMP_NUM_THREADS is not set: unisono gives each of {ranks} ranks {fitting}"
        return ok("threads", text)
    if not threads.isdigit() or int(threads) == 0:
        return warn("threads", f"OMP_NUM_THREADS={threads}", "Give it a whole number.")
    text = f"OMP_NUM_THREADS={threads}, times {ranks} ranks, on {usable} cores"
    if int(threads) * ranks > max(usable, ranks):
        advice = f"Set OMP_NUM_THREADS={fitting}: threads without a core slow every collective."
        return warn("threads", text, advice)
    return ok("threads", text)


def _load(ranks: int) -> Iterator[Finding]:
    """Whether other programs use the cores: then measured times are noise."""
    try:
        busy = os.getloadavg()[0]
    except OSError:
        return  # no /proc
    cores = os.cpu_count() or 1
    text = f"load average {busy:.1f} over the last minute, on {cores} cores"
    if cores - busy < min(ranks, cores) - 0.5:
        advice = "Measure when the other processes are done: times vary until then."
        yield warn("load", text, advice)
    else:
        yield ok("load", text)


# -- network ---------------------------------------------------------------------------------------


def _loopback() -> Finding:
    """unisono needs no network on one machine; gloo, NCCL and torch's stores do."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        text = f"127.0.0.1 cannot be reached: {error.strerror or error}"
        advice = "Run `ip link set lo up`: torch's store and gloo need it, unisono does not."
        return warn("loopback", text, advice)
    return ok("loopback", "127.0.0.1 answers; unisono needs no network, gloo and stores do")


def _read(path: Path) -> str:
    """The text of a file; "" if unreadable."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _host_name() -> Iterator[Finding]:
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        advice = "Add it to /etc/hosts or set GLOO_SOCKET_IFNAME=lo: gloo looks it up."
        yield warn("host name", f"{host} does not resolve", advice)


def neighbours(
    known: Path = Path("/proc/net/arp"),
    most: Path = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3"),
) -> Iterator[Finding]:
    """Whether the kernel's table of hosts on this network is nearly full."""
    count, limit = len(_read(known).splitlines()) - 1, _read(most)
    if limit.isdecimal() and 2 * count > int(limit):
        text = f"{count} hosts of this network are known, and at most {limit} can be"
        advice = f"{MORE_NEIGHBOURS.capitalize()}: further ones cannot be reached."
        yield warn("neighbours", text, advice)
