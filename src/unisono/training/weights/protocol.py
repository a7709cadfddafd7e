"""The rounds of a weight update: agree, move, vote, acknowledge; and its failures.

In the first round every rank says, in a few numbers, whether it holds what it held in the last
update and can use the same plan. If one cannot, all describe what they hold, make a plan, and
prepare for it.

The vote ends in a decision of the group (`Communicator.decide`): a rank that has seen all votes
proposes to commit, a rank that has seen a failure proposes to keep the old weights, and the first
proposal counts. It outlives every rank, so all survivors reach the same decision, no matter when in
the last round a rank dies.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

import torch

from unisono.collectives.objects import all_gather_object
from unisono.collectives.ragged import all_gather_integers, device_of
from unisono.comm.communicator import Communicator
from unisono.errors import (
    CollectiveTimeout,
    GroupAborted,
    GroupError,
    PeerLost,
    RendezvousError,
    WeightUpdateError,
    name_ranks,
)
from unisono.training.weights.deltas import DECLINED, HELD, MISSING
from unisono.training.weights.gpu_memory import ToldMemory, read_told
from unisono.training.weights.plan import Description, make_plan
from unisono.training.weights.shards import Held
from unisono.training.weights.transfers import Transfers

T = TypeVar("T")

_logger = logging.getLogger("unisono")

_KEEP, _COMMIT = 1, 2
_NEWS_S = 0.5
"""How long the news of a death may take to reach all groups of a process."""

_serials = itertools.count(1)
"""Each rank proposes its next serial for a decision, and the highest counts: it is above those of
all earlier decisions of the group."""


class UpdateProtocol:
    """One rank's side of updates over a group."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.transfers: Transfers | None = None
        """The transfers of the plan that all ranks agreed on last."""
        self.version = -1
        """The new version; -1: not known yet."""
        self.committed = False
        """Whether the ranks have decided for the new weights."""
        self._plan_serial = 0
        """The serial of the update in which that plan was made, once this rank has prepared for
        it."""
        self._serial = 0
        self._votes = False
        self._moving = False
        self._deltas = False
        """Whether only changes are sent between hosts: all ranks have their base version."""
        self._told_of_base = False
        self._usual_s: float | None = None
        """The group's own limit while an update has another."""
        self._own_failure: Exception | None = None
        """This rank's error. Dropped with the update: an exception holds the frames that it has
        passed, and they hold this rank's weights and groups."""

    def close(self) -> None:
        """Release what the updates needed; the group itself stays."""
        transfers, self.transfers, self._plan_serial = self.transfers, None, 0
        if transfers is not None:
            transfers.close()

    # -- around an update --------------------------------------------------------------------------

    # Not a generator: contextlib's frames would hold the exception and the exception those frames,
    # and this rank's weights and groups would stay until the garbage collector runs.

    def update(self, timeout_s: float | None = None, in_place: bool = False) -> Self:
        """Start an update, for `with`: sets how long its steps wait, and how its failures are
        reported. `in_place`: a failure leaves engines with parts of two versions."""
        self.version, self.committed, self._deltas = -1, False, False
        self._votes, self._moving = False, in_place
        if timeout_s is not None:
            self._usual_s, self.comm.timeout_s = self.comm.timeout_s, timeout_s
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
            usual_s, self._usual_s = self._usual_s, None
            if usual_s is not None and self.comm.errored is None:
                self.comm.timeout_s = usual_s

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Call a function; its exception is kept for the next round, in which all ranks learn of
        it."""
        try:
            return action()
        except Exception as error:
            self._own_failure = error
            return None

    # -- rounds ------------------------------------------------------------------------------------

    def meet(self, version: int, wanted: int | None, is_ready: bool, changes: bool) -> bool:
        """Meet all ranks. `version` is what this rank has, `wanted` what it asks for. Returns
        whether the last plan applies on all ranks; if no rank `changes` anything there is nothing
        to decide."""
        plan_serial = self._plan_serial if is_ready else 0
        asks = wanted is not None
        base = self.transfers.deltas.state() if self.transfers and is_ready else MISSING
        versions, asking, asked, changing, plans, serials, bases = self.exchange(
            version, asks, wanted or 0, changes, plan_serial, next(_serials), base
        )
        wishes = {number for asks, number in zip(asking, asked, strict=True) if asks}
        if len(wishes) > 1:
            raise self._failure({}, f"senders want different versions: {sorted(wishes)}")
        self.version = wishes.pop() if wishes else max(versions) + 1
        self._serial = max(serials)
        if not plan_serial or set(plans) != {plan_serial}:
            return False
        self._go_on(any(changing))
        if self.transfers and HELD in bases and DECLINED not in bases:
            sent = versions[self.transfers.plan.senders[0]]
            self._deltas = self._check_bases(
                base == MISSING or (base == HELD and version != sent)
                for base, version in zip(bases, versions, strict=True)
            )
        return True

    def _check_bases(self, differ: Iterable[object]) -> bool:
        """Whether all ranks have the base of the deltas. If not, a sender logs it once."""
        wrong = [rank for rank, differs in enumerate(differ) if differs]
        assert self.transfers is not None
        says = self.comm.rank == self.transfers.plan.senders[0] and not self._told_of_base
        if wrong and says:
            self._told_of_base = True
            _logger.warning(
                "unisono: sending all weights instead of the changes: %s did not hold the result "
                "of the last update (logged once)",
                name_ranks(wrong),
            )
        return not wrong

    def move(self, at: Held, base: Held, device: torch.device, progress: Any) -> list[str]:
        """Like `Transfers.move`; sends everything if the changes turn out to have had another
        base."""
        assert self.transfers is not None
        damaged = self.transfers.move(at, base, device, progress, self._deltas)
        if self._deltas and not self._check_bases(*self.exchange(len(damaged))):
            damaged = self.transfers.move(at, base, device, progress, False)
        return damaged

    def agree(self, holds: str) -> Transfers:
        """Exchange the text of this rank's description for those of all others, and make the common
        plan. Raises WeightMismatch on every rank if they do not fit."""
        (descriptions,) = self.gather(holds)
        self.close()
        everyone = [Description.from_text(text) for text in descriptions]
        is_in_memory = self.comm.backend == "unisono" and self.comm.transport.is_on_one_host
        plan = make_plan(everyone, packs=is_in_memory)
        self.transfers = Transfers(self.comm, plan)
        return self.transfers

    def exchange_memory(self, describe: Callable[[], str]) -> dict[int, ToldMemory]:
        """What senders say about their GPU memory that engines serve, by rank; empty if no engine
        does. Senders `describe` theirs."""
        assert self.transfers is not None
        exports = self.transfers.plan.exports
        if not exports:
            return {}
        told = self.attempt(describe) if self.comm.rank in exports else ""
        (texts,) = self.gather(told or "")
        return {rank: read_told(texts[rank]) for rank in exports}

    def begin(self, changes: bool) -> None:
        """Use a new plan if every rank is ready."""
        assert self.transfers is not None
        (changing,) = self.exchange(changes)
        self.transfers.open()
        self._plan_serial = self._serial
        self._go_on(any(changing))

    def _go_on(self, changes: bool) -> None:
        assert self.transfers is not None
        transactional = self.transfers.plan.options.transactional
        self._votes, self._moving = transactional and changes, not transactional

    def decide(self, commit: Callable[[], None]) -> None:
        """Vote. Every rank calls `commit`, or every rank raises WeightUpdateError."""
        if not self._votes:  # received in place: there is nothing to decide
            self.exchange()
            return commit()
        try:
            failed, *_ = self._exchange()
        except BaseException:  # also an interrupt: others may have seen all votes
            self._settle(_KEEP, commit)
            raise
        self._settle(_KEEP if any(failed) else _COMMIT, commit)
        if any(failed):
            self.gather()  # it raises
        self.exchange()  # the rank that decided to keep the old weights ended the group
        return None

    def _settle(self, proposal: int, commit: Callable[[], None]) -> None:
        """Commit if that is the decision."""
        try:
            self.committed = self.comm.decide(self._serial, proposal) == _COMMIT
        except RendezvousError:  # the store is gone: others may have decided earlier
            self._moving = True
            raise
        if self.committed:
            self.attempt(commit)

    def exchange(self, *mine: int) -> list[tuple[int, ...]]:
        """Every rank's values of these numbers. Raises WeightUpdateError if anything failed on any
        rank."""
        failed, *columns = self._exchange(*mine)
        if any(failed):
            self.gather()  # collect the failures, and raise
        return columns

    def _exchange(self, *mine: int) -> list[tuple[int, ...]]:
        """Which ranks have failed, and the numbers of all."""
        numbers = self._own_failure is not None, *mine
        return list(
            zip(*all_gather_integers(self.comm, numbers, device_of(self.comm)), strict=True)
        )

    def gather(self, *mine: Any) -> list[tuple[Any, ...]]:
        """Like `exchange`, for any plain data."""
        own, text = self._own_failure, ""
        if own is not None:
            text = str(own) or type(own).__name__
            text = text if isinstance(own, WeightUpdateError) else f"{type(own).__name__}: {text}"
        texts, *columns = zip(*all_gather_object((text, *mine), self.comm), strict=True)
        self.raise_problems({rank: text for rank, text in enumerate(texts) if text})
        return columns

    def raise_problems(self, problems: dict[int, str]) -> None:
        """Raise WeightUpdateError if anything failed on any rank."""
        if problems:
            raise self._failure(problems) from self._own_failure

    # -- failures ----------------------------------------------------------------------------------

    def _failure(self, problems: dict[int, str], text: str = "") -> WeightUpdateError:
        """A failed update after which the group is still usable."""
        listed = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
        return self._error(text or listed, problems, ended=False)

    def _group_failure(self, error: Exception) -> WeightUpdateError:
        """A failed update that ended its group."""
        end_s = time.monotonic() + isinstance(error, (PeerLost, GroupAborted)) * _NEWS_S
        while self.comm.errored is None and time.monotonic() < end_s:
            time.sleep(0.001)  # a transfer's group may know of a death first
        ending = self.comm.errored
        cause = ending if isinstance(ending, PeerLost) else error  # all ranks see the same death
        failed: dict[int, str] = {}
        if (
            isinstance(cause, (PeerLost, GroupAborted)) and cause.peer >= 0
        ):  # gloo does not name the rank
            failed[self._rank_of(cause.group, cause.peer)] = str(cause)
        elif isinstance(cause, CollectiveTimeout):
            ranks = [self._rank_of(cause.group, rank) for rank in cause.missing]
            failed = {rank: f"rank {rank} did not arrive before the deadline" for rank in ranks}
        text = str(cause)
        if isinstance(cause, CollectiveTimeout) and failed:
            text = f"{'; '.join(failed.values())}\n{text}"
        failure = self._error(text, failed, ended=True)
        self._abort(str(cause).split("\n", 1)[0])
        return failure

    def _error(self, why: str, failed: dict[int, str], ended: bool) -> WeightUpdateError:
        version = self.version
        if self.committed:
            what = (
                f"version {version} had been accepted: every engine that has not failed serves it"
            )
        elif self._moving:
            moved = "the update" if version < 0 else f"version {version}"
            mixed = "serve different" if self._votes else "hold parts of two"
            what = f"{moved} was not completed: engines may {mixed} versions"
        else:
            new = "" if version < 0 else f" to version {version}"
            what = f"the weights were not updated{new}: every engine keeps its old ones"
        if not self.committed and self.transfers is not None and self.transfers.plan.aliases:
            what += ", except with alias=True: those engines serve the trainer's memory as it is"
        first, _, rest = why.partition("\n")
        text = f"{what}; {first}" + (". Close the group and join again" if ended else "")
        return WeightUpdateError(
            f"{text}\n{rest}" if rest else text,
            version=version,
            failed=failed,
            committed=self.committed,
            group_ended=ended,
        )

    def _rank_of(self, group: str, rank: int) -> int:
        return rank if self.transfers is None else self.transfers.rank_of(group, rank)

    def _abort(self, reason: str) -> None:
        if self.transfers is not None:
            self.transfers.abort(reason)
        self.comm.abort(reason)
