"""Runs one buggy program on several ranks, and returns what was said about it.

Ranks are forked from a process that has loaded torch, so that a program takes seconds and not a
minute. Each writes to its own file. A run ends when every rank has exited, when enough was said, or
when some rank has given a verdict and the others have had time to give theirs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP and optimizers would load it, for seconds, in every rank
import torch.distributed as dist

import unisono.torch_backend.creation
import unisono.torch_backend.process_group
import unisono.watch.attach
import unisono.watch.sanitizer.session  # noqa: F401  all that ranks need, loaded once
from unisono import watch
from unisono.processes import end_with_parent

sys.path.append(str(Path(__file__).parents[1] / "hosts"))
from namespaces import Host, network

HANG_S = 1.0
PORT = 29400
PEERS = ("gloo", "detail", "monitored")
"""The setups without us."""
PEERS_S = 2.0
HOSTS = {"hosts": 2, "four_hosts": 4}
"""Setups over hosts, and how many; they need root."""
_GRACE_S = 2.5
_LOOK_S = 0.5
"""In this time the watch says that a wait which it has reported is over."""


@dataclass(frozen=True)
class Outcome:
    """What the ranks wrote, by rank, and whether they all ended by themselves; after how many
    seconds the first report came, 0 if none did."""

    said: tuple[str, ...]
    ended: bool
    told_s: float = 0.0

    @property
    def verdicts(self) -> list[str]:
        """The first lines of all reports, once each."""
        lines = [
            line.partition("unisono.watch: ")[2]
            for text in self.said
            for line in text.splitlines()
            if "unisono.watch: " in line
        ]
        return list(dict.fromkeys(lines))


def run_program(
    program: Path,
    ranks: int,
    setup: str,
    deadline_s: float = 20.0,
    grace_s: float = _GRACE_S,
    enough: Callable[[Outcome], bool] = lambda outcome: False,
) -> Outcome:
    """Run `program` on `ranks` ranks; for no longer than `grace_s` after the first verdict.
    `setup` is one of

    unisono, watched (gloo, watched), checked (the same, with its calls checked), hosts and
    four_hosts (gloo, watched, over two hosts or four): ours;
    gloo, detail (gloo with TORCH_DISTRIBUTED_DEBUG), monitored (gloo with a monitored barrier
    before every collective): what there is without us, with a timeout of two seconds.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        hosts = stack.enter_context(network(HOSTS[setup])).hosts if setup in HOSTS else ()
        pids = [_start(program, rank, ranks, setup, folder, hosts) for rank in range(ranks)]
        files = [Path(folder, f"{rank}.txt") for rank in range(ranks)]
        living = set(pids)
        start = time.monotonic()
        end, told_s = start + deadline_s, 0.0
        try:
            while living and time.monotonic() < end:
                for pid in list(living):
                    if os.waitpid(pid, os.WNOHANG)[0]:
                        living.discard(pid)
                outcome = Outcome(tuple(_read(file) for file in files), not living)
                if not told_s and outcome.verdicts:
                    told_s = time.monotonic() - start
                    end = min(end, time.monotonic() + grace_s)
                if told_s and enough(outcome):
                    end, enough = min(end, time.monotonic() + _LOOK_S), lambda _: False
                time.sleep(0.02)
        finally:  # all of them at once: none has time to tell that another is gone
            said = tuple(_read(file) for file in files)
            for pid in living:
                os.kill(pid, signal.SIGKILL)
            for pid in living:
                os.waitpid(pid, 0)
        return Outcome(said, not living, told_s)


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""


def _start(
    program: Path, rank: int, ranks: int, setup: str, folder: str, hosts: Sequence[Host]
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    runner = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    end_with_parent(runner)
    code = 1
    try:
        output = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        code = _be_rank(program, rank, ranks, setup, folder, hosts)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _be_rank(
    program: Path, rank: int, ranks: int, setup: str, folder: str, hosts: Sequence[Host]
) -> int:
    import atexit

    atexit._clear()  # what the parent registered belongs to the parent
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.chdir(program.parent)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(ranks)
    os.environ["UNISONO_WATCH_FOLDER"] = folder
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr, force=True)
    torch.set_num_threads(1)
    if setup == "detail":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    ours = setup not in PEERS
    store: dist.Store = dist.FileStore(f"{folder}/store", ranks)
    if hosts:  # in blocks; over four hosts no host has two ranks
        hosts[rank * len(hosts) // ranks].enter()
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        store = dist.TCPStore(hosts[0].ipv4, PORT, ranks, is_master=rank == 0)
    if ours:
        watch.start(hang_s=HANG_S, check=setup == "checked")
        if "\n# silent: " in program.read_text():
            watch.sanitize()
    backend = "unisono" if setup == "unisono" else "gloo"
    timeout = timedelta(seconds=600 if ours else PEERS_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    dist.barrier()
    if setup == "monitored":
        _monitor_every_collective()
    code = 0
    try:
        runpy.run_path(program.name, run_name="__main__")
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException as error:
        traceback.print_exc()
        sys.last_value = error
        code = 1
    atexit._run_exitfuncs()
    return code


def _monitor_every_collective() -> None:
    """The best use of `monitored_barrier`: before each call, naming all missing ranks."""
    for name in ("all_reduce", "broadcast", "all_gather", "barrier"):
        setattr(dist, name, functools.partial(_monitored, getattr(dist, name)))


def _monitored(call: Any, *args: Any, **named: Any) -> Any:
    limit = timedelta(seconds=PEERS_S)
    dist.monitored_barrier(named.get("group"), limit, wait_all_ranks=True)
    return call(*args, **named)


if __name__ == "__main__":  # the program, which ends by itself; ranks, setup
    file, ranks, setup = sys.argv[1:]
    outcome = run_program(Path(file).resolve(), int(ranks), setup, deadline_s=90, grace_s=90)
    print(json.dumps(asdict(outcome)))
