"""Every exception that a user of unisono can catch.

All derive from `UnisonoError`. The ones about a call carry fields (`rank`, `group`, `call`, ...)
besides their text, so that programs can act on them without parsing a message. At the end: how
messages name ranks and numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imports here slow down the start of every process
    from unisono.launcher.outcomes import RankEnding


class UnisonoError(RuntimeError):
    """Base of everything that unisono raises on purpose, except argument errors.

    >>> issubclass(unisono.PeerLost, unisono.UnisonoError)
    True
    """

    def __init__(self, *message: object, **fields: Any) -> None:
        """`fields` are attributes that the class has; those left out have the class's values."""
        super().__init__(*message)
        for name, value in fields.items():
            if not hasattr(type(self), name):
                raise TypeError(f"{type(self).__name__} has no field {name!r}")
            is_tuple = isinstance(getattr(type(self), name), tuple)
            setattr(self, name, tuple(value) if is_tuple else value)


class Misuse(UnisonoError):
    """A command cannot do what it was asked for; its exit code is 2."""


class EngineUnavailable(UnisonoError):
    """The native engine cannot run here (not Linux, or the library was not built).

    >>> try:
    ...     group = comm.split([0, 1])
    ... except unisono.EngineUnavailable as error:
    ...     print("use the backend gloo:", error)
    """


class TorchMissing(UnisonoError, ModuleNotFoundError):
    """Something needs torch, and torch is not installed; `what` is what needs it.

    >>> try:
    ...     import unisono.training
    ... except unisono.TorchMissing as error:
    ...     print(error)
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs torch, which is not installed: run `pip install torch` (unisono.plan, "
            "unisono.launch and Communicators on NumPy arrays work without it)"
        )
        self.name = "torch"


class RendezvousError(UnisonoError):
    """The ranks did not find each other, or may not work together.

    >>> try:
    ...     unisono.Communicator.join(f"nobody but {comm.rank}", 0, 2, join_timeout_s=0.01)
    ... except unisono.RendezvousError as error:
    ...     print(error)
    group nobody but ...: rank 1 of 2 did not join within 0.01 s
    """


class GroupsDiffer(RendezvousError):
    """Ranks wait for each other in calls that make different groups."""


class SegmentError(UnisonoError):
    """Shared memory could not be allocated: a limit is too small, or the system refused.

    >>> try:
    ...     comm.all_reduce(torch.ones(1000))
    ... except unisono.SegmentError as error:
    ...     print("give the container more memory:", error)
    """


class GroupError(UnisonoError):
    """A call on a group failed. The group is then poisoned: later calls raise the same cause.

    `rank` is this rank within `group`, `call` the number of the call that failed. If the program is
    watched (`unisono.watch`), `report` says what every rank was doing.

    >>> pair = comm.split([0, 1])
    >>> pair.abort("an example")
    >>> try:
    ...     pair.barrier()
    ... except unisono.GroupError as error:
    ...     print(error.rank == comm.rank, error is pair.errored or str(error) == str(pair.errored))
    True True
    """

    rank: int = -1
    group: str = ""
    call: int = 0
    report: Any = None


class CollectiveMismatch(GroupError):
    """The ranks of a group made different calls.

    `calls` says, for each rank, what it called (None: it had not arrived) and `sites` at which
    line; `culprits` are the ranks that differ from a strict majority, if there is one.

    >>> pair = comm.split([0, 1])
    >>> try:
    ...     pair.all_reduce(torch.ones(1 + comm.rank))
    ... except unisono.CollectiveMismatch as error:
    ...     print(error.calls[1], error.culprits)
    all_reduce of float32, 2 elements, sum ()
    """

    calls: tuple[str | None, ...] = ()
    sites: tuple[str | None, ...] = ()
    culprits: tuple[int, ...] = ()


class CollectiveTimeout(GroupError):
    """A call did not finish by its deadline. `arrived` and `missing` are ranks of the group;
    `stalled` are those that arrived and then moved less data than the others wait for.

    >>> pair = comm.split([0, 1])
    >>> if comm.rank == 0:
    ...     try:
    ...         pair.barrier(timeout_s=0.01)  # rank 1 does not call it
    ...     except unisono.CollectiveTimeout as error:
    ...         assert (error.arrived, error.missing) == ((0,), (1,))
    >>> comm.barrier()  # rank 1 waits here
    """

    arrived: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    stalled: tuple[int, ...] = ()


class PeerLost(GroupError):
    """A peer left the group while others still needed it. `peer` is its rank in the group.

    >>> pair = comm.split([0, 1])
    >>> if comm.rank == 1:
    ...     pair.close()
    ... else:
    ...     try:
    ...         pair.barrier()
    ...     except unisono.PeerLost as error:
    ...         assert error.peer == 1
    """

    peer: int = -1


class NoQuorum(GroupError):
    """The survivors of a group do not form a new one, or not with this rank. `members` are the
    ranks of the old group that are in the new one, if there is one.

    >>> pair = comm.split([0, 1])
    >>> pair.abort("an example")
    >>> try:
    ...     pair.shrink(at_least=3)
    ... except unisono.NoQuorum as error:
    ...     print(error.members)
    ()
    """

    members: tuple[int, ...] = ()


class MessageMismatch(GroupError):
    """A message has another dtype or size than its receive. The text has both sides' dtypes, sizes,
    shapes and lines.

    >>> pair = comm.split([0, 1])
    >>> try:
    ...     if comm.rank == 0:
    ...         pair.send(torch.ones(2), dst=1)
    ...     else:
    ...         pair.recv(torch.empty(3), src=0)
    ... except unisono.MessageMismatch as error:
    ...     print("refused")
    refused
    """


class DeadlockError(GroupError):
    """Ranks wait for each other's messages in a cycle; `cycle` lists them, each waiting for the
    next and the last for the first.

    >>> pair = comm.split([0, 1])
    >>> try:
    ...     pair.recv(torch.empty(1), src=pair.next)  # both receive, neither sends
    ... except unisono.DeadlockError as error:
    ...     print(sorted(error.cycle))
    [0, 1]
    """

    cycle: tuple[int, ...] = ()


class GroupAborted(GroupError):
    """A rank ended the group: by `abort`, by an interrupt, or by closing it with unfinished works.
    `peer` is that rank, `reason` why, or what was passed to `abort`.

    >>> pair = comm.split([0, 1])
    >>> if comm.rank == 1:
    ...     pair.abort("out of data")
    >>> try:
    ...     pair.barrier()
    ... except unisono.GroupAborted as error:
    ...     print(error.peer, error.reason)
    1 out of data
    """

    peer: int = -1
    reason: str = ""


class GroupClosed(GroupError):
    """The group was closed in this process, or belongs to the process that forked this one.

    >>> own = comm.split([comm.rank])
    >>> own.close()
    >>> try:
    ...     own.barrier()
    ... except unisono.GroupClosed:
    ...     print("closed")
    closed
    """


class WeightUpdateError(UnisonoError):
    """A weight update failed.

    `failed` maps each rank of the group that is at fault to what was wrong. `committed` says
    whether the surviving engines serve `version` nevertheless. If `group_ended`, close the group
    and join again; otherwise you can use it for the next update.

    >>> from unisono.training import weight_update
    >>> pair = comm.split([0, 1])
    >>> pair.abort("an example")
    >>> try:
    ...     weight_update(torch.nn.Linear(2, 2), pair)
    ... except unisono.WeightUpdateError as error:
    ...     print(error.group_ended)
    True
    """

    version: int = -1
    failed: Mapping[int, str] = {}
    committed: bool = False
    group_ended: bool = False


class WeightMismatch(WeightUpdateError):
    """Trainer and engines do not hold the same tensors; nothing was transferred.

    `differences` has one line for each: the name, what the trainer holds, what an engine holds.

    >>> from unisono.training import weight_update
    >>> model = torch.nn.Linear(2 + comm.rank, 2, bias=False)
    >>> try:
    ...     weight_update(model, comm, src=0)
    ... except unisono.WeightMismatch as error:
    ...     print(error.differences)
    (('weight', 'float32 (2, 2)', 'rank 1: float32 (2, 3)'),)
    """

    differences: tuple[tuple[str, str, str], ...] = ()


class RanksFailed(UnisonoError):
    """Ranks of a launch failed. `first` is the first one, `endings` says how each rank ended.

    >>> def work():
    ...     if unisono.get_rank() == 1:
    ...         raise ValueError("no such file")
    >>> try:
    ...     unisono.launch(work, ranks=2, capture=True)
    ... except unisono.RanksFailed as error:
    ...     print(error.first, error.endings[1].traceback.splitlines()[-1])
    1 ValueError: no such file
    """

    first: int = -1
    endings: tuple[RankEnding, ...] = ()


class RanksTimedOut(RanksFailed):
    """The ranks of a launch did not finish in time; `endings` has the stack of each.

    >>> import threading
    >>> def work():
    ...     threading.Event().wait()
    >>> try:
    ...     unisono.launch(work, ranks=1, timeout=0.3, capture=True)
    ... except unisono.RanksTimedOut as error:
    ...     print(len(error.endings))
    1
    """


class ScheduleError(UnisonoError):
    """A schedule does not do what its collective promises.

    `rank`, `chunk` and `step` say where; `step` is -1 if no step is at fault.

    >>> from unisono import plan
    >>> nothing = plan.Schedule.from_steps("all_reduce", "nothing", 2, 1, [])
    >>> plan.verify(nothing)
    Traceback (most recent call last):
    unisono.errors.ScheduleError: ...
    """

    rank: int = -1
    chunk: int = -1
    step: int = -1


# -- ranks and numbers in messages ----------------------------------------------------------------

_MOST_SPANS = 6


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 1 and 3", "ranks 1, 4-7 and 9"; "no rank" for none."""
    different = set(ranks)
    if not different:
        return "no rank"
    return f"rank{'' if len(different) == 1 else 's'} {list_ranks(different)}"


