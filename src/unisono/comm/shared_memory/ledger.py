"""A ledger: the records of a group whose calls another library runs, in the shared memory of a
group of ours. So readers of our groups' records read these too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from unisono.comm.engine import Note, Operation, Status, tell_closing
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.membership import JoinRequest, Membership, meet_by
from unisono.comm.meeting.unix_socket import RendezvousServer
from unisono.comm.shared_memory.error_texts import describe_ending
from unisono.comm.shared_memory.exceptions import GroupExceptions
from unisono.comm.shared_memory.record_reader import note_writer
from unisono.comm.shared_memory.segment_listeners import announce_segment


class Ledger:
    """This rank's side of it. Made by `open`, with all ranks of the group."""

    def __init__(
        self, membership: Membership, name: str, introduction: str, global_rank: int
    ) -> None:
        self.name = name
        self._membership = membership
        self.group = membership.group
        self._exceptions = GroupExceptions(membership, name)
        self.group.introduce(introduction, global_rank, False)
        announce_segment(self.group.state()["descriptor"])
        self.begin = membership.group.record_open
        """(operation, reduction, root, dtype, bytes, number): a call begins; its record."""
        self.begin_given = membership.group.record_given
        """(operation, tensors, torch's options, number): the same, in one step; None if DLPack
        cannot export the tensors."""
        self.end = membership.group.record_end
        """(record, status): it is over."""
        self._tell: Callable[[int, str], None] | None = None
        self._places: Sequence[int] = range(membership.size)
        self.is_whole = True
        """Whether all ranks of the group write into it."""
        self.on_close: Callable[[], None] = lambda: None

    @classmethod
    def open(
        cls,
        board: Board,
        rank: int,
        size: int,
        *,
        name: str,
        introduction: str,
        global_rank: int,
        places: Sequence[int] = (),
        of: int = 0,
    ) -> Ledger:
        """Meet the other ranks of this host on a board; they publish the `introduction` as their
        name. In a group `of` more ranks, they have these `places`. Raises RendezvousError if they
        do not find each other."""
        places = places or range(size)
        request = JoinRequest(
            f"watch {name}",
            rank,
            size,
            board.deadline,
            board.deadline.timeout_s,
            segments=[(places, of or size, size)],
        )
        with contextlib.closing(RendezvousServer()) as server:
            made = cls(meet_by(board, server, request), name, introduction, global_rank)
        made._places, made.is_whole = places, not of
        return made

    def check(
        self, operation: int, reduction: int, root: int, dtype: int, size_bytes: int, record: int
    ) -> None:
        """Wait for all ranks and compare their calls, before data moves."""
        status = self.group.check(operation, reduction, root, dtype, size_bytes, record)
        if status != Status.OK:
            raise self._exceptions.call_error(status, Operation(operation), reduction, dtype)

    def endings(self) -> dict[int, str]:
        """How processes of the group ended, by rank, as far as known."""
        status, culprit, _, detail = self.group.failure()
        if status != Status.PEER_LOST or culprit < 0:
            return {}
        member = self._membership.members[self._places.index(culprit)]
        return {member.pid: describe_ending(detail)}

    def tell(self, about: int, text: str) -> None:
        """Leave a text about a call for the other ranks, instead of the previous one."""
        if self._tell is None:
            self._tell = note_writer(self.group.state()["descriptor"], "answer")
        self._tell(about, text)

    def told(self, about: int) -> dict[int, str | None]:
        """What each rank of this host has left about a call."""
        return {rank: self.group.read_note(rank, Note.ANSWER, about) for rank in self._places}

    def tell_closing(self) -> None:
        """Note the line of the program on which it is about to leave."""
        tell_closing(self.group)

    def close(self) -> None:
        """Leave. The records go with the last member."""
        self.tell_closing()
        self.group.close()
        self.on_close()
