"""A trainer pushes new weights to inference engines: either all of them take a version, or none.

Trainer ranks make a `WeightSender`, engine ranks a `WeightReceiver`, over a common group
(`Communicator.join`); both call `update()`, and `weight_update` does both in one line.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch

from unisono.errors import name_number
from unisono.training.deferral import defer_signals
from unisono.training.weights.gpu_memory import ExportedWeights, ToldMemory, open_unit
from unisono.training.weights.load_plan import LoadPlan
from unisono.training.weights.plan import Description, UpdateOptions
from unisono.training.weights.protocol import UpdateProtocol
from unisono.training.weights.shards import (
    Held,
    Known,
    MappedPlace,
    WeightReader,
    WeightShard,
    check_memory,
    check_writable,
)
from unisono.training.weights.staging import WeightStaging, do_all_or_none, view_of
from unisono.training.weights.transfers import Progress, Transfers
from unisono.world.world import resolve

__all__ = ["WeightReceiver", "WeightSender", "WeightShard", "WeightUpdate", "weight_update"]

BUCKET_BYTES = 32 * 1024 * 1024

NewTensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class WeightUpdate:
    """What an update did on this rank: its `version`; the `bytes` of its `tensors` that moved, in
    how many `buckets`, in how many `seconds` after all ranks had arrived; this rank `waited_s` for
    that. If only changes were sent, they had `delta_bytes`; a sender keeps `snapshot_bytes` of
    memory for them. See also `WeightSender`.

    >>> unisono.training.WeightUpdate(1, 2, 1, bytes=10**9, seconds=0.5, waited_s=0.0).gb_per_s
    2.0
    """

    version: int
    tensors: int
    buckets: int
    bytes: int
    seconds: float
    waited_s: float
    delta_bytes: int = 0
    snapshot_bytes: int = 0

    @property
    def gb_per_s(self) -> float:
        """Bandwidth of this rank in 1e9 bytes per second."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"version {self.version}: {self.bytes / 1e9:.3g} GB in "
            f"{name_number(self.tensors, 'tensor')} and {name_number(self.buckets, 'bucket')}, "
            f"{self.seconds:.3g} s, {self.gb_per_s:.3g} GB/s"
            + (f", by {self.delta_bytes / 1e9:.3g} GB of changes" if self.delta_bytes else "")
            + (f"; snapshot of {self.snapshot_bytes / 1e9:.3g} GB" if self.snapshot_bytes else "")
        )


