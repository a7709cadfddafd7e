"""A ledger: the records of a group whose calls another library carries out.

It is the shared memory of a native group, in which every rank writes the records of its calls
itself. So whoever reads the records of native groups reads these too, they survive their writer,
and the processes behind the ranks are watched.
"""

from __future__ import annotations

from unisono.comm.rendezvous.lobby import Exchange, Lobby, Place, Side
from unisono.comm.rendezvous.unix_socket import Deadline
from unisono.comm.shared_memory.communicator import open_with
from unisono.comm.shared_memory.engine import Operation, Status
from unisono.comm.shared_memory.exceptions import Blame
from unisono.comm.shared_memory.explanations import ending
from unisono.comm.shared_memory.keeping import announce
from unisono.comm.shared_memory.records import BACKEND_MARK


class Ledger:
    """This rank's place in it. Made by `open`, with all ranks of the group."""

    def __init__(self, place: Place, name: str, backend: str, global_rank: int) -> None:
        self.rank, self.size, self.name = place.rank, place.size, name
        self._place = place
        self._group = place.group
        self._blame = Blame(place, name)
        self._group.introduce(f"{name}{BACKEND_MARK}{backend}", global_rank, False)
        announce(self._group.descriptor)
        self.begin = place.group.record_open
        """(operation, reduction, root, dtype, bytes, number): a call begins; its record."""
        self.begin_given = place.group.record_given
        """(operation, tensors, torch's options, number): the same, in one step; None where the
        tensors do not show what they are."""
        self.end = place.group.record_end
        """(record, status): it is over."""

    @classmethod
    def open(
        cls,
        exchange: Exchange,
        rank: int,
        size: int,
        *,
        name: str,
        backend: str,
        global_rank: int,
        timeout_s: float,
    ) -> Ledger:
        """Meet the other ranks. Raises RendezvousError if they do not find each other."""
        with Lobby() as lobby:
            side = Side(f"watch {name}", rank, size, Deadline(timeout_s), open_with(timeout_s))
            return cls(lobby.meet_by(exchange, side), name, backend, global_rank)

    def check(
        self, operation: int, reduction: int, root: int, dtype: int, size_bytes: int, record: int
    ) -> None:
        """Wait for all ranks and compare what they are about to call; before data moves.

        Raises CollectiveMismatch, CollectiveTimeout or PeerLost.
        """
        status = self._group.check(operation, reduction, root, dtype, size_bytes, record)
        if status != Status.OK:
            raise self._blame.call_error(status, Operation(operation), reduction, dtype)

    def endings(self) -> dict[int, str]:
        """How a process of the group ended, by its number, as far as that is known."""
        status, culprit, _, detail = self._group.failure()
        if status != Status.PEER_LOST or culprit < 0:
            return {}
        return {self._place.members[culprit].pid: ending(detail)}

    def close(self) -> None:
        """Leave. The records go with the last member."""
        self._group.close()
