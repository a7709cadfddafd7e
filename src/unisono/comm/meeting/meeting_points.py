"""Where ranks meet without a path or a store: children of one process, which has told them only
their numbers, and processes started separately that know a name."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from unisono.comm.meeting.announcements import about_me, clear_if_over
from unisono.comm.meeting.board import Board, FileBoard
from unisono.comm.meeting.unix_socket import new_socket
from unisono.errors import RendezvousError
from unisono.processes import namespace, start_time

_INSTEAD = "set MASTER_ADDR and MASTER_PORT, or call unisono.init(rank=, size=, rendezvous=a path)"


@contextlib.contextmanager
def rendezvous_of_parent(rank: int, job: str = "") -> Iterator[Path]:
    """The rendezvous file of all children of this process's parent, while they need to meet:
    named after the parent, or after the `job`, if the starter of the ranks has named one, since
    there may be a shell in between. Meanwhile a rank *claims its name*, an abstract socket, so
    that two groups of ranks that one parent starts at the same time fail instead of mixing."""
    if job:
        name = f"unisono-{os.geteuid()}-{hashlib.blake2b(job.encode(), digest_size=8).hexdigest()}"
        who = f"process of job {job}"
    else:
        parent = _parent_pid()
        try:
            began = start_time(parent)
        except OSError as error:
            raise RendezvousError(
                f"process {parent}, which started this rank, is not visible ({error.strerror}): "
                f"{_INSTEAD}"
            ) from error
        name = f"unisono-{os.geteuid()}-{namespace('pid')}-{parent}-{began}"
        who = f"child of process {parent}"
    with _claim_name(
        f"{name}-{rank}",
        f"another {who} is rank {rank} right now: for two groups of ranks at once {_INSTEAD}",
    ):
        if rank == 0:
            _remove_stale_files()
        yield _folders()[0] / name


@contextlib.contextmanager
def meeting_by_name(name: str, rank: int | None, board: Board | None) -> Iterator[Board]:
    """Where processes that know the name announce themselves: on a board, or in a file. Not in a
    folder that the environment names: a service and a shell of one user have different ones. A
    `rank` is claimed meanwhile."""
    if board is not None:
        yield board.part(f"unisono/join/{name}")
        return
    place = FileBoard(*(folder / file_of(name) for folder in _folders()))
    if rank is None:
        yield place
        return
    complaint = (
        f"another process is joining {name!r} as rank {rank} right now: each rank must be one "
        "process, and two jobs at once need two names"
    )
    with _claim_name(f"{file_of(name)}-{rank}", complaint):
        if rank == 0:
            _remove_stale_files()
        yield place


def file_of(name: str) -> str:
    short = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    return f"unisono-{os.geteuid()}-join-{short}"


def _folders() -> list[Path]:
    own = f"/run/user/{os.geteuid()}"
    return [Path(own), Path("/tmp")] if is_private(own) else [Path("/tmp")]


def _remove_stale_files() -> None:
    """Remove the files, of any name, of ranks 0 that were killed while they waited."""
    me = about_me("")
    for folder in _folders():
        for file in folder.glob(f"unisono-{os.geteuid()}-*"):
            clear_if_over(FileBoard(file), me)


@contextlib.contextmanager
def _claim_name(name: str, complaint: str) -> Iterator[None]:
    """Hold a name that only one process at a time can have, and that ends with it; or raise
    RendezvousError with the complaint."""
    with new_socket() as taken:
        try:
            taken.bind(b"\0" + name.encode())
        except OSError as error:
            raise RendezvousError(
                f"{complaint} (a process holds the name @{name}: {error.strerror})"
            ) from error
        yield


def _parent_pid() -> int:
    started_by = multiprocessing.parent_process()
    if started_by is not None and started_by.pid is not None:
        return started_by.pid  # with a fork server this is not the kernel's parent
    parent = os.getppid()
    if parent <= 1:
        raise RendezvousError(
            "rank and world_size do not say where to meet, and no process is visible that "
            f"started all ranks: {_INSTEAD}"
        )
    return parent


def is_private(folder: str) -> bool:
    with contextlib.suppress(OSError):
        status = os.stat(folder)
        return status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
    return False