class _Endpoint(ABC):
    """What senders and receivers have in common."""

    _sends: bool

    def __init__(self, group: Any, weights: Any, version: int, progress: Progress | None) -> None:
        self._protocol = UpdateProtocol(resolve(group))
        self._weights = weights
        self._progress = progress
        self._reader = WeightReader()
        self._text = ""
        """The description of what was read last."""
        self._told: dict[int, ToldMemory] = {}
        """What senders said about their GPU memory that engines serve."""
        self._changes = True
        """Whether this rank has anything to send, to receive or to exchange."""
        self.version = version
        """The last version that was sent, or the one that the engine serves."""

    def attach(self, group: Any) -> None:
        """Continue with another `group`, joined after the last one ended. Raises UnisonoError if
        there is no such group.

        >>> pair = comm.split([0, 1])
        >>> sender = unisono.training.WeightSender(pair, {"w": torch.ones(2)})
        >>> sender.attach(comm)
        """
        self._protocol.close()
        self._protocol = UpdateProtocol(resolve(group))

    def close(self) -> None:
        """Release what the updates needed, including the second copy. The group is not closed. An
        engine's weights stay, but after a sender is closed, engines must no longer serve its GPU
        memory.

        >>> unisono.training.WeightSender(comm, {"w": torch.ones(2)}).close()
        """
        self._protocol.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _update(self, wanted: int | None, timeout_s: float | None) -> WeightUpdate:
        """An update, on either side. `wanted` is the version that a sender asks for."""
        begin_s = time.perf_counter()
        protocol = self._protocol
        with protocol.update(timeout_s):
            mine, is_ready = protocol.attempt(self._read) or (Held({}, {}), False)
            goes_on = protocol.meet(self.version, wanted, is_ready, self._changes)
            met_s = time.perf_counter()
            if not goes_on:
                transfers = protocol.agree(self._text)
                self._told = protocol.exchange_memory(partial(self._tell, transfers, mine))
                protocol.attempt(partial(self._make_room, transfers, mine))
                protocol.begin(self._changes)
            assert protocol.transfers is not None
            self._carry_out(protocol.transfers, mine)
            transfers = protocol.transfers
            transfers.deltas.has_base = True
        return WeightUpdate(
            version=protocol.version,
            tensors=transfers.tensors,
            buckets=transfers.buckets,
            bytes=transfers.bytes,
            seconds=time.perf_counter() - met_s,
            waited_s=met_s - begin_s,
            delta_bytes=transfers.deltas.sent_bytes,
            snapshot_bytes=transfers.deltas.snapshot_bytes,
        )

    def _read(self) -> tuple[Held, bool]:
        """What this rank holds, and whether the last plan still applies. If more than the contents
        has changed, it does not, and the weights are described again."""
        mine = Held({}, {})
        is_as_before = True
        # Memory in which others may read a trainer's weights.
        parts = self._protocol.comm.transport.own_parts() if self._sends else []
        if self._weights is not None:
            mine, is_as_before = self._reader.read(self._weights, parts)
        if self._sends:
            check_memory(mine.tensors.items())
        if not self._text or not is_as_before:
            before, self._text = self._text, ""
            self._text = self._description(mine, partial(MappedPlace.of, parts)).text()
            is_as_before = self._text == before
        transfers = self._protocol.transfers
        return mine, is_as_before and transfers is not None and self._is_ready(transfers, mine)

    @abstractmethod
    def _description(
        self, mine: Held, place_of: Callable[..., MappedPlace | None]
    ) -> Description: ...

    @abstractmethod
    def _is_ready(self, transfers: Transfers, mine: Held) -> bool:
        """Whether the plan of the last update still applies to this rank."""

    def _tell(self, transfers: Transfers, mine: Held) -> str:
        """Where engines find a trainer's memory on a GPU."""
        return ""

    @abstractmethod
    def _make_room(self, transfers: Transfers, mine: Held) -> None:
        """Prepare for an update with this plan."""

    @abstractmethod
    def _carry_out(self, transfers: Transfers, mine: Held) -> None:
        """Move the weights, vote, and switch."""


class WeightSender(_Endpoint):
    """A trainer rank's side in `group`. If several ranks send, each sends its own shards. Cost: the
    weights cross once to each host.

    `weights` is a module, a mapping or pairs of names and tensors, which may be DTensors or
    `WeightShard`s; it is read again at every update. The senders' options apply to all ranks:

    - `transactional`: engines receive into a second copy and switch together; otherwise weights are
      received in place, in half the memory, and a failure leaves engines with parts of two versions
    - `convert`: floating-point tensors are sent in the engines' dtype
    - `checksum`: every bucket is compared with what was sent
    - `deltas`: between hosts an update sends what has changed since the last one, if that is
      faster; a sender keeps a copy of what it sends for this
    - `bucket_bytes`: the size of a message; two buckets are in flight
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

    _sends = True

    def __init__(
        self,
        group: Any,
        weights: Any,
        *,
        transactional: bool = True,
        convert: bool = False,
        checksum: bool = True,
        deltas: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(group, weights, 0, progress)
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
        self._options = UpdateOptions(transactional, checksum, convert, bucket_bytes, deltas)
        self._exported = ExportedWeights()

    def update(self, version: int | None = None, *, timeout_s: float | None = None) -> WeightUpdate:
        """Send the current weights as `version`: by default one more than the highest version of
        any rank. Afterwards every engine serves it.

        `timeout_s` is how long each step waits for the others; by default the group's limit.

        Raises WeightMismatch if the engines hold other tensors, before anything moves, and
        WeightUpdateError if an engine failed, died or timed out: it says which, why, and what the
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

    def close(self) -> None:
        super().close()
        self._exported.close()

    def _description(self, mine: Held, place_of: Callable[..., MappedPlace | None]) -> Description:
        ties = self._reader.ties
        return Description.of("sender", mine, ties, place_of, options=self._options)

    def _is_ready(self, transfers: Transfers, mine: Held) -> bool:
        served = self._served(transfers, mine)
        return not served or self._exported.lie_still(served)

    def _tell(self, transfers: Transfers, mine: Held) -> str:
        return self._exported.describe(self._served(transfers, mine))

    def _make_room(self, transfers: Transfers, mine: Held) -> None:
        self._changes = bool(transfers.plan.transfers)

    def _served(self, transfers: Transfers, mine: Held) -> dict[str, torch.Tensor]:
        """The GPU memory of this rank that engines serve."""
        names = transfers.plan.exports.get(self._protocol.comm.rank, ())
        return {name: mine.tensors[name] for name in names}

    def _carry_out(self, transfers: Transfers, mine: Held) -> None:
        self._protocol.move(mine, mine, transfers.device_for(mine), self._progress)
        served = self._served(transfers, mine)

        def commit() -> None:
            self.version = self._protocol.version  # also if the update fails after the decision
            self._exported.keep(served)

        self._protocol.decide(commit)