def list_ranks(ranks: Iterable[int]) -> str:
    """ "0, 1 and 3": sorted, runs of three or more as a span, and only the first of many spans."""
    spans: list[range] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1].stop:
            spans[-1] = range(spans[-1].start, rank + 1)
        else:
            spans.append(range(rank, rank + 1))
    texts: list[str] = []
    for span in spans[:_MOST_SPANS]:
        texts += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span)
    if len(spans) > _MOST_SPANS:
        texts.append(f"{sum(map(len, spans[_MOST_SPANS:]))} more")
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def name_number(number: int, thing: str) -> str:
    """ "1 step", "1,024 steps"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def name_choices(known: Collection[str], asked: str | None) -> str:
    """ "all_gather, all_reduce. Did you mean all_reduce?" if allreduce was asked for."""
    like = name_closest((asked or "").casefold(), known)
    return ", ".join(known) + (f". Did you mean {like}?" if like else "")


def name_closest(asked: str, known: Collection[str]) -> str:
    """Which of these was probably meant; "" if none is like it."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(asked, known, 1)), "")


def plural(text: str) -> str:
    """ "were killed by SIGKILL" of "was killed by SIGKILL": what follows several ranks."""
    for singular, several in (("is ", "are "), ("has ", "have "), ("was ", "were ")):
        if text.startswith(singular):
            return several + text.removeprefix(singular)
    return text
