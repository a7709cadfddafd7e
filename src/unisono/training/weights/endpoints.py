"""A trainer pushes new weights to inference engines: all of them take a version, or none does.

Trainer ranks make a `WeightSender`, engine ranks a `WeightReceiver`, over a group that they have
in common (`Communicator.join`); both call `update()`, and `weight_update` is both in one line.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from unisono.errors import name_number
from unisono.training.deferral import defer_signals
from unisono.training.weights.description import Description, UpdateOptions
from unisono.training.weights.gpu_memory import ExportedWeights, ToldMemory, open_unit
from unisono.training.weights.plan import WeightPlan
from unisono.training.weights.protocol import UpdateProtocol
from unisono.training.weights.reading import Place, Unit, bytes_of
from unisono.training.weights.shards import Box, HeldTensor, WeightReader, WeightShard, part_of
from unisono.training.weights.staging import Staging, do_all_or_none
from unisono.training.weights.transfers import Progress
from unisono.world.world import resolve

__all__ = ["WeightReceiver", "WeightSender", "WeightShard", "WeightUpdate", "weight_update"]

BUCKET_BYTES = 32 * 1024 * 1024

NewTensors = dict[str, torch.Tensor]
Held = Mapping[str, HeldTensor]


@dataclass(frozen=True)
class WeightUpdate:
    """What an update did on this rank: it is `version` now; so many `bytes` of so many `tensors`
    moved in so many `buckets`, in `seconds` since all ranks had come, for which this one
    `waited_s`.

    >>> unisono.training.WeightUpdate(1, 2, 1, bytes=10**9, seconds=0.5, waited_s=0.0).gb_per_s
    2.0
    """

    version: int
    tensors: int
    buckets: int
    bytes: int
    seconds: float
    waited_s: float

    @property
    def gb_per_s(self) -> float:
        """Bytes that this rank sent or received per second, in 1e9."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"version {self.version}: {self.bytes / 1e9:.3g} GB in "
            f"{name_number(self.tensors, 'tensor')} and {name_number(self.buckets, 'bucket')}, "
            f"{self.seconds:.3g} s, {self.gb_per_s:.3g} GB/s"
        )


class _Endpoint(ABC):
    """What senders and receivers have in common."""

    def __init__(self, group: Any, weights: Any, version: int, progress: Progress | None) -> None:
        self._protocol = UpdateProtocol(resolve(group))
        self._weights = weights
        self._progress = progress
        self._reader = WeightReader()
        self._text = ""
        """The description of what was read last, while this rank's shared memory was `_parts`."""
        self._parts: list[tuple[int, int, int]] = []
        self.version = version
        """The last version that was sent, or the one that the engine serves."""

    def attach(self, group: Any) -> None:
        """Go on over another `group`: the one that was joined after the last one had ended. Raises
        UnisonoError if there is no such group.

        >>> pair = comm.split([0, 1])
        >>> sender = unisono.training.WeightSender(pair, {"w": torch.ones(2)})
        >>> sender.attach(comm)
        """
        self._protocol.close()
        self._protocol = UpdateProtocol(resolve(group))

    def close(self) -> None:
        """Give back what the updates needed, the second copy included. The group is not closed.
        What an engine serves stays as it is, but once a sender is closed, engines must not serve
        its memory on a GPU any longer.

        >>> unisono.training.WeightSender(comm, {"w": torch.ones(2)}).close()
        """
        self._protocol.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _update(self, wanted: int | None, timeout_s: float | None) -> WeightUpdate:
        """An update, whichever side this is. `wanted` is the version that a sender asks for."""
        begin_s = time.perf_counter()
        mine: dict[str, HeldTensor] = {}
        with self._protocol.update(timeout_s):
            describe = partial(self._describe, mine)
            plan = self._protocol.agree(describe, self.version, wanted)
            agreed_s = time.perf_counter()
            self._carry_out(plan, mine)
        rank = self._protocol.comm.rank
        units = plan.units(rank)
        return WeightUpdate(
            version=plan.version,
            tensors=len({unit.name for unit in units} | plan.aliases.get(rank, {}).keys()),
            buckets=len(plan.steps(rank)),
            bytes=bytes_of(units),
            seconds=time.perf_counter() - agreed_s,
            waited_s=agreed_s - begin_s,
        )

    def _describe(self, mine: dict[str, HeldTensor]) -> str:
        """Read what this rank holds into `mine`. Returns the text of its description, which is made
        anew where more than the contents has changed."""
        is_as_before = True
        if self._weights is not None:
            held, is_as_before = self._reader.read(self._weights)
            mine.update(held)
        parts = self._protocol.comm.transport.own_parts()
        if not self._text or not is_as_before or parts != self._parts:
            self._text, self._parts = "", list(parts)
            self._text = self._description(mine).text()
        return self._text

    @abstractmethod
    def _description(self, mine: Held) -> Description: ...

    @abstractmethod
    def _carry_out(self, plan: WeightPlan, mine: Held) -> None: ...


