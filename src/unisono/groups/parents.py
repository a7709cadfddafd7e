"""The groups of a manager, what their ranks are taken from, and how they are made.

A Communicator splits; for process groups of other backends torch makes the groups.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from unisono.comm.communicator import Communicator
from unisono.errors import GroupClosed, UnisonoError
from unisono.world.world import get_world, resolve

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_managers: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()  # of each parent, by layout
_managers_lock = threading.Lock()


class AxisGroup:
    """`ranks` are its members as global ranks, `rank` is this process's rank among them, `size`
    their number. The Communicator `comm` and the torch process group `group` are made on first use,
    by the members only."""

    def __init__(
        self,
        ranks: Sequence[int],
        global_rank: int,
        make_comm: Callable[[AxisGroup], Communicator],
        make_group: Callable[[AxisGroup], ProcessGroup],
        owned: bool = True,
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(global_rank)
        self.size = len(self.ranks)
        self._make_comm, self._make_group, self._owned = make_comm, make_group, owned
        self._comm: Communicator | None = None
        self._group: ProcessGroup | None = None
        self._closed = False
        # A lock for each group: threads of different ranks may use groups in different orders.
        self._lock = threading.RLock()

    @property
    def comm(self) -> Communicator:
        with self._lock:
            self._check()
            if self._comm is None:
                self._comm = self._make_comm(self)
            return self._comm

    @property
    def group(self) -> ProcessGroup:
        """The torch process group. Raises UnisonoError if torch.distributed is not initialised."""
        with self._lock:
            self._check()
            if self._group is None:
                self._group = self._make_group(self)
            return self._group

    def neighbour(self, step: int) -> int:
        """The global rank that is `step` ranks further, in a ring."""
        return self.ranks[(self.rank + step) % self.size]

    def close(self) -> None:
        """Close what was made. Closing twice does nothing."""
        with self._lock:
            comm, group, self._comm, self._group = self._comm, self._group, None, None
            self._closed = True
        if not self._owned:
            return
        if group is not None:
            from unisono.comm.over_torch import process_groups

            process_groups.destroy(group)  # and with it the Communicator
        elif comm is not None:
            comm.close()

    def _check(self) -> None:
        if self._closed:
            raise UnisonoError(f"the manager of the group of ranks {self.ranks} is closed")


class Parent:
    """What a manager's ranks are taken from: a Communicator, which splits."""

    def __init__(
        self, source: Any, rank: int, global_ranks: Sequence[int], process_group: Any = None
    ) -> None:
        self.source = source
        self.rank = rank
        self.global_ranks = global_ranks
        self.size = len(global_ranks)
        self.process_group = process_group  # torch's group of all these ranks, if any

    def is_closed(self) -> bool:
        """Whether its groups, and so those of its managers, are closed."""
        return isinstance(self.source.errored, GroupClosed)

    def next_suffix(self, members: Sequence[int]) -> str:
        """A label that tells the groups of a new manager from all others. The members agree on it
        without a message because each has made the same managers before."""
        layout = ""
        if list(members) != list(range(self.size)):
            layout = "@" + hashlib.sha256(repr(list(members)).encode()).hexdigest()[:8]
        with _managers_lock:
            made = _managers.setdefault(self.source, Counter())
            made[layout] += 1
            number = made[layout]
        return layout + (f"#{number}" if number > 1 else "")

    def axis_group(self, members: Sequence[int], label: str) -> AxisGroup:
        def group_over(own: AxisGroup) -> ProcessGroup:
            from unisono.torch_backend import groups as torch_groups

            torch_groups.check_started()
            group: ProcessGroup = torch_groups.group_over(own.comm)
            return group

        return AxisGroup(
            [self.global_ranks[member] for member in members],
            self.global_ranks[self.rank],
            lambda own: self.source.split(members, label),
            group_over,
        )


class TorchParent(Parent):
    """A torch process group of another backend: torch makes the groups, and we wrap them."""

    def __init__(self, group: Any, rank: int, global_ranks: Sequence[int]) -> None:
        from unisono.comm.over_torch import process_groups  # it needs torch

        super().__init__(group, rank, global_ranks, group)
        self._torch = process_groups

    def is_closed(self) -> bool:
        return not self._torch.exists(self.source)

    def axis_group(self, members: Sequence[int], label: str) -> AxisGroup:
        ranks = [self.global_ranks[member] for member in members]
        # Groups with the same label have no common member: the first member tells them apart.
        name = f"{self.source.group_name}.{label}[{ranks[0]}..{ranks[-1]}]"
        return AxisGroup(
            ranks,
            self.global_ranks[self.rank],
            lambda own: resolve(own.group),
            lambda own: self._torch.new_group(self.source, ranks, name),
        )


def parent_of(group: Any) -> Parent:
    if group is None:
        with contextlib.suppress(UnisonoError):
            group = get_world()
    if "torch" in sys.modules:
        import torch.distributed as dist

        from unisono.comm.over_torch import process_groups
        from unisono.torch_backend import groups as torch_groups

        if group is None:
            group = process_groups.world()
        wrapped = getattr(getattr(group, "transport", None), "process_group", None) or group
        if torch_groups.moves_data_elsewhere(wrapped):
            return TorchParent(wrapped, wrapped.rank(), dist.get_process_group_ranks(wrapped))
    comm = resolve(group)
    ranks = comm.global_ranks or range(comm.size)
    return Parent(comm, comm.rank, ranks, _process_group_of(comm, group))


def _process_group_of(comm: Communicator, given: Any) -> Any:
    """torch's group for a Communicator: the one given, or torch's default group over it."""
    if given is not comm and given is not None:
        return given
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    world = dist.group.WORLD
    return world if getattr(world, "comm", None) is comm else None
