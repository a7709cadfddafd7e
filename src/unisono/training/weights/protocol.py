"""The rounds of a weight update: agree, be ready, vote, acknowledge; and what may fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Self, TypeVar

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
        self._usual_s = comm.timeout_s
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

    # -- around an update --------------------------------------------------------------------------

    # No generator: what passes one is held by frames of contextlib, which the exception holds in
    # turn, and this rank's weights and groups would stay with both until garbage is collected.

    def update(self, timeout_s: float | None = None, in_place: bool = False) -> Self:
        """Begin an update, for `with`: how long its steps wait, and what its failures mean.
        `in_place`: one leaves engines with parts of two versions."""
        self._plan, self._committed, self._moving = None, False, in_place
        self._usual_s = self.comm.timeout_s
        if timeout_s is not None:
            self.comm.timeout_s = timeout_s
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if isinstance(error, (GroupError, RendezvousError)):
                raise self._group_failure(error) from error
            if error is not None and not isinstance(error, WeightUpdateError):
                self._abort(f"rank {self.comm.rank} failed: {error!r}")
        finally:
            self._own_failure = None
            if self.comm.errored is None:
                self.comm.timeout_s = self._usual_s
            vote, self._vote = self._vote, None
            if vote is not None:
                vote.close()

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
        versions, asked, group_names, descriptions = self.gather(
            version, wanted, self.groups.names(), holds
        )
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
        (texts,) = self.gather(told)
        return {rank: read_told(texts[rank]) for rank in plan.exports}

    def begin(self, plan: WeightPlan, changes: bool = True) -> None:
        """Make the groups; go on where every rank is ready. Where no rank has anything that
        `changes`, there is nothing to decide."""
        (changing,) = self.gather(changes)
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
            self.gather()
            return commit()
        try:
            _, problems = self._gather()
        except BaseException:  # an interrupt too: others may have seen all votes
            self._settle(self._vote, False, commit)
            raise
        self._settle(self._vote, not problems, commit)
        self.raise_problems(problems)
        if not self._committed:
            ending = self._vote.ending
            assert ending is not None
            raise ending
        self.gather()
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

    def gather(self, *mine: Any) -> list[tuple[Any, ...]]:
        """For each of these things, what every rank says of it. Raises WeightUpdateError, if
        anything has gone wrong on any rank."""
        columns, problems = self._gather(*mine)
        self.raise_problems(problems)
        return columns

    def _gather(self, *mine: Any) -> tuple[list[tuple[Any, ...]], dict[int, str]]:
        """What every rank says, and what has gone wrong on which."""
        own, text = self._own_failure, ""
        if own is not None:
            text = str(own) or type(own).__name__
            text = text if isinstance(own, WeightUpdateError) else f"{type(own).__name__}: {text}"
        texts, *columns = zip(*all_gather_object((text, *mine), self.comm), strict=True)
        return columns, {rank: text for rank, text in enumerate(texts) if text}

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
