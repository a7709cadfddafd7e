"""From the status of a call or a message to the exception for its caller."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from unisono.comm.engine import ABOUT_MESSAGES, Operation, Status, native
from unisono.comm.reductions import REDUCTION_NAMES
from unisono.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    GroupClosed,
    GroupError,
    SegmentError,
    name_ranks,
)

if TYPE_CHECKING:
    from unisono.comm.meeting.membership import Membership

NEEDED_LATER = (
    "unisono.comm.shared_memory.failures",
    "unisono.comm.shared_memory.allocation",
    "unisono.comm.arguments",
    "unisono.comm.meeting.leading",
    "unisono.comm.meeting.survivors",
)
"""The modules that word exceptions, check arguments, and make a group of the survivors. A thread
imports them once a group is made, so that processes start faster."""

_Error = TypeVar("_Error", bound=GroupError)

diagnose: Callable[[GroupError], Any] | None = None
"""Set by the watch while it is on: returns the report that an exception carries."""


class GroupExceptions:
    """Makes a group's exceptions and keeps the first `cause` of its end. The engine calls it when
    a work or a message fails."""

    def __init__(
        self, membership: Membership, name: str, global_ranks: Sequence[int] | None = None
    ) -> None:
        self._membership = membership
        self._global_ranks = global_ranks
        self._name = name
        self._rank = membership.rank
        self.cause: GroupError | None = None
        self.left_out_of: Sequence[int] = ()  # the members of the latest split without this rank
        self._is_worded = False
        self._why_unfinished = ""
        self.closed_at = ""  # the line of the program that closed the group

    def message_error(self, status: int, sends: bool, peer: int, tag: int) -> Exception:
        """The exception for a message to or from `peer` (-1: any rank) whose status is not OK."""
        from unisono.comm.shared_memory import error_texts
        from unisono.comm.shared_memory.failures import whereabouts

        doing = error_texts.describe_message(sends, peer, tag)
        if status == Status.NOT_YET:
            return self._under_way(doing)
        if (
            status == Status.TIMEOUT
            and self.cause is None
            and self._membership.group.failure()[1] == self._rank
        ):
            text = (
                f"{doing} on group {self._name} was not matched by its deadline of "
                f"{self._membership.group.timeout_ns / 1e9:g} s"
            )
            details = error_texts.timeout_details(self._membership.group, sends, peer)
            if peer >= 0:
                details += whereabouts(self._membership, [peer], ABOUT_MESSAGES)
            self.cause = self._of_group(
                CollectiveTimeout,
                "\n".join([text, *details]),
                missing=[peer] if peer >= 0 else [],
                arrived=[self._rank],
            )
        if status in (Status.CLOSED, Status.FORKED, Status.NO_MEMORY):
            return self.call_error(status, Operation.SEND if sends else Operation.RECV)
        if self._membership.group.failure()[0] == Status.CLOSED:
            return self.closed()
        return self.failure(doing)

    def call_error(
        self, status: int, operation: int, reduction: int = 0, dtype: int | str = ""
    ) -> Exception:
        what = Operation(operation).name.lower()
        if status == Status.REFUSED:
            # Imported here: it needs NumPy, which a launcher does not.
            from unisono.comm.arguments import describe_meaningless
            from unisono.comm.shared_memory import error_texts

            name = dtype if isinstance(dtype, str) else error_texts.dtype_name(dtype)
            why = describe_meaningless(REDUCTION_NAMES[reduction], name)
            return TypeError(f"{what} on group {self._name}: {why}")
        if status == Status.NO_MEMORY:
            return SegmentError(
                "cannot allocate this rank's slice of shared memory (2 MiB) in group "
                f"{self._name}: the memory limits leave {max(0, native.memory_room())} bytes"
            )
        if status == Status.NOT_YET:
            return self._under_way(what)
        if status == Status.FORKED:
            return self.forked()
        if status == Status.REENTERED:
            return RuntimeError(
                f"{what} on group {self._name}: this thread is already in a call of the group (is "
                "this a signal handler?)"
            )
        if status == Status.CLOSED or self._membership.group.failure()[0] == Status.CLOSED:
            return self.closed()
        return self.failure(what)

    def failure(self, doing: str) -> GroupError:
        """The first cause of the group's end, as an exception of this rank."""
        from unisono.comm.shared_memory.failures import describe_failure

        if self.cause is None:
            self.cause = describe_failure(self._membership, self._name, doing)
        if not self._is_worded:  # however worded
            self._is_worded = True
            text = self._with_global_ranks(self.cause)
            if self.left_out_of and isinstance(self.cause, (CollectiveMismatch, CollectiveTimeout)):
                text += (
                    f"\nrank {self._rank} got None from split({list(self.left_out_of)}), whose "
                    "group it is not in: only members may call, and group=None means the world"
                )
            self.cause.args = (text,)
        if diagnose is not None and self.cause.report is None:
            self.cause.report = diagnose(self.cause)
        return copy.copy(self.cause)  # a copy: the original would keep frames alive

    def loss_among(self, ranks: Sequence[int], doing: str) -> GroupError | None:
        """What to raise because one of these ranks has died, even if not that ended the group."""
        group = self._membership.group
        lost = {rank: how for rank in ranks if (how := group.state(rank)["loss"]) is not None}
        if not lost:
            return None
        peer, detail = next(iter(lost.items()))
        if group.failure()[:2] == (Status.PEER_LOST, peer):
            return self.failure(doing)
        from unisono.comm.shared_memory.failures import describe_loss

        error = describe_loss(self._membership, self._name, doing, peer, detail)
        error.args = (self._with_global_ranks(error),)
        return error

    def _with_global_ranks(self, error: GroupError) -> str:
        """The text of an exception of a group whose ranks differ from their global ranks. The
        reason that a rank passed to `abort` is not changed."""
        from unisono.comm.shared_memory.error_texts import with_global_ranks

        reason = error.reason if isinstance(error, GroupAborted) else ""
        ours, quoted, rest = str(error).partition(reason) if reason else (str(error), "", "")
        return with_global_ranks(ours, self._global_ranks) + quoted + rest

    def forked(self) -> GroupClosed:
        return self._of_group(
            GroupClosed,
            f"group {self._name} belongs to the parent process (pid {os.getppid()}): a forked "
            "child cannot use it",
        )

    def closed(self) -> GroupClosed:
        at = f": this rank closed it at {self.closed_at}" if self.closed_at else ""
        text = f"group {self._name} is closed{self._why_unfinished or at}"
        return self._of_group(GroupClosed, text)

    def close_without(self, absent: Sequence[int]) -> str:
        """The group closes before these ranks have joined: what to tell the others."""
        if absent:
            who = name_ranks(absent)
            self._why_unfinished = f": {who} never joined what rank {self._rank} had begun"
        return f"it closed the group{self._why_unfinished}"

    def _under_way(self, doing: str) -> CollectiveTimeout:
        text = f"{doing} on group {self._name} is still in progress"
        return self._of_group(CollectiveTimeout, text)

    def _of_group(self, kind: type[_Error], text: str, **fields: Any) -> _Error:
        return kind(text, rank=self._rank, group=self._name, **fields)
