"""What the machine gives: kernel features, memory, limits, cores, the way to oneself."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from unisono.comm import engine
from unisono.doctor.findings import Finding, fail, ok, warn
from unisono.errors import EngineUnavailable
from unisono.launcher import share

FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}
FUTEX_WAKE_PRIVATE = 129
DOCKER_SHM_BYTES = 64 << 20
FEW_FILES = 256
FILES_PER_RANK = 8
"""Pipes, a pidfd and a socket for each rank that a process starts or knows."""
LOAD_S = 0.3
"""How long the cores are looked at; the kernel counts in hundredths of a second."""
RANK_BYTES = 150 << 20
"""Private memory of a rank that has imported torch: measured, 2.13 on Linux."""


def findings(ranks: int) -> Iterator[Finding]:
    """Everything about this machine that matters to `ranks` ranks."""
    yield from _kernel()
    yield _memory(ranks)
    yield _shared_folder()
    yield from _limits(ranks)
    yield from _cores(ranks)
    yield from _load(ranks)
    yield from _network()


# -- the kernel ------------------------------------------------------------------------------------


def _kernel() -> Iterator[Finding]:
    if sys.platform != "linux":
        yield fail("kernel", sys.platform, "Use Linux: shared memory, pidfd and futex are its own.")
        return
    works = {
        "memfd": _opens(lambda: os.memfd_create("unisono-doctor")),
        "pidfd": _opens(lambda: os.pidfd_open(os.getpid())),
        "futex": _has_futex(),
    }
    have = [name for name, answer in works.items() if answer]
    lack = [name for name, answer in works.items() if not answer]
    text = f"Linux {platform.release()}: {', '.join(have) or 'nothing'}"
    if not lack:
        yield ok("kernel", text)
    if "memfd" in lack:
        advice = "Allow memfd_create in the sandbox; until then a file in /dev/shm is used."
        if _opens(lambda: os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)):
            yield warn("kernel", f"{text}; memfd is refused", advice)
        else:
            yield fail("kernel", f"{text}; neither memfd nor /dev/shm", "Allow memfd_create.")
    if "pidfd" in lack:
        yield warn(
            "kernel",
            f"{text}; pidfd is refused",
            "Allow pidfd_open (Linux 5.3): without it a peer's death shows only as a timeout.",
        )
    if "futex" in lack:
        yield fail("kernel", f"{text}; futex is refused", "Allow futex in the sandbox.")


def _opens(open_descriptor: Callable[[], int]) -> bool:
    """Whether the kernel gives such a descriptor; an old Python may not know how to ask."""
    try:
        os.close(open_descriptor())
    except (OSError, AttributeError):
        return False
    return True


def _has_futex() -> bool:
    """Wake nobody: the kernel answers 0 where it knows the call, and -1 where it is refused."""
    number = FUTEX_CALLS.get(platform.machine())
    if number is None:
        return True  # the self-test will tell
    futex = ctypes.c_uint32(0)
    called = ctypes.CDLL(None, use_errno=True).syscall
    return bool(called(number, ctypes.byref(futex), FUTEX_WAKE_PRIVATE, 1, None, None, 0) == 0)


# -- memory ----------------------------------------------------------------------------------------


def _memory(ranks: int) -> Finding:
    try:
        room = engine.memory_room()
    except EngineUnavailable:
        room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fitting = room // RANK_BYTES
    text = f"{size(room)} free below all limits: room for about {fitting} ranks with torch"
    if fitting < ranks:
        return fail("memory", text, "Raise the container's memory limit or start fewer ranks.")
    if fitting < 2 * ranks:
        return warn("memory", text, f"{ranks} ranks leave little for models: raise the limit.")
    return ok("memory", text)


def _shared_folder() -> Finding:
    """unisono's own memory has no name and is not bounded by /dev/shm; that of others is."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError as error:
        return warn(
            "/dev/shm",
            f"not there ({error.strerror}); unisono does not need it",
            "Mount a tmpfs on it: NCCL and torch's data loaders use it.",
        )
    total, free = stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
    text = f"{size(free)} of {size(total)} free; unisono does not need it"
    if free <= DOCKER_SHM_BYTES:
        return warn(
            "/dev/shm",
            text,
            "NCCL and data loaders do: start the container with --shm-size=1g or --ipc=host.",
        )
    return ok("/dev/shm", text)


