"""The rounds of a weight update: agree, be ready, vote, decide, acknowledge; and what may fail.

The decision is the abort word of a group that is made for it: the first one to write it wins,
whoever reads it later reads the same, and it outlives every rank. A rank that has seen all votes
writes "commit"; one that has seen a failure writes "keep"; the death of a member writes itself. So
all survivors decide alike, wherever in the last round somebody dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator

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
from unisono.training.weights.lanes import Lanes
from unisono.training.weights.plan import Description, Plan, make_plan

_COMMIT, _KEEP = "commit", "keep"


class Session:
    """One rank's side of updates over a group."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.lanes = Lanes(comm)
        self._verdict: Communicator | None = None
        self._descriptions: tuple[str, ...] = ()
        self._next: Plan | None = None
        """The plan for what these descriptions say."""
        self._plan: Plan | None = None
        self._committed = False
        self._moving = False

    def close(self) -> None:
        """Give back what the updates needed; the group itself stays."""
        self.lanes.close()

    @contextlib.contextmanager
    def update(self, timeout_s: float | None) -> Iterator[None]:
        """Around an update: limits, and what its failures mean."""
        usual_s = self.comm.timeout_s
        self._plan, self._committed, self._moving = None, False, False
        try:
            if timeout_s is not None:
                self.comm.timeout_s = timeout_s
            yield
        except WeightUpdateError:
            raise
        except (GroupError, RendezvousError) as error:
            raise self._ended(error) from error
        except BaseException as error:
            self._end(f"rank {self.comm.rank} failed: {error!r}")
            raise
        finally:
            if timeout_s is not None and self.comm.errored is None:
                self.comm.timeout_s = usual_s
            if self._verdict is not None:
                self._verdict.close()
                self._verdict = None

    # -- rounds ------------------------------------------------------------------------------------

    def agree(self, describe: Callable[[], Description], version: int, wanted: int | None) -> Plan:
        """Tell what this rank holds, hear what the others do, and make the plan of all. `version`
        is what this rank has, `wanted` what it asks for.

        Raises WeightMismatch on every rank if it does not fit together.
        """
        cause: Exception | None = None
        holds = ""
        try:
            holds = json.dumps(describe().plain())
        except Exception as error:  # the others wait for us: say why we cannot
            cause = error
        problem = "" if cause is None else str(cause) or type(cause).__name__
        words = all_gather_object((problem, version, wanted, self.lanes.names(), holds), self.comm)
        problems, versions, asked, lanes, descriptions = zip(*words, strict=True)
        if any(problems):
            said = {rank: text for rank, text in enumerate(problems) if text}
            raise self._failed(said) from cause
        asked_for = set(asked) - {None}
        if len(asked_for) > 1:
            raise self._failed({}, f"senders ask for different versions: {sorted(asked_for)}")
        self.lanes.keep(lanes)
        if descriptions != self._descriptions:  # usually they are those of the last update
            everyone = [Description.from_plain(json.loads(text)) for text in descriptions]
            self._next = make_plan(everyone)
            self._descriptions = descriptions
        assert self._next is not None
        number = asked_for.pop() if asked_for else max(versions) + 1
        self._plan = dataclasses.replace(self._next, version=number)
        return self._plan

    def begin(self, plan: Plan, problem: Exception | None) -> None:
        """Make the groups; go on where every rank is ready."""
        problems = self._gathered(problem)
        if problems:
            raise self._failed(problems) from problem
        self.lanes.open(plan)
        if plan.terms.transactional:
            self._verdict = self.comm.split(range(self.comm.size), "verdict")
        self._moving = not plan.terms.transactional

    def decide(self, problem: Exception | None, commit: Callable[[], None]) -> None:
        """Vote. Every rank calls `commit`, or every rank raises WeightUpdateError."""
        problems, lost = self._vote(problem)
        if self._verdict is None:  # weights went into place: there is nothing to decide
            if lost is not None:
                raise lost
            if problems:
                raise self._failed(problems) from problem
            return commit()
        self._verdict.abort(_KEEP if problems or lost else _COMMIT)
        ending = self._verdict.errored
        self._committed = isinstance(ending, GroupAborted) and ending.reason == _COMMIT
        failure: Exception | None = None
        if self._committed:
            try:
                commit()
            except Exception as error:
                failure = error
        if lost is not None:
            raise lost
        if problems:
            raise self._failed(problems) from problem
        if not self._committed:
            assert ending is not None
            raise ending
        problems = self._gathered(failure)
        if problems:
            raise self._failed(problems) from failure
        return None

    def _vote(self, problem: Exception | None) -> tuple[dict[int, str], BaseException | None]:
        try:
            return self._gathered(problem), None
        except BaseException as error:  # an interrupt too: others may have seen all votes
            return {}, error

    def _gathered(self, problem: Exception | None) -> dict[int, str]:
        """What is wrong on which rank."""
        text = "" if problem is None else str(problem) or type(problem).__name__
        if problem is not None and not isinstance(problem, WeightUpdateError):
            text = f"{type(problem).__name__}: {text}"
        everyone = all_gather_object(text, self.comm)
        return {rank: said for rank, said in enumerate(everyone) if said}

    # -- failures ----------------------------------------------------------------------------------

    def _failed(self, problems: dict[int, str], text: str = "") -> WeightUpdateError:
        """An update that failed in good order: the group goes on."""
        listed = "; ".join(f"rank {rank}: {said}" for rank, said in problems.items())
        return self._error(text or listed, problems, ended=False)

    def _ended(self, error: Exception) -> WeightUpdateError:
        """An update that failed with its group."""
        ending = self.comm.errored
        cause = ending if isinstance(ending, PeerLost) else error  # a death is the same for all
        failed: dict[int, str] = {}
        if isinstance(cause, (PeerLost, GroupAborted)):
            failed[self.lanes.rank_of(cause.group, cause.peer)] = str(cause)
        elif isinstance(cause, CollectiveTimeout):
            ranks = [self.lanes.rank_of(cause.group, rank) for rank in cause.missing]
            failed = {rank: f"rank {rank} did not come by the deadline" for rank in ranks}
        text = str(cause)
        if isinstance(cause, CollectiveTimeout) and failed:
            text = f"{'; '.join(failed.values())}\n{text}"
        made = self._error(text, failed, ended=True)
        self._end(str(cause).split("\n", 1)[0])
        return made

    def _error(self, why: str, failed: dict[int, str], ended: bool) -> WeightUpdateError:
        version = -1 if self._plan is None else self._plan.version
        if self._committed:
            what = f"the other engines serve version {version}"
        elif self._moving:
            what = f"version {version} was not completed: engines may hold parts of two versions"
        else:
            new = "" if version < 0 else f" to version {version}"
            what = f"the weights were not updated{new}: every engine keeps what it had"
        first, _, rest = why.partition("\n")
        text = f"{what}; {first}" + (". Close the group and join again" if ended else "")
        return WeightUpdateError(
            f"{text}\n{rest}" if rest else text,
            version=version,
            failed=failed,
            committed=self._committed,
            group_ended=ended,
        )

    def _end(self, reason: str) -> None:
        self.lanes.abort(reason)
        self.comm.abort(reason)
