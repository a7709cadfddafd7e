"""How the watch gets between torch.distributed and its process groups."""

from __future__ import annotations

import contextlib
import functools
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from unisono.comm.communicator import Communicator
from unisono.comm.engine import Operation, Status, native
from unisono.comm.hosts.links import GroupMembers, Links, Party
from unisono.comm.hosts.placement import place
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.deadline import Deadline
from unisono.comm.meeting.identity import find_hosts
from unisono.comm.meeting.roster import gather
from unisono.comm.shared_memory.group_parts import BACKEND_MARK, Part, name_part
from unisono.comm.shared_memory.ledger import Ledger
from unisono.errors import RendezvousError, UnisonoError
from unisono.processes import boot_id, namespace
from unisono.watch.calls import MOST_MEMBERS, PARTLY_HERE
from unisono.watch.job_view import open_links
from unisono.watch.sight import watched_groups
from unisono.watch.torch_group import WatchedProcessGroup, notice_captures

Explain = Callable[[WatchedProcessGroup], Any]
_WATCHED = ("gloo", "nccl", "mpi")
_HELPER = "_new_process_group_helper"
_POSITIONAL = 6
"""size, rank, members, backend, store, name"""
_MEETING_S = 60.0
_torch: Any = c10d
_logger = logging.getLogger("unisono")


def attach(
    check: bool, explain: Explain, leave: Callable[[], None], made: Callable[[Any], object]
) -> None:
    """Replace every group that torch makes from now on by a watched one. `leave` is called before
    one is destroyed, `made` with every group."""
    detach()
    if torch.cuda.is_available():
        notice_captures()
    original = getattr(_torch, _HELPER)

    @functools.wraps(original)
    def helper(*args: Any, **named: Any) -> Any:
        end = _record(*args)  # not in a context manager: its lines would become the site
        try:
            group, store = original(*args, **named)
        except BaseException:
            end(Status.ABORTED)
            raise
        end(Status.OK)
        if isinstance(group, dist.ProcessGroup) and store is not None:
            group = _watch_group(group, store, args[2], check, explain, leave)
            made(group)
        return group, store

    helper.original = original  # type: ignore[attr-defined]
    setattr(_torch, _HELPER, helper)


def detach() -> None:
    """Do not watch groups that are made from now on."""
    original = getattr(getattr(_torch, _HELPER), "original", None)
    if original is not None:
        setattr(_torch, _HELPER, original)


def _record(*given: Any) -> Callable[[int], object]:
    """Record that a group is made, among the records of the world: its members and the line. All
    ranks make all groups, and torch counts them; those whose names are not numbers are made by
    their members alone. Returns a function that ends the record."""
    records = _records_of_world()
    if records is None or len(given) < _POSITIONAL:
        return lambda status: None
    members, number = given[2], int(given[5]) if str(given[5]).isdigit() else 0
    named = sum(1 << rank for rank in members)
    if dist.get_world_size() > MOST_MEMBERS:
        if not number:
            return lambda status: None
        named = zlib.crc32(repr(list(members)).encode()) << MOST_MEMBERS // 2
    record = records.record_open(Operation.NEW_GROUP, 0, -1, 0, named, number)
    return lambda status: records.record_end(record, status)