def _limits(ranks: int) -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(FEW_FILES, FILES_PER_RANK * ranks + 64)
    if files != resource.RLIM_INFINITY and files < wanted:
        yield warn(
            "open files",
            f"{files} allowed, {bound(most)} possible",
            f"Run `ulimit -n {wanted}` or more before starting many ranks.",
        )
    else:
        yield ok("open files", f"{bound(files)} allowed")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = bound(locked, size)
    if locked != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir():
        yield warn("locked memory", text, "Run `ulimit -l unlimited`: InfiniBand pins memory.")
    else:
        yield ok("locked memory", f"{text}; only InfiniBand needs more")
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        yield warn(
            "address space",
            f"limited to {size(space)}",
            "Run `ulimit -v unlimited`: every rank maps the memory of all ranks of its groups.",
        )


# -- cores and threads -----------------------------------------------------------------------------


def _cores(ranks: int) -> Iterator[Finding]:
    usable, allowed = share.core_count(), len(share.cores())
    text = f"{usable} usable: {os.cpu_count()} in the machine, {allowed} by affinity"
    if usable < allowed:
        text += f", {usable} by the CPU quota"
    if ranks > usable:
        yield warn(
            "cores", f"{text}, {ranks} ranks", "Ranks will share cores: fewer of them run faster."
        )
    else:
        yield ok("cores", text)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    fitting = max(1, usable // ranks)
    text = f"OMP_NUM_THREADS={threads}, times {ranks} ranks, on {usable} cores"
    if not threads:
        text = (
            f"OMP_NUM_THREADS is not set: unisono gives each of {ranks} ranks {fitting}, "
            f"mp.spawn would give each {usable}"
        )
        yield ok("threads", text)
    elif not threads.isdigit() or int(threads) == 0:
        yield warn("threads", f"OMP_NUM_THREADS={threads}", "Give it a whole number.")
    elif int(threads) * ranks > max(usable, ranks):
        yield warn(
            "threads",
            text,
            f"Set OMP_NUM_THREADS={fitting} or leave it to unisono: threads that wait for a core "
            "slow every collective down.",
        )
    else:
        yield ok("threads", text)


def _load(ranks: int) -> Iterator[Finding]:
    """Whether others use the cores at this moment: then every time that is measured is noise."""
    try:
        before = busy_seconds(Path("/proc/stat").read_text(), share.cores())
        start = time.monotonic()
        time.sleep(LOAD_S)
        after = busy_seconds(Path("/proc/stat").read_text(), share.cores())
    except (OSError, ValueError):
        return  # not Linux, or a sandbox: the finding on the kernel says so
    busy = max(0.0, (after - before) / (time.monotonic() - start))
    cores = len(share.cores())
    text = f"{busy:.1f} of {cores} cores busy at this moment, with other processes"
    if cores - busy < min(ranks, cores) - 0.5:
        yield warn(
            "load", text, "Wait until they are done before you measure: times are noisy until then."
        )
    else:
        yield ok("load", text)


def busy_seconds(stat: str, cores: Collection[int]) -> float:
    """For how long these cores have worked since the machine started, by the text of /proc/stat."""
    ticks = 0
    for line in stat.splitlines():
        name, *counts = line.split()
        if name.removeprefix("cpu").isdecimal() and int(name.removeprefix("cpu")) in cores:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, counts[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


# -- the way to oneself ----------------------------------------------------------------------------


def _network() -> Iterator[Finding]:
    """unisono needs no network; gloo, NCCL and torch's stores do, even on one machine."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        yield warn(
            "loopback",
            f"127.0.0.1 cannot be reached: {error.strerror or error}",
            "Run `ip link set lo up`: torch's store and gloo need it, unisono does not.",
        )
    else:
        yield ok("loopback", "127.0.0.1 answers; unisono needs no network, gloo and stores do")
    host = socket.gethostname()
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        yield warn(
            "host name",
            f"{host} does not resolve",
            "Add it to /etc/hosts or set GLOO_SOCKET_IFNAME=lo: gloo finds its address that way.",
        )
    else:
        yield ok("host name", f"{host} resolves")


def size(count: int) -> str:
    """Bytes for a reader."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"


def bound(value: int, show: Callable[[int], str] = str) -> str:
    """A limit for a reader."""
    return "unlimited" if value == resource.RLIM_INFINITY else show(value)