class WeightSender(_Endpoint):
    """A trainer rank's side in `group`. Where several ranks send, each sends the shards that it
    holds.

    `weights` is a module, a mapping or pairs of names and tensors, which may be DTensors or
    `WeightShard`s; it is read anew at every update. Those that are shared tensors of the group
    (`unisono.share_module`) are not sent: engines read them where they lie. The senders' options
    hold for all:

    - `transactional`: engines receive into memory of their own and change over together; otherwise
      weights go straight into place, in half the memory, and a failure leaves engines with parts of
      two versions
    - `convert`: floating-point tensors travel in the type that the engines have them in
    - `checksum`: every bucket is compared with what was sent
    - `bucket_bytes`: what travels at a time; two buckets are under way
    - `progress`: called with the bytes moved and the bytes in all, after every bucket

    >>> model = torch.nn.Linear(2, 2)
    >>> if comm.rank == 0:
    ...     with unisono.training.WeightSender(comm, model) as sender:
    ...         update = sender.update()
    ... else:
    ...     with unisono.training.WeightReceiver(comm, model) as receiver:
    ...         update = receiver.update()
    >>> update.version
    1
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
        super().__init__(group, weights, 0, progress)
        if bucket_bytes < 1:
            raise ValueError(f"buckets of {bucket_bytes} bytes hold nothing")
        self._options = UpdateOptions(transactional, checksum, convert, bucket_bytes)
        self._exported = ExportedWeights()

    def update(self, version: int | None = None, *, timeout_s: float | None = None) -> WeightUpdate:
        """Send the weights as they are now, as `version`: by default one more than the highest that
        any rank has. Afterwards every engine serves it.

        `timeout_s` is how long each step waits for the others; the group's own limit by default.

        Raises WeightMismatch if the engines hold other tensors, before anything moves, and
        WeightUpdateError if an engine failed, died or fell behind: it says which, why, and what the
        engines serve now.

        >>> weights = {"w": torch.full((2,), comm.rank)}
        >>> if comm.rank == 0:
        ...     update = unisono.training.WeightSender(comm, weights).update(version=7)
        ... else:
        ...     update = unisono.training.WeightReceiver(comm, weights).update()
        >>> update.version, weights["w"]
        (7, tensor([0, 0]))
        """
        return self._update(version, timeout_s)

    def _description(self, mine: Held) -> Description:
        return Description.of("sender", mine, partial(Place.of, self._parts), options=self._options)

    def _carry_out(self, plan: WeightPlan, mine: Held) -> None:
        protocol = self._protocol
        served = {name: mine[name].tensor for name in plan.exports.get(protocol.comm.rank, ())}
        protocol.exchange_memory(plan, partial(self._exported.describe, served))
        protocol.begin(plan, bool(plan.transfers))
        device = protocol.groups.device_for(plan, mine)
        protocol.groups.move(
            plan, lambda unit: mine[unit.name].part(unit.box), device, self._progress
        )
        protocol.decide(partial(self._exported.keep, served))
        self.version = plan.version

    def close(self) -> None:
        super().close()
        self._exported.close()


class WeightReceiver(_Endpoint):
    """An engine rank's side in `group`.

    `weights` is what the engine serves: a module, a mapping or pairs of names and tensors; a
    DTensor or a `WeightShard` receives its part of the whole. Without it the engine takes whatever
    the trainer holds, and `commit` gets it.

    - `prepare`: called with the new tensors by name, before the vote; if it raises, no engine
      changes over
    - `commit`: called with them once all engines are ready: must only swap, and not fail; signals
      wait until it is over. By default the memory of the engine's tensors is swapped, or where
      others hold views of it, overwritten: all of it or none, whatever interrupts.
    - `partial`: this engine takes only the names that it has
    - `alias`: from the first update on this engine's tensors are the trainer's memory, shared
      tensors of the group (`unisono.share_module`) or tensors of the same GPU: there is no second
      copy, and no way back to an older version. The engine must not serve while the trainer changes
      its weights.
    - `version`: what the engine serves at the beginning
    - `progress`: called with the bytes received and the bytes in all, after every bucket

    >>> if comm.rank == 0:
    ...     update = unisono.training.WeightSender(comm, {"w": torch.ones(2)}).update()
    ... else:
    ...     served = {}
    ...     receiver = unisono.training.WeightReceiver(comm, commit=served.update)
    ...     update = receiver.update()
    ...     assert served["w"].tolist() == [1, 1] and receiver.version == 1
    """

    def __init__(
        self,
        group: Any,
        weights: Any = None,
        *,
        prepare: Callable[[NewTensors], Any] | None = None,
        commit: Callable[[NewTensors], Any] | None = None,
        partial: bool = False,
        alias: bool = False,
        version: int = 0,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(group, weights, version, progress)
        if weights is None and commit is None:
            raise ValueError("an engine without weights needs a commit, which takes them")
        self._prepare = prepare
        self._commit = commit
        self._partial = partial
        self._alias = alias
        self._staging = Staging()
        self._settled: tuple[object, object] | None = None
        """What the engine serves on a GPU, and where it lies: an update for which both are the same
        changes nothing but the version."""

    def update(self, *, timeout_s: float | None = None) -> WeightUpdate:
        """Receive the next version. Afterwards `version` is that of all engines.

        `timeout_s` is how long each step waits for the others, the first one for the trainer to
        begin; the group's own limit by default.

        Raises as `WeightSender.update`; the engine then serves what it did before, unless the
        error's `committed` says otherwise, and `version` says which.

        >>> weights = {"w": torch.full((2,), comm.rank)}
        >>> if comm.rank == 0:
        ...     update = unisono.training.WeightSender(comm, weights).update()
        ... else:
        ...     update = unisono.training.WeightReceiver(comm, weights).update(timeout_s=60)
        >>> weights["w"]
        tensor([0, 0])
        """
        return self._update(None, timeout_s)

    def _description(self, mine: Held) -> Description:
        self._settled = None
        takes_all = self._weights is None
        return Description.of(
            "receiver", mine, partial=self._partial, alias=self._alias, takes_all=takes_all
        )

    def _carry_out(self, plan: WeightPlan, mine: Held) -> None:
        protocol = self._protocol
        told = protocol.exchange_memory(plan)
        device = protocol.groups.device_for(plan, mine)
        is_settled = bool(told) and self._settled == (plan.aliases, told)
        try:
            if not self._alias:
                protocol.attempt(lambda: self._allocate(plan, mine, device))
            elif not is_settled:
                self._settled = None
                protocol.attempt(lambda: self._find_views(plan, mine, told))
            protocol.begin(plan, not is_settled)
            part = partial(self._part, plan, mine)
            damaged = protocol.groups.move(plan, part, device, self._progress)
            protocol.attempt(lambda: self._check(damaged))
            protocol.decide(lambda: self._change_over(plan, mine, is_settled))
            if self._alias and self._commit is None and self._prepare is None:
                self._settled = plan.aliases, told
        finally:
            if self._alias:
                self._staging.hand_over()  # these are the trainer's tensors: nothing to reuse

    def close(self) -> None:
        super().close()
        self._staging.hand_over()

    def _find_views(self, plan: WeightPlan, mine: Held, told: Mapping[int, ToldMemory]) -> None:
        """Have the trainer's memory where the engine will serve it."""
        mapped = self._protocol.groups.mapped
        views = {}
        for name, unit in plan.aliases[self._protocol.comm.rank].items():
            if unit.gpu:
                own = mine[name].tensor if name in mine else None
                views[name] = open_unit(unit, told[unit.sender], own)
            else:
                views[name] = mapped.find(unit)
        self._staging.alias(plan, None if self._weights is None else mine, views)
        if self._commit is None:
            self._staging.check_can_serve(mine)

    def _allocate(self, plan: WeightPlan, mine: Held, device: torch.device) -> None:
        """Have memory for what will come."""
        self._protocol.groups.mapped.hold(plan.units(self._protocol.comm.rank))
        if plan.options.transactional:
            self._staging.prepare(plan, mine if self._weights is not None else None, device)
        elif self._weights is None or self._prepare or self._commit:
            raise ValueError("prepare and commit need a transactional update")
        elif any(held.tensor.device.type != device.type for held in mine.values()):
            raise ValueError(f"weights that go straight into place must lie on {device.type}")

    def _check(self, damaged: Sequence[str]) -> None:
        """Whether the engine can serve what has come."""
        if damaged:
            raise RuntimeError("; ".join(damaged))
        if self._prepare is not None:
            self._prepare(dict(self._staging.tensors))

    def _part(self, plan: WeightPlan, mine: Held, unit: Unit) -> torch.Tensor:
        """Where a unit is received."""
        if not plan.options.transactional:
            return mine[unit.name].part(unit.box)
        whole = plan.tensors[unit.name].whole
        own = mine[unit.name].box if unit.name in mine else Box((0,) * len(whole), whole)
        return part_of(self._staging.tensors[unit.name], own, unit.box)

    def _change_over(self, plan: WeightPlan, mine: Held, is_settled: bool) -> None:
        now_served = partial(setattr, self, "version", plan.version)
        if is_settled:
            now_served()
        elif self._commit is not None:
            with defer_signals():
                do_all_or_none([partial(self._commit, self._staging.hand_over()), now_served], [])
        elif self._alias:
            self._staging.serve(mine, now_served)
        elif plan.options.transactional:
            self._staging.swap(mine, now_served)
        else:
            now_served()


def weight_update(
    weights: Any, group: Any = None, src: int | Collection[int] = 0, **options: Any
) -> WeightUpdate:
    """Push `weights` from the trainer to all engines of a `group` (None: the world), in one line on
    every rank.

    The ranks in `src` send what they hold, all others receive into what they hold. `options` are
    those of `WeightSender` or `WeightReceiver`, and `version` and `timeout_s`. Returns and raises
    as their `update`. Raises WeightMismatch or WeightUpdateError.

    >>> weights = {"w": torch.full((2,), comm.rank)}
    >>> unisono.training.weight_update(weights, src=1).version
    1
    >>> weights["w"]
    tensor([1, 1])
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