def _records_of_world() -> Any:
    """The recorder of the default group, if that exists and is watched."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if isinstance(group, WatchedProcessGroup):
        return group.ledger.group
    return getattr(getattr(getattr(group, "comm", None), "transport", None), "group", None)


def _watch_group(
    inner: Any,
    store: Any,
    global_ranks: Sequence[int],
    check: bool,
    explain: Explain,
    leave: Callable[[], None],
) -> Any:
    world = _torch._world
    ours = isinstance(getattr(inner, "comm", None), Communicator)  # it keeps records itself
    if ours or isinstance(inner, WatchedProcessGroup) or inner not in world.pg_map:
        return inner
    backend = str(world.pg_map[inner][0])
    if not any(name in backend for name in (*_WATCHED, "undefined")):
        return inner
    if backend == "undefined":  # init_process_group without a backend
        names = (str(inner._get_backend(device).name()) for device in inner._device_types)
        backend = ",".join(sorted({*names}))
    try:
        board = Board(store, Deadline(_MEETING_S)).part("unisono_watch")
        ledger, members = _open_ledger(inner, board, backend, global_ranks)
    except (UnisonoError, RuntimeError, OSError) as error:
        _logger.warning("unisono.watch: group %s is not watched: %s", inner.group_name, error)
        return inner
    compares = check and ledger.is_whole
    watched = WatchedProcessGroup(inner, ledger, members, compares, explain, leave)
    kind = _torch.Backend.backend_type_map
    for device in inner._device_types:
        name = str(inner._get_backend(device).name())
        watched._register_backend(
            device, kind.get(name, dist.ProcessGroup.BackendType.CUSTOM), inner._get_backend(device)
        )
    with contextlib.suppress(RuntimeError, AttributeError):
        watched.bound_device_id = inner.bound_device_id
    _replace(inner, watched)
    watched_groups.add(watched)
    return watched


def _open_ledger(
    inner: Any, board: Board, backend: str, global_ranks: Sequence[int]
) -> tuple[Ledger, list[int]]:
    """The ledger of the members on this machine, and which members it has places for: these, or all
    if the other hosts can be asked."""
    rank, size = inner.rank(), inner.size()
    name = {"default_pg": "world", "undefined": ""}.get(inner.group_desc, inner.group_desc)
    name = str(name or inner.group_name)
    told = gather(board, "watch", rank, size, {"is": _host()}, name)
    mine = [other for other in range(size) if told[other]["is"] == _host()]
    part = None
    if len(mine) < size:
        try:
            part = HostPart.open(board.until(Deadline(_MEETING_S)), rank, size, name, global_ranks)
        except (UnisonoError, OSError) as error:
            _logger.warning("unisono.watch: group %s is watched host by host: %s", name, error)
        if part is not None and list(part.placement.here) != mine:  # it has several PID namespaces
            part.close()
            part = None
        name += PARTLY_HERE if part is None else ""
    ledger = Ledger.open(
        board.until(Deadline(_MEETING_S)).part(f"from {mine[0]}"),
        mine.index(rank),
        len(mine),
        name=name,
        introduction=part.introduction(backend) if part else f"{name}{BACKEND_MARK}{backend}",
        global_rank=dist.get_rank() if dist.is_initialized() else rank,
        places=mine if part else (),
        of=size if part else 0,
    )
    if part is None:
        return ledger, mine
    ledger.on_close = part.close
    return ledger, list(range(size))


def _host() -> str:
    """Identifies this machine for processes that can see each other: boot and namespaces."""
    return f"{boot_id()} {namespace('net')} {namespace('pid')}"


def _replace(old: Any, new: Any) -> None:
    """Put the new group in torch's tables in place of the old one."""
    world = _torch._world
    hooks = getattr(world, "pg_flight_recorder_hooks", {})  # since 2.15
    tables = (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, hooks)
    for table in tables:
        if old in table:
            table[new] = table.pop(old)
    if old in world.pg_to_tag:
        world.pg_to_tag[new] = world.pg_to_tag.pop(old)
    for members in world.tags_to_pg.values():
        members[:] = [new if group is old else group for group in members]
    with contextlib.suppress(RuntimeError):
        _torch._unregister_process_group(old.group_name)
    _torch._register_process_group(old.group_name, new)


# -- the part of one host --------------------------------------------------------------------------

_CONNECT_S = 10.0
"""How long the first lines may take; if they fail, a later question tries again."""


class HostPart(Party):
    """Of a group of these global ranks. Readers of the job use the links; the records go with the
    process."""

    def __init__(self, links: Links, name: str, members: Sequence[int]) -> None:
        self.links = links.share()
        self.name, self.placement = name, place(members, links.hosts, links.me)
        self.key = links.next_key(f"watch {name} of {members}")
        links.add(self)
        native.hold_aborts(True)  # the watching thread lets them go

    @classmethod
    def open(
        cls, board: Board, rank: int, size: int, name: str, members: Sequence[int]
    ) -> HostPart | None:
        """This rank's part, with all other ranks of the group; the world has no `members`. None if
        no other host can be asked. Raises RendezvousError."""
        if members:
            links = next(iter(open_links()), None)
            return cls(links, name, members) if links is not None else None
        hosts = find_hosts(board, rank, size, name)
        if hosts.count == 1:
            return None
        links = Links(board, hosts, rank)
        links.meet(board, name, has_data=False)
        part = cls(links, name, range(size))
        with contextlib.suppress(RendezvousError):
            links.connect(part.placement.neighbours(), min(_CONNECT_S, board.deadline.left_s()))
        return part

    def introduction(self, backend: str) -> str:
        """What the ranks of this host say about themselves in the records."""
        hosts = self.links.hosts
        return name_part(self.name, Part(f"{self.key:x}", hosts.names[hosts.mine]), backend)

    def close(self) -> None:
        """The group is left."""
        self.links.close(self.key)

    def describe(self) -> GroupMembers:
        return GroupMembers(self.name, f"{self.key:x}", self.placement.members)
