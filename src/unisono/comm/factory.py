"""Which transport a group uses: the choice for ranks that are not connected yet."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from functools import partial
from typing import Any

from unisono import variables
from unisono.comm.communicator import Communicator
from unisono.comm.engine.numbers import Operation
from unisono.comm.meeting.announcements import Announcements, StoreAnnouncements
from unisono.comm.meeting.deadline import JOIN_TIMEOUT_S, Deadline, meeting_timeout_s
from unisono.comm.meeting.membership import JoinRequest, check_size, meet_by
from unisono.comm.meeting.unix_socket import Departed, RendezvousServer
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.comm.transport import DEFAULT_TIMEOUT_S, Transport

# What only some programs need is imported where it is used, so that other processes start faster.


def solo(
    name: str = "world",
    global_ranks: tuple[int, ...] | None = (0,),
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Communicator:
    from unisono.comm.solo import Solo  # it needs NumPy, which ranks may not have

    return Communicator(Solo(name, global_ranks, timeout_s))


def connect_on_host(announcements: Announcements, rank: int, size: int, **how: Any) -> Communicator:
    """The group of `size` processes of this host; `how` goes to `SharedMemory.connect`."""
    return Communicator(SharedMemory.connect(announcements, rank, size, **how))


def connect(
    store: Any,
    rank: int,
    size: int,
    *,
    name: str = "world",
    global_ranks: tuple[int, ...] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    join_timeout_s: float = JOIN_TIMEOUT_S,
    deadline: Deadline | None = None,
    payload: str = "",
    check: Callable[[], None] = lambda: None,
    on_one_host: bool = False,
    in_world: bool = True,
) -> Communicator:
    """Meet the other `size - 1` ranks through a torch Store and make a group with them. Without
    a common world they have no global ranks. Other arguments are those of
    `SharedMemory.connect`."""
    from unisono.comm.meeting.identity import find_hosts

    if variables.HOSTS.read() != "gloo":
        check_size(name, size)  # before they meet
    deadline = deadline or Deadline(join_timeout_s)
    global_ranks = global_ranks or tuple(range(size)) if in_world else None
    if size == 1:
        return solo(name, global_ranks, timeout_s)
    hosts = None if on_one_host else find_hosts(store, rank, size, deadline, check, name)
    if hosts is None or hosts.count == 1:
        made = SharedMemory.connect(
            StoreAnnouncements(store, limit=deadline),
            rank,
            size,
            name=name,
            global_ranks=global_ranks,
            timeout_s=timeout_s,
            deadline=deadline,
            payload=payload,
            check=check,
        )
        if not in_world:
            made.global_ranks = None
        return Communicator(made)
    # not needed on a single host
    if variables.HOSTS.read() == "gloo":
        from unisono.comm.over_torch.stateless import connect_stateless

        return Communicator(
            connect_stateless(
                *("gloo", store, name, rank, size, timeout_s, deadline.left_s()),
                address=hosts.address,
                global_ranks=global_ranks,
            )
        )
    from unisono.comm.hosts.hosts_transport import Meeting
    from unisono.comm.hosts.making import make_world

    meeting = Meeting(name, global_ranks, timeout_s, deadline, check)
    return Communicator(make_world(store, meeting, hosts, rank, payload))


def fresh_part(store: Any, rank: int, size: int, deadline: Deadline, name: str = "world") -> Any:
    """A part of a store for these processes only; all of them call this. torchrun hosts one
    store for all its attempts, in which a new attempt finds what earlier ones left. Nothing
    tells the ranks which attempt they belong to: each host counts its own restarts, and not
    those caused by other hosts that join or leave."""
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not hosted or variables.RANK.read() is not None:  # our launcher starts its ranks once
        return store
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from unisono.comm.meeting.roll_call import call_roll

    own = PrefixStore(f"unisono/{size}", store)
    return PrefixStore(call_roll(own, name, rank, size, deadline)[0], own)


def join(
    name: str,
    rank: int | None,
    size: int | None,
    store: Any,
    generation: int,
    timeout_s: float | None,
    join_timeout_s: float | None,
) -> Communicator:
    from unisono.comm.meeting.meeting_points import meeting_by_name
    from unisono.comm.meeting.network import is_networked

    _check_name(name)
    if size is None:
        rank = None if rank is None else _whole("rank", rank)
        generation = _whole("generation", generation)
        return _come_in(name, rank, store, generation, timeout_s, join_timeout_s)
    rank, size = _whole("rank", rank), _whole("size", size)
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"{rank} is not a rank of a group of {size}")
    check_size(name, size)
    meeting_s = meeting_timeout_s(timeout_s, join_timeout_s)
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    if size == 1:
        return solo(name, None, timeout_s)
    deadline = Deadline(meeting_s)
    if is_networked(store):
        return _join_anywhere(name, rank, size, store, timeout_s, deadline)
    request = JoinRequest(name, rank, size, deadline, timeout_s)
    with meeting_by_name(name, rank, store) as announcements, closing(RendezvousServer()) as server:
        while True:
            try:
                membership = meet_by(announcements, server, request)
            except Departed:  # while it waited: it, or a replacement, may come back
                if not deadline.left_s():
                    raise
            else:
                return Communicator(SharedMemory(membership, server, name, None, timeout_s))


def _whole(name: str, number: Any) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {number!r}") from None


def grow(
    group: Transport,
    name: str,
    known_as: str,
    count: int,
    store: Any,
    limit_s: float,
    generation: int,
) -> Communicator:
    """The group that results from growing, with newcomers that know it by another name."""
    from unisono.comm.meeting.network import is_networked

    _check_name(known_as)
    if group.backend == "unisono" and is_networked(store):
        from unisono.comm.hosts import growing

        made = growing.grow(group, store, name, known_as, count, limit_s, generation)
    else:
        meeting = known_as, _meeting_of_newcomers(known_as, 0, store)
        how = partial(_grow_alone, group) if group.size == 1 else group.grow
        made = how(name, meeting, count, limit_s, generation)
    return Communicator(made)


def _meeting_of_newcomers(
    name: str, rank: int, store: Any
) -> AbstractContextManager[Announcements]:
    """Where new processes find a group that grows; its members are there as rank 0."""
    from unisono.comm.meeting.meeting_points import meeting_by_name

    return meeting_by_name(f"{name} grows", rank, store)


def _grow_alone(
    alone: Any,
    name: str,
    meeting: tuple[str, AbstractContextManager[Announcements]],
    count: int,
    limit_s: float,
    generation: int,
) -> Transport:
    """The transport that a group of one, a Solo, grows into."""
    from unisono.comm.meeting.growing import admit, number_newcomers

    alone.raise_if_ended()
    about = {"global_ranks": alone.global_ranks, "generation": generation}
    with closing(RendezvousServer()) as server:
        membership, growth = admit(
            alone, server, server.address, name, meeting, count, limit_s, about, None
        )
        global_ranks = number_newcomers(alone.global_ranks, growth.places)
        return SharedMemory(membership, server, name, global_ranks, alone.timeout_s)


def _come_in(
    name: str,
    rank: int | None,
    store: Any,
    generation: int,
    timeout_s: float | None,
    join_timeout_s: float | None,
) -> Communicator:
    """Join a group that grows."""
    from unisono.comm.meeting.growing import join_growing, number_newcomers
    from unisono.comm.meeting.network import is_networked

    if rank is not None and rank < 0:
        raise ValueError(f"{rank} is not a rank")
    deadline = Deadline(meeting_timeout_s(timeout_s, join_timeout_s))
    if is_networked(store):
        from unisono.comm.hosts import growing

        return Communicator(
            growing.join_growing(store, name, rank, generation, timeout_s, deadline)
        )
    # without claiming the name: several may wait at once
    board = _meeting_of_newcomers(name, os.getpid(), store)
    with board as announcements, closing(RendezvousServer()) as server:
        membership, growth, told = join_growing(
            announcements, server, name, rank, generation, timeout_s, deadline
        )
        global_ranks = number_newcomers(told["global_ranks"], growth.places)
        return Communicator(
            SharedMemory(membership, server, growth.name, global_ranks, told["timeout_s"])
        )


def _join_anywhere(
    name: str, rank: int, size: int, store: Any, timeout_s: float, deadline: Deadline
) -> Communicator:
    """Meet in a store that other hosts can also reach: each meeting has its own part of it."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    from unisono.comm.meeting.roll_call import call_roll

    while True:
        token, _ = call_roll(store, name, rank, size, deadline)
        own = PrefixStore(f"unisono/join/{token}", store)
        limits: Any = {"timeout_s": timeout_s, "deadline": deadline}
        try:
            return connect(own, rank, size, name=name, in_world=False, **limits)
        except Departed:  # it, or a replacement, may come back
            if not deadline.left_s():
                raise


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name!r} cannot be the name of a meeting")
    try:
        is_text = b"\0" not in name.encode()
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise ValueError(
            f"{name!r} cannot be the name of a meeting: it contains characters that are not text"
        )


_wrapped: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()


def wrap(group: Any) -> Communicator:
    """The Communicator of another library's process group: the same one until either is closed."""
    from unisono.comm.over_torch.torch_transport import OverTorch

    comm = _wrapped.get(group)
    if comm is None or not isinstance(comm.transport, OverTorch) or comm.transport.is_closed:
        comm = _wrapped[group] = Communicator(OverTorch(group, keep=False))
    return comm


def transport_on_gpu(transport: Transport, device: Any, operation: str) -> Transport | None:
    """The transport for collectives on tensors of this GPU, for a group whose own transport does
    not support them; all ranks ask with their first such call. None: there is none. Raises
    ValueError, on every rank, if their GPUs allow none."""
    if not isinstance(transport, SharedMemory):
        return None
    from unisono.comm.cuda.first_call import meet_on_gpus

    return meet_on_gpus(transport, device, Operation[operation.upper()])
