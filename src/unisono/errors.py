"""Every exception that a user of unisono can catch.

All derive from `UnisonoError`. The ones about a call carry fields (`rank`, `group`, `call`, ...)
beside their text, so that programs can act on them without parsing a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack


class UnisonoError(RuntimeError):
    """Base of everything that unisono raises on purpose, argument errors aside."""


class EngineUnavailable(UnisonoError):
    """The native engine cannot run here (not Linux, or the library was not built)."""


class TorchMissing(UnisonoError, ModuleNotFoundError):
    """Something that needs torch was asked for, and torch is not installed."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs torch, which is not installed: run `pip install torch` (unisono.plan, "
            "unisono.launch and Communicators on NumPy arrays work without it)"
        )
        self.name = "torch"


class RendezvousError(UnisonoError):
    """The ranks did not find each other, or may not work together."""


class SegmentError(UnisonoError):
    """Shared memory could not be had: a limit is too small, or the system refused."""


class _Where(TypedDict, total=False):
    rank: int
    group: str
    call: int


class GroupError(UnisonoError):
    """Something went wrong in a call on a group. After it the group is poisoned.

    `rank` is this rank within `group`, `call` the number of the call that failed. Where the
    program is watched (`unisono.watch`), `report` says what every rank was doing.
    """

    def __init__(self, message: str, *, rank: int = -1, group: str = "", call: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.group = group
        self.call = call
        self.report: Any = None


class CollectiveMismatch(GroupError):
    """The ranks of a group called different things.

    `calls` says, for each rank, what it called (None: it had not arrived) and `sites` at which
    line; `culprits` are the ranks that differ from a strict majority, empty where there is none.
    """

    def __init__(
        self,
        message: str,
        *,
        calls: Sequence[str | None] = (),
        sites: Sequence[str | None] = (),
        culprits: Sequence[int] = (),
        **where: Unpack[_Where],
    ) -> None:
        super().__init__(message, **where)
        self.calls = tuple(calls)
        self.sites = tuple(sites)
        self.culprits = tuple(culprits)


class CollectiveTimeout(GroupError):
    """A call did not finish by its deadline. `arrived` and `missing` are ranks of the group;
    `stalled` are those that came and then moved less data than the others wait for."""

    def __init__(
        self,
        message: str,
        *,
        arrived: Sequence[int] = (),
        missing: Sequence[int] = (),
        stalled: Sequence[int] = (),
        **where: Unpack[_Where],
    ) -> None:
        super().__init__(message, **where)
        self.arrived = tuple(arrived)
        self.missing = tuple(missing)
        self.stalled = tuple(stalled)


class PeerLost(GroupError):
    """A peer left the group while others still needed it. `peer` is its rank in the group."""

    def __init__(self, message: str, *, peer: int = -1, **where: Unpack[_Where]) -> None:
        super().__init__(message, **where)
        self.peer = peer


class MessageMismatch(GroupError):
    """A message has another dtype or size than its receiver wants."""


class DeadlockError(GroupError):
    """Ranks wait for each other's messages in a circle; `cycle` lists them, each waiting for the
    next and the last for the first."""

    def __init__(self, message: str, *, cycle: Sequence[int] = (), **where: Unpack[_Where]) -> None:
        super().__init__(message, **where)
        self.cycle = tuple(cycle)


class GroupAborted(GroupError):
    """Somebody ended the group: by `abort`, or by an interrupt. `peer` is who did, `reason` what
    was given to `abort`."""

    def __init__(
        self, message: str, *, peer: int = -1, reason: str = "", **where: Unpack[_Where]
    ) -> None:
        super().__init__(message, **where)
        self.peer = peer
        self.reason = reason


class GroupClosed(GroupError):
    """The group was closed in this process, or belongs to the process that forked this one."""


class WeightUpdateError(UnisonoError):
    """A weight update failed.

    `failed` says what was wrong with each rank of the group that is at fault. `committed`
    says whether the engines that live serve `version` all the same. `group_ended`: the group is of
    no more use, close it and join again; otherwise the next update may follow on it.
    """

    def __init__(
        self,
        message: str,
        *,
        version: int = -1,
        failed: Mapping[int, str] | None = None,
        committed: bool = False,
        group_ended: bool = False,
    ) -> None:
        super().__init__(message)
        self.version = version
        self.failed = dict(failed or {})
        self.committed = committed
        self.group_ended = group_ended


class WeightMismatch(WeightUpdateError):
    """Trainer and engines do not hold the same tensors; nothing was moved.

    `differences` has one line for each: the name, what the trainer holds, what an engine holds.
    """

    def __init__(self, message: str, *, differences: Sequence[tuple[str, str, str]] = ()) -> None:
        super().__init__(message)
        self.differences = tuple(differences)


@dataclass(frozen=True)
class RankEnding:
    """How one rank of a launch ended.

    `how` says it in a few words. `traceback` is that of an exception, `stack` where the rank was
    when it crashed or was ended, `exit_code` as a shell would have it (128 + the signal's number),
    `signal` the name of a signal that it died of, `stdout` and `stderr` the last of what it wrote.
    """

    rank: int
    how: str
    failed: bool
    exit_code: int
    signal: str = ""
    traceback: str = ""
    stack: str = ""
    stdout: str = ""
    stderr: str = ""


class RanksFailed(UnisonoError):
    """Ranks of a launch failed. `first` is the first one, `endings` says how each rank ended."""

    def __init__(
        self, message: str, *, first: int = -1, endings: Sequence[RankEnding] = ()
    ) -> None:
        super().__init__(message)
        self.first = first
        self.endings = tuple(endings)


class RanksTimedOut(RanksFailed):
    """The ranks of a launch were not done in time; `endings` has the stack of each."""


class ScheduleError(UnisonoError):
    """A schedule does not do what its collective promises.

    `rank`, `chunk` and `step` say where; `step` is -1 where no step is at fault.
    """

    def __init__(self, message: str, *, rank: int = -1, chunk: int = -1, step: int = -1) -> None:
        super().__init__(message)
        self.rank = rank
        self.chunk = chunk
        self.step = step
