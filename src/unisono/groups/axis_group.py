"""AxisGroup: the group that a rank is in along one axis, or several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unisono.comm.communicator import Communicator
from unisono.errors import UnisonoError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class AxisGroup:
    """`ranks` are its members as global ranks, `rank` is ours among them, `size` their number. The
    Communicator `comm` and the torch process group `group` are made when they are first asked for,
    by the members alone."""

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
        # A lock for each group: threads of different ranks may ask for groups in different orders.
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
        """The torch process group. Raises UnisonoError where torch.distributed is not started."""
        with self._lock:
            self._check()
            if self._group is None:
                self._group = self._make_group(self)
            return self._group

    def neighbour(self, step: int) -> int:
        """The global rank that is `step` ranks further, in a ring."""
        return self.ranks[(self.rank + step) % self.size]

    def close(self) -> None:
        """Give back what was made. Closing twice does nothing."""
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