class WeightReceiver(_Endpoint):
    """An engine rank's side in `group`. Cost: a second copy of the weights, where transactional.

    `weights` is what the engine serves: a module, a mapping or pairs of names and tensors; a
    DTensor or a `WeightShard` receives its part of the whole. With a `LoadPlan` the engine receives
    what its loader reads, and the loader runs before the vote; what it writes is written after it.
    Without `weights` the engine takes all weights of the trainer, and `commit` gets them.

    - `prepare`: called with the new tensors by name, before the vote; if it raises, no engine
      switches
    - `commit`: called with them once all engines are ready: it must only swap, and not fail;
      signals wait until it returns. By default the memory of the engine's tensors is swapped, or
      overwritten if they are small or others hold views of it: all or none, despite interrupts.
    - `reuse`: `commit` only reads the new tensors, and the next update receives into their memory
    - `partial`: this engine takes only the names that it has
    - `alias`: from the first update on, this engine's tensors are the trainer's memory, shared
      tensors of the group (`unisono.share_module`) or tensors of the same GPU: there is no second
      copy and no rollback. The engine must not serve while the trainer changes its weights.
    - `version`: the version that the engine serves at the start
    - `progress`: called with the bytes received and the bytes in all, after every bucket

    >>> if comm.rank == 0:
    ...     update = unisono.training.WeightSender(comm, {"w": torch.ones(2)}).update()
    ... else:
    ...     served = {}
    ...     receiver = unisono.training.WeightReceiver(comm, commit=served.update)
    ...     update = receiver.update()
    ...     assert served["w"].tolist() == [1, 1] and receiver.version == 1
    """

    _sends = False

    def __init__(
        self,
        group: Any,
        weights: Any = None,
        *,
        prepare: Callable[[NewTensors], Any] | None = None,
        commit: Callable[[NewTensors], Any] | None = None,
        reuse: bool = False,
        partial: bool = False,
        alias: bool = False,
        version: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self._plan = None
        if isinstance(weights, LoadPlan):
            self._plan = plan = weights
            if alias or reuse or prepare or commit:
                raise ValueError(
                    "a LoadPlan says itself how weights are loaded: leave out prepare, commit, "
                    "reuse and alias"
                )
            weights, reuse = plan.weights, True
            prepare, commit = plan.prepare, lambda received: plan.commit()
        super().__init__(group, weights, version, progress)
        if weights is None and commit is None:
            raise ValueError("an engine without weights needs a commit function to receive them")
        self._prepare = prepare
        self._commit = commit
        self._reuse = reuse
        self._partial = partial
        self._alias = alias
        self._staging = WeightStaging()
        self._writable: set[Known] = set()
        self._served_by: Transfers | None = None
        """The plan by which the engine serves the trainer's memory. While its tensors are still
        there, an update with the same plan changes only the version."""

    def update(self, *, timeout_s: float | None = None) -> WeightUpdate:
        """Receive the next version. Afterwards `version` is that of all engines.

        `timeout_s` is how long each step waits for the others, the first one for the trainer to
        begin; by default the group's limit.

        Raises what `WeightSender.update` raises; the engine then still serves its old weights,
        unless the error's `committed` is True, and `version` says which.

        >>> weights = {"w": torch.full((2,), comm.rank)}
        >>> if comm.rank == 0:
        ...     update = unisono.training.WeightSender(comm, weights).update()
        ... else:
        ...     update = unisono.training.WeightReceiver(comm, weights).update(timeout_s=60)
        >>> weights["w"]
        tensor([0, 0])
        """
        try:
            return self._update(None, timeout_s)
        finally:
            if self._alias:
                self._staging.hand_over()  # these are the trainer's tensors: nothing to reuse
            if self._plan is not None:
                self._plan.steps = []  # after a failure: they hold the memory to be reused

    def close(self) -> None:
        super().close()
        self._staging.hand_over()
        self._served_by = None

    def _description(self, mine: Held, place_of: Callable[..., MappedPlace | None]) -> Description:
        return Description.of(
            "receiver",
            mine,
            self._reader.ties,
            partial=self._partial,
            alias=self._alias,
            takes_all=self._weights is None,
            keeps=self._weights is not None and (self._commit is None or self._reuse),
        )

    def _is_ready(self, transfers: Transfers, mine: Held) -> bool:
        if self._served_by is transfers and self._staging.is_served(mine):
            self._changes = False
            return True
        try:
            self._make_room(transfers, mine)
        except Exception:  # perhaps for an outdated plan: all ranks make a new one
            return False
        return True

    def _make_room(self, transfers: Transfers, mine: Held) -> None:
        """Allocate memory for the new weights, or open the trainer's if the engine will serve
        it."""
        self._served_by, self._changes = None, True
        plan, device = transfers.plan, transfers.device_for(mine)
        own, ties = (None, None) if self._weights is None else (mine, self._reader.ties)
        if self._alias:
            views = {}
            for name, unit in plan.aliases[self._protocol.comm.rank].items():
                if unit.gpu:
                    served = mine[name].tensor if name in mine else None
                    views[name] = open_unit(unit, self._told[unit.sender], served)
                else:
                    views[name] = view_of(self._protocol.comm, unit)
            self._staging.alias(plan, ties, views)
            if self._commit is None:
                self._staging.check_can_serve(mine)
            return
        if own is not None and self._commit is None:
            check_writable(own.tensors.items(), self._writable)
        if plan.options.transactional:
            # `prepare` and `commit` get all new tensors
            waits = self._commit is None and self._prepare is None
            transfers.unpacks = not (waits and transfers.can_stay_packed(mine, device))
            packed = () if transfers.unpacks else plan.packed
            self._staging.prepare(plan, ties, own, device, packed)
            transfers.deltas.has_base &= self._staging.is_reused or self._holds_base(mine, device)
        elif own is None or self._prepare or self._commit:
            raise ValueError("prepare and commit need a transactional update")
        elif not mine.all_are_on(device):
            raise ValueError(f"weights that are received in place must be on {device.type}")
        else:
            check_memory(mine.tensors.items())

    def _carry_out(self, transfers: Transfers, mine: Held) -> None:
        protocol, plan = self._protocol, transfers.plan
        at, device = mine, transfers.device_for(mine)
        if plan.options.transactional:
            at = self._staging.received(mine)
        base = mine if self._holds_base(mine, device) else at
        damaged = protocol.move(at, base, device, self._progress)
        protocol.attempt(partial(self._check, damaged))
        protocol.decide(partial(self._change_over, transfers, mine))
        if self._alias and self._commit is None and self._prepare is None:
            self._served_by = transfers

    def _holds_base(self, mine: Held, device: torch.device) -> bool:
        """Whether the engine's own tensors are the result of the last update; otherwise staging
        is."""
        return self._commit is None and mine.all_are_on(device)

    def _check(self, damaged: Sequence[str]) -> None:
        """Check that the engine can serve what has arrived."""
        if damaged:
            raise RuntimeError("; ".join(damaged))
        if self._prepare is not None:
            self._prepare(self._staging.lend())

    def _change_over(self, transfers: Transfers, mine: Held) -> None:
        now_served = partial(setattr, self, "version", self._protocol.version)
        if self._commit is not None:
            new = self._staging.lend() if self._reuse else self._staging.hand_over()
            with defer_signals():
                do_all_or_none([partial(self._commit, new), now_served], [])
        elif self._alias and self._changes:
            self._staging.serve(mine, now_served)
        elif transfers.plan.options.transactional and not self._alias:
            unpacking = () if transfers.unpacks else transfers.unpacking(mine)
            self._staging.swap(mine, now_served, unpacking)
        else:
            now_served()


def weight_update(
    weights: Any, group: Any = None, src: int | Collection[int] = 0, **options: Any
) -> WeightUpdate:
    """Push `weights` from the trainer to all engines of a `group` (None: the world), with one call
    on every rank.

    The ranks in `src` send their weights, all others receive into theirs. `options` are those of
    `WeightSender` or `WeightReceiver`, and `version` and `timeout_s`. Returns and raises what their
    `update` does. Raises WeightMismatch or WeightUpdateError. Cost: that of `WeightSender` and
    `WeightReceiver`.

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
