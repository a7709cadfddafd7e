"""One decision of all ranks: whether an update is done.

It is the abort reason of a group that is made for it: the first rank to write it wins, whoever
reads it later reads the same, and it outlives every rank. A rank that has seen all votes writes
"commit"; a rank that has seen a failure writes "keep"; the death of a member writes itself. So all
survivors decide alike, wherever in the last round somebody dies. Over several hosts it is written
in the store by which they met, and lives as long as that.
"""

from __future__ import annotations

from unisono.comm.base import Communicator
from unisono.errors import GroupError

_COMMIT, _KEEP = "commit", "keep"


class Vote:
    """One rank's side of a decision. All ranks of `comm` make one."""

    def __init__(self, comm: Communicator) -> None:
        group = comm.split(range(comm.size), "verdict")
        assert group is not None
        self._group = group

    def decide(self, commit: bool) -> bool:
        """Whether to commit: what the first rank to come here says. Raises RendezvousError where
        the store is gone: others may have decided before."""
        return self._group._conclude(_COMMIT if commit else _KEEP) == _COMMIT

    @property
    def ending(self) -> GroupError | None:
        """Why all keep what they had."""
        return self._group.errored

    def close(self) -> None:
        """Give the group back."""
        self._group.close()
