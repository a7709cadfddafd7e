"""A trainer pushes new weights to inference engines: all of them take a version, or none does.

Trainer ranks make a `WeightSender`, engine ranks a `WeightReceiver`, over a group that they have
in common (`Communicator.join`); both call `update()`, and `weight_update` is both in one line.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from unisono.collectives.integers import device_of
from unisono.training.deferral import signals_wait
from unisono.training.weights.lanes import Progress
from unisono.training.weights.plan import Description, Plan, Terms, Unit
from unisono.training.weights.protocol import Session
from unisono.training.weights.shards import Box, Held, WeightShard, held, part_of
from unisono.training.weights.staging import Staging, do_all_or_none
from unisono.world.world import resolve

__all__ = ["WeightReceiver", "WeightSender", "WeightShard", "WeightUpdate", "weight_update"]

BUCKET_BYTES = 32 * 1024 * 1024

Staged = dict[str, torch.Tensor]
_Self = TypeVar("_Self", bound="_Party")


@dataclass(frozen=True)
class WeightUpdate:
    """What an update did on this rank: `seconds` since all ranks had come, for which this one
    `waited_s`."""

    version: int
    tensors: int
    buckets: int
    bytes: int
    seconds: float
    waited_s: float

    @property
    def gb_per_s(self) -> float:
        """Bytes that this rank sent or received a second, in 1e9."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def share_of_copy_floor(self) -> float:
        """How long copying these bytes twice in memory takes, as a share of `seconds`."""
        floor_s = 2 * self.bytes / copy_bytes_per_s()
        return floor_s / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"version {self.version}: {self.bytes / 1e9:.3g} GB in {self.tensors} tensors and "
            f"{self.buckets} buckets, {self.seconds:.3g} s, {self.gb_per_s:.3g} GB/s, "
            f"{100 * self.share_of_copy_floor:.0f} % of the copy floor"
        )


@functools.cache
def copy_bytes_per_s() -> float:
    """How fast this process copies memory; measured once."""
    source, target = torch.ones(32 << 20), torch.ones(32 << 20)  # more than caches hold
    best_s = float("inf")
    for _ in range(3):
        begin_s = time.perf_counter()
        target.copy_(source)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return source.numel() * 4 / best_s


class _Party:
    """What senders and receivers have in common."""

    def __init__(self, group: Any, progress: Progress | None) -> None:
        self._session = Session(resolve(group))
        self._progress = progress

    def attach(self, group: Any) -> None:
        """Go on over another group: the one that was joined after the last one had ended."""
        self._session.close()
        self._session = Session(resolve(group))

    def close(self) -> None:
        """Give back what the updates needed. The group is not closed."""
        self._session.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _summary(self, plan: Plan, begin_s: float, agreed_s: float) -> WeightUpdate:
        rank = self._session.comm.rank
        steps = plan.steps(rank)
        names = {unit.name for lane, i in steps for unit in lane.buckets[i].units}
        seconds = time.perf_counter() - agreed_s
        waited_s = agreed_s - begin_s
        return WeightUpdate(
            plan.version, len(names), len(steps), plan.bytes(rank), seconds, waited_s
        )


