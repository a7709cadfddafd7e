"""The rounds of a weight update: agree, be ready, vote, acknowledge; and what may fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from unisono.collectives.objects import all_gather_object
from unisono.comm.base import Communicator
from unisono.errors import (
    CollectiveTimeout,
    GroupAborted,
    GroupError,
    PeerLost,
    RendezvousError,
    WeightUpdateError,
)
from unisono.training.weights.description import Description
from unisono.training.weights.gpu_memory import ToldMemory, read_told
from unisono.training.weights.plan import WeightPlan, make_plan
from unisono.training.weights.transfers import TransferGroups
from unisono.training.weights.vote import Vote

T = TypeVar("T")


class UpdateProtocol:
    """One rank's side of updates over a group."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.groups = TransferGroups(comm)
        self._vote: Vote | None = None
        self._descriptions: tuple[str, ...] = ()
        self._next: WeightPlan | None = None
        """The plan for what these descriptions say."""
        self._plan: WeightPlan | None = None
        self._committed = False
        self._moving = False
        self._own_failure: Exception | None = None
        """What went wrong on this rank. Forgotten with the update: an exception holds the frames
        that it has passed, and they hold this rank's weights and groups."""

    def close(self) -> None:
        """Give back what the updates needed; the group itself stays."""
        self.groups.close()

    @property
    def committed(self) -> bool:
        """Whether all have decided for the new weights."""
        return self._committed

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Do something; what it raises is kept for the next round, in which all hear of it."""
        try:
            return action()
        except Exception as error:
            self._own_failure = error
            return None

    # -- rounds ------------------------------------------------------------------------------------

    def agree(self, describe: Callable[[], str], version: int, wanted: int | None) -> WeightPlan:
        """Tell what this rank holds, the text of its description, hear what the others do, and make
        the plan of all. `version` is what this rank has, `wanted` what it asks for.

        Raises WeightMismatch on every rank if it does not fit together.
        """
        holds = self.attempt(describe) or ""
        problem = "" if self._own_failure is None else _text_of(self._own_failure)
        mine = problem, version, wanted, self.groups.names(), holds
        versions, asked, group_names, descriptions = self.gather(mine)
        asked_for = set(asked) - {None}
        if len(asked_for) > 1:
            raise self._failure({}, f"senders ask for different versions: {sorted(asked_for)}")
        self.groups.keep(group_names)
        if descriptions != self._descriptions:  # usually they are those of the last update
            self._next = make_plan([Description.from_text(text) for text in descriptions])
            self._descriptions = descriptions
        assert self._next is not None
        number = asked_for.pop() if asked_for else max(versions) + 1
        self._plan = dataclasses.replace(self._next, version=number)
        return self._plan

    def exchange_memory(
        self, plan: WeightPlan, describe: Callable[[], str] | None = None
    ) -> dict[int, ToldMemory]:
        """What senders tell of their memory on a GPU that engines serve, by rank; nothing where no
        engine does. Senders `describe` theirs."""
        if not plan.exports:
            return {}
        told = ""
        if describe is not None and self.comm.rank in plan.exports:
            told = self.attempt(describe) or ""
        (texts,) = self.gather((self.failure, told))
        return {rank: read_told(texts[rank]) for rank in plan.exports}

    def begin(self, plan: WeightPlan, changes: bool = True) -> None:
        """Make the groups; go on where every rank is ready. Where no rank has anything that
        `changes`, there is nothing to decide."""
        (changing,) = self.gather((self.failure, changes))
        self.groups.open(plan)
        if plan.options.transactional and any(changing):
            self.open_vote()
        self._moving = not plan.options.transactional

    def open_vote(self) -> None:
        """Make what the decision is written to."""
        self._vote = Vote(self.comm)

    def decide(self, commit: Callable[[], None]) -> None:
        """Vote. Every rank calls `commit`, or every rank raises WeightUpdateError."""
        if self._vote is None:  # weights went into place: there is nothing to decide
            self.gather((self.failure,))
            return commit()
        try:
            problems = _problems(all_gather_object((self.failure,), self.comm))
        except BaseException:  # an interrupt too: others may have seen all votes
            self._settle(self._vote, False, commit)
            raise
        self._settle(self._vote, not problems, commit)
        self.raise_problems(problems)
        if not self._committed:
            ending = self._vote.ending
            assert ending is not None
            raise ending
        self.gather((self.failure,))
        return None

    def _settle(self, vote: Vote, wanted: bool, commit: Callable[[], None]) -> None:
        """Commit if that is what all decide."""
        try:
            self._committed = vote.decide(wanted)
        except RendezvousError:  # the store is gone: others may have decided before
            self._moving = True
            raise
        if self._committed:
            self.attempt(commit)

    @property
    def failure(self) -> str:
        """What went wrong on this rank; "" if nothing has."""
        own = self._own_failure
        if own is None or isinstance(own, WeightUpdateError):
            return "" if own is None else _text_of(own)
        return f"{type(own).__name__}: {_text_of(own)}"

    def gather(self, mine: tuple[Any, ...]) -> list[Any]:
        """What all ranks say: for each entry of `mine` but the first, that of every rank. The first
        is what is wrong here. Raises WeightUpdateError, if anything is wrong on any rank."""
        everyone = all_gather_object(mine, self.comm)
        self.raise_problems(_problems(everyone))
        return list(zip(*everyone, strict=True))[1:]

    def raise_problems(self, problems: dict[int, str]) -> None:
        """Raise WeightUpdateError, if anything is wrong on any rank."""
        if problems:
            raise self._failure(problems) from self._own_failure

    # -- failures ----------------------------------------------------------------------------------

    def _failure(self, problems: dict[int, str], text: str = "") -> WeightUpdateError:
        """An update that failed in good order: the group goes on."""
        listed = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
        return self._error(text or listed, problems, ended=False)

    def _group_failure(self, error: Exception) -> WeightUpdateError:
        """An update that failed with its group."""
        ending = self.comm.errored
        cause = ending if isinstance(ending, PeerLost) else error  # a death is the same for all
        failed: dict[int, str] = {}
        if isinstance(cause, (PeerLost, GroupAborted)) and cause.peer >= 0:  # gloo names nobody
            failed[self.groups.rank_of(cause.group, cause.peer)] = str(cause)
        elif isinstance(cause, CollectiveTimeout):
            ranks = [self.groups.rank_of(cause.group, rank) for rank in cause.missing]
            failed = {rank: f"rank {rank} did not come by the deadline" for rank in ranks}
        text = str(cause)
        if isinstance(cause, CollectiveTimeout) and failed:
            text = f"{'; '.join(failed.values())}\n{text}"
        failure = self._error(text, failed, ended=True)
        self._abort(str(cause).split("\n", 1)[0])
        return failure

    def _error(self, why: str, failed: dict[int, str], ended: bool) -> WeightUpdateError:
        version = -1 if self._plan is None else self._plan.version
        if self._committed:
            served = "the new weights" if version < 0 else f"version {version}"
            what = f"the other engines serve {served}"
        elif self._moving:
            moved = "the update" if version < 0 else f"version {version}"
            mixed = "hold parts of two" if self._vote is None else "serve different"
            what = f"{moved} was not completed: engines may {mixed} versions"
        else:
            new = "" if version < 0 else f" to version {version}"
            what = f"the weights were not updated{new}: every engine keeps what it had"
        if not self._committed and self._plan is not None and self._plan.aliases:
            what += ", but those with alias=True, which serve the trainer's memory as it is"
        first, _, rest = why.partition("\n")
        text = f"{what}; {first}" + (". Close the group and join again" if ended else "")
        return WeightUpdateError(
            f"{text}\n{rest}" if rest else text,
            version=version,
            failed=failed,
            committed=self._committed,
            group_ended=ended,
        )

    def _abort(self, reason: str) -> None:
        self.groups.abort(reason)
        self.comm.abort(reason)


class Update:
    """Around an update: limits, and what its failures mean. `in_place`: a failure leaves engines
    with parts of two versions."""

    # No generator: what passes one is held by frames of contextlib, which the exception holds in
    # turn, and this rank's weights and groups would stay with both until garbage is collected.

    def __init__(
        self, protocol: UpdateProtocol, timeout_s: float | None = None, in_place: bool = False
    ) -> None:
        self._protocol, self._timeout_s, self._in_place = protocol, timeout_s, in_place

    def __enter__(self) -> None:
        protocol, comm = self._protocol, self._protocol.comm
        protocol._plan, protocol._committed, protocol._moving = None, False, self._in_place
        self._usual_s = comm.timeout_s
        if self._timeout_s is not None:
            comm.timeout_s = self._timeout_s

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        protocol, comm = self._protocol, self._protocol.comm
        try:
            if isinstance(error, (GroupError, RendezvousError)):
                raise protocol._group_failure(error) from error
            if error is not None and not isinstance(error, WeightUpdateError):
                protocol._abort(f"rank {comm.rank} failed: {error!r}")
        finally:
            protocol._own_failure = None
            if self._timeout_s is not None and comm.errored is None:
                comm.timeout_s = self._usual_s
            vote, protocol._vote = protocol._vote, None
            if vote is not None:
                vote.close()


def _problems(everyone: Sequence[Any]) -> dict[int, str]:
    """What is wrong on which rank."""
    return {rank: entry[0] for rank, entry in enumerate(everyone) if entry[0]}


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__