class WeightSender(_Party):
    """A trainer rank's side. Where several ranks send, each sends the shards that it holds.

    `weights` is a module, a mapping or pairs of names and tensors, which may be DTensors or
    `WeightShard`s; it is read anew at every update. The senders' options hold for all:

    transactional   engines receive into memory of their own and change over together; otherwise
                    weights go straight into place, in half the memory, and a failure leaves
                    engines with parts of two versions
    convert         floating-point tensors travel in the type that the engines have them in
    checksum        every bucket is compared with what was sent
    bucket_bytes    what travels at a time; two buckets are under way
    progress        called with the bytes moved and the bytes in all, after every bucket
    """

    def __init__(
        self,
        group: Any,
        weights: Any,
        *,
        transactional: bool = True,
        convert: bool = False,
        checksum: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(group, progress)
        if bucket_bytes < 1:
            raise ValueError(f"buckets of {bucket_bytes} bytes hold nothing")
        self._weights = weights
        self._terms = Terms(transactional, checksum, convert, bucket_bytes)
        self.version = 0
        """The last version that was sent."""

    def update(self, version: int | None = None, *, timeout_s: float | None = None) -> WeightUpdate:
        """Send the weights as they are now, as `version`: by default one more than the highest that
        any rank has. Afterwards every engine serves it.

        `timeout_s` is how long each step waits for the others; the group's own limit by default.

        Raises WeightMismatch if the engines hold other tensors, before anything moves, and
        WeightUpdateError if an engine failed, died or fell behind: it says which, why, and what
        the engines serve now.
        """
        session = self._session
        begin_s = time.perf_counter()
        mine: dict[str, Held] = {}

        def describe() -> Description:
            mine.update(held(self._weights))
            return Description.of("sender", mine, terms=self._terms)

        with session.update(timeout_s):
            plan = session.agree(describe, self.version, version)
            agreed_s = time.perf_counter()
            session.begin(plan, None)
            session.lanes.move(plan, lambda unit: mine[unit.name].part(unit.box), self._progress)
            session.decide(None, lambda: None)
        self.version = plan.version
        return self._summary(plan, begin_s, agreed_s)


class WeightReceiver(_Party):
    """An engine rank's side.

    `weights` is what the engine serves: a module, a mapping or pairs of names and tensors; a
    DTensor or a `WeightShard` receives its part of the whole. Without it the engine takes whatever
    the trainer holds, and `commit` gets it.

    prepare(staged)   called with the new tensors by name, before the vote; if it raises, no engine
                      changes over
    commit(staged)    called once all engines are ready: must only swap, and not fail; signals wait
                      until it is over. By default the memory of the engine's tensors is exchanged,
                      or where others hold views of it, overwritten: all of it or none, whatever
                      interrupts.
    partial           this engine takes only the names that it has
    version           what the engine serves at the beginning
    progress          called with the bytes received and the bytes in all, after every bucket
    """

    def __init__(
        self,
        group: Any,
        weights: Any = None,
        *,
        prepare: Callable[[Staged], Any] | None = None,
        commit: Callable[[Staged], Any] | None = None,
        partial: bool = False,
        version: int = 0,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(group, progress)
        if weights is None and commit is None:
            raise ValueError("an engine without weights needs a commit, which takes them")
        self._weights = weights
        self._prepare = prepare
        self._commit = commit
        self._partial = partial
        self._staging = Staging()
        self.version = version
        """The version that the engine serves."""

    def update(self, *, timeout_s: float | None = None) -> WeightUpdate:
        """Receive the next version. Afterwards `version` is that of all engines.

        `timeout_s` is how long each step waits for the others, the first one for the trainer to
        begin; the group's own limit by default.

        Raises as `WeightSender.update`; the engine then serves what it did before, unless the
        error's `committed` says otherwise, and `version` says which.
        """
        session = self._session
        begin_s = time.perf_counter()
        mine: dict[str, Held] = {}

        def describe() -> Description:
            if self._weights is not None:
                mine.update(held(self._weights))
            known = None if self._weights is None else mine
            return Description.of("receiver", known, partial=self._partial)

        with session.update(timeout_s):
            plan = session.agree(describe, self.version, None)
            agreed_s = time.perf_counter()
            problem = self._ready(plan, mine)
            session.begin(plan, problem)
            damaged = session.lanes.move(plan, self._target(plan, mine), self._progress)
            problem = self._prepared(damaged)
            session.decide(problem, lambda: self._change_over(plan, mine))
        return self._summary(plan, begin_s, agreed_s)

    def _ready(self, plan: Plan, mine: dict[str, Held]) -> Exception | None:
        """Have memory for what will come; what stands against it."""
        try:
            device = torch.device(device_of(self._session.comm))
            if plan.terms.transactional:
                self._staging.prepare(plan, mine if self._weights is not None else None, device)
            elif self._weights is None or self._prepare or self._commit:
                raise ValueError("prepare and commit need a transactional update")
            elif any(one.tensor.device.type != device.type for one in mine.values()):
                raise ValueError(f"weights that go straight into place must lie on {device.type}")
        except Exception as error:
            return error
        return None

    def _target(self, plan: Plan, mine: dict[str, Held]) -> Callable[[Unit], torch.Tensor]:
        if not plan.terms.transactional:
            return lambda unit: mine[unit.name].part(unit.box)

        def staged(unit: Unit) -> torch.Tensor:
            whole = plan.tensors[unit.name].whole
            own = mine[unit.name].box if unit.name in mine else Box((0,) * len(whole), whole)
            return part_of(self._staging.tensors[unit.name], own, unit.box)

        return staged

    def _prepared(self, damaged: list[str]) -> Exception | None:
        if damaged:
            return RuntimeError("; ".join(damaged))
        try:
            if self._prepare is not None:
                self._prepare(dict(self._staging.tensors))
        except Exception as error:
            return error
        return None

    def _change_over(self, plan: Plan, mine: dict[str, Held]) -> None:
        now_served = partial(setattr, self, "version", plan.version)
        if self._commit is not None:
            with signals_wait():
                do_all_or_none([partial(self._commit, self._staging.hand_over()), now_served], [])
        elif plan.terms.transactional:
            self._staging.swap(mine, now_served)
        else:
            now_served()


def weight_update(
    weights: Any, group: Any = None, src: int | Collection[int] = 0, **options: Any
) -> WeightUpdate:
    """Push weights from the trainer to all engines of a group, in one line on every rank.

    The ranks in `src` send what they hold, all others receive into what they hold. `options` are
    those of `WeightSender` or `WeightReceiver`, and `version` and `timeout_s`. Returns and raises
    as their `update`.
    """
    comm = resolve(group)
    senders = {src} if isinstance(src, int) else set(src)
    timeout_s = options.pop("timeout_s", None)
    if comm.rank in senders:
        version = options.pop("version", None)
        with WeightSender(comm, weights, **options) as sender:
            return sender.update(version, timeout_s=timeout_s)
    with WeightReceiver(comm, weights, **options) as receiver:
        return receiver.update(timeout_s=timeout_s)
