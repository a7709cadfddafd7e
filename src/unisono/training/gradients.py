"""Gradients averaged over ranks while backward still runs, for programs without DDP."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from unisono.collectives.arguments import check_rank
from unisono.collectives.ragged import device_of
from unisono.comm.communicator import Communicator, Group
from unisono.comm.reductions import WIRES, WireFormat
from unisono.errors import UnisonoError
from unisono.torch_autograd import mark_written
from unisono.training import buckets
from unisono.training.contributions import share_of_contributions
from unisono.world.world import resolve

BUCKET_BYTES = 8 * 2**20
_BUCKET_BYTES_WITHOUT_ROOM = 256 * 2**20


class GradientSync:
    """Averages the gradients of a `model` over the ranks of a `group`, in buckets, during backward.

    Construction is collective: it compares the parameters, then copies those of rank `src`, and its
    buffers, to all ranks (not with `src=None`). After that every rank calls `finish()` once per
    step.

    `bucket_bytes` is the approximate size of a message: 8 MiB by default, but 256 MiB if ranks on
    unisono have only one core each, because nothing overlaps with a backward pass on the same core.
    Without `overlap` all messages start in `finish`. `op` is "mean" or "sum". `unused` says what
    happens if a rank has no gradient for a parameter: "error" raises on every rank and names it;
    "zero" counts it as zero, and leaves the gradient None if no rank has one, as in a program of
    one process. `accumulate_float32` adds half-precision gradients, of several backward passes and
    of all ranks, in float32, and rounds once. `wire` is a format in which gradients cross between
    hosts, as in Communicator.all_reduce; what it loses in one step is added in the next.

    With a `contribution_count` a step has so many micro-batches over all ranks, and gives the same
    bits on any number of ranks: a rank makes one backward pass for each number that
    `contributions()` yields. It keeps a copy of all gradients for each of its micro-batches.

    Raises ValueError, on every rank, if the ranks' parameters or options differ, or if a parameter
    belongs to another GradientSync that is not closed. Cost: an all_reduce of the gradients per
    step. See also `sync_gradients`, `ShardedOptimizer`.

    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> sync = unisono.training.GradientSync(model)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for batch in (torch.full((1, 1), comm.rank + 1.0),):
    ...     model(batch).sum().backward()  # full buckets are reduced meanwhile
    ...     sync.finish()  # every rank has the mean of all ranks' gradients
    ...     print(model.weight.grad)
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    tensor([[1.5000]])
    """

    def __init__(
        self,
        model: buckets.Parameters,
        group: Group = None,
        *,
        bucket_bytes: int | None = None,
        overlap: bool = True,
        op: str = "mean",
        unused: str = "error",
        accumulate_float32: bool = False,
        src: int | None = 0,
        wire: WireFormat | None = None,
        contribution_count: int | None = None,
    ) -> None:
        self._comm = resolve(group)
        if wire is not None and (wire not in WIRES or contribution_count is not None):
            raise ValueError(
                f"wire={wire!r}: one of {', '.join(WIRES)}, without contribution_count"
            )
        self._wire: WireFormat | None = wire
        self._own: range | None = None
        if contribution_count is not None:
            self._own = share_of_contributions(contribution_count, self._comm)
        self._contribution_count, self._row = contribution_count, -1
        asked = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
        self._op = buckets.check_options(asked, unused, op)
        self._overlap, self._unused = overlap, unused
        self._wide = accumulate_float32
        self._model = model if isinstance(model, torch.nn.Module) else None
        self._parameters = buckets.named_parameters_of(model)
        self._refuse_those_of_another()
        self._frozen = [
            (name, parameter)
            for name, parameter in self._named_parameters()
            if not parameter.requires_grad
        ]
        options = f"{op=}, {unused=}, {bucket_bytes=}, {accumulate_float32=}"
        options += f", {wire=}, {contribution_count=}"
        buckets.check_the_same_everywhere(self._comm, self._parameters, options)
        if not self._parameters:
            raise ValueError("no parameter requires a gradient")
        self._bucket_bytes = bucket_bytes or _default_bucket_bytes(self._comm)
        if src is not None:
            tensors = [parameter.tensor for parameter in self._parameters]
            if self._model is not None:
                tensors = [*self._model.parameters(), *self._model.buffers()]
            check_rank(self._comm, "broadcast", src)
            for device in dict.fromkeys(tensor.device for tensor in tensors):
                there = [tensor.detach() for tensor in tensors if tensor.device == device]
                self._comm.broadcast(there, src)
            if self._comm.rank != src:
                mark_written(tensors)
        self._seen: dict[int, None] = {}  # the order of the first step
        self._learned = False
        self._silent = False
        self._reductions: list[buckets.BucketReduction] = []
        self._arrange(list(reversed(self._parameters)))
        self._handles: list[Any] = [
            parameter.tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._arrived, parameter)
            )
            for parameter in self._parameters
        ]

    def _named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return () if self._model is None else self._model.named_parameters()

    def _refuse_those_of_another(self) -> None:
        """Two of them would reduce the same gradients at the same time."""
        for parameter in self._parameters:
            hooks = getattr(parameter.tensor, "_post_accumulate_grad_hooks", None) or {}
            methods = (getattr(hook, "func", None) for hook in hooks.values())
            owners = (getattr(method, "__self__", None) for method in methods)
            if any(isinstance(owner, GradientSync) for owner in owners):
                why = f"{parameter.name} belongs to another GradientSync: close() that one first"
                self._comm.reject_call("all_gather", why)

    def _arrange(self, order: list[buckets.NamedParameter]) -> None:
        own = None if self._own is None else (len(self._own), self._contribution_count or 0)
        self._buckets = buckets.buckets_of(
            order,
            self._comm,
            self._bucket_bytes,
            self._op,
            kept=True,
            wide=self._wide,
            wire=self._wire,
            contributions=own,
        )
        self._bucket_of: dict[int, tuple[buckets.GradientBucket, int]] = {
            parameter.number: (bucket, index)
            for bucket in self._buckets
            for index, parameter in enumerate(bucket.parameters)
        }

    # -- during backward -------------------------------------------------------------------------

    def _arrived(self, parameter: buckets.NamedParameter, _: torch.Tensor) -> None:
        bucket, index = self._bucket_of[parameter.number]
        if bucket.begun or (bucket.arrived[index] and not self._silent):
            raise UnisonoError(
                f"a second gradient for {parameter.name} before finish(): put all backward passes "
                "of a step but the last under no_sync()"
            )
        if not self._learned:
            self._seen.setdefault(parameter.number)
        with torch.no_grad():
            if self._own is None:
                bucket.collect(index)
            else:
                self._collect_row(bucket, index)
        if self._silent:
            return
        bucket.arrived[index] = True
        bucket.waiting_for -= 1
        if self._overlap:
            for bucket in self._buckets[len(self._reductions) :]:
                if bucket.waiting_for:
                    break
                self._begin_next()

    def _collect_row(self, bucket: buckets.GradientBucket, index: int) -> None:
        if self._row < 0:
            raise UnisonoError(
                "a backward pass outside of its contribution: make one for each number, in "
                "`for number in sync.contributions(): ...`"
            )
        bucket.collect_row(index, self._row)

    def contributions(self) -> Iterator[int]:
        """Yield the numbers of this rank's micro-batches of a step, out of `contribution_count`;
        each is for one backward pass. In the last one full buckets are sent meanwhile.

        Raises ValueError without a `contribution_count`.

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> sync = unisono.training.GradientSync(model, contribution_count=4)
        >>> for number in sync.contributions():
        ...     model(torch.full((1, 1), float(number))).sum().backward()
        >>> sync.finish()
        >>> model.weight.grad
        tensor([[1.5000]])
        """
        if self._own is None:
            raise ValueError("contributions() needs a GradientSync with contribution_count=")
        before = self._silent
        try:
            for row, number in enumerate(self._own):
                self._row = row
                self._silent = row + 1 < len(self._own)
                yield number
        finally:
            self._row, self._silent = -1, before

    def _begin_next(self) -> None:
        """Buckets start in a fixed order because ranks may fill them in different orders."""
        self._reductions.append(self._buckets[len(self._reductions)].begin())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside it add to this rank's gradients and send nothing; the first one
        after it, or `finish`, sends the sums. All ranks must do the same.

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> sync = unisono.training.GradientSync(model)
        >>> with sync.no_sync():
        ...     model(torch.ones(1, 1)).sum().backward()
        >>> model(torch.ones(1, 1)).sum().backward()
        >>> sync.finish()
        >>> model.weight.grad
        tensor([[2.]])
        """
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    # -- after backward --------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until `parameter.grad` has the combined gradients of all ranks.

        All ranks call it once per step, even without a batch. Raises UnisonoError, on every rank
        and with the gradients in place, if `unused="error"` and a parameter had none; a GroupError
        if the communication failed.

        >>> weight = torch.zeros(1, requires_grad=True)
        >>> sync = unisono.training.GradientSync([weight], op="sum")
        >>> (weight * (comm.rank + 1)).sum().backward()
        >>> sync.finish()
        >>> weight.grad
        tensor([3.])
        """
        self._complete()
        missing = [lack for reduction in self._reductions for lack in reduction.end()]
        self._reductions = []
        if self._unused == "error":
            buckets.check_used(missing, self._comm, self._contribution_count)
        # Only after a complete step: a rank that discards one does not take part.
        if not self._learned:
            self._adopt_order()
            self._check_for_newcomers()
        thawed = [name for name, parameter in self._frozen if parameter.grad is not None]
        if thawed:
            raise UnisonoError(
                f"{', '.join(thawed)} required no gradient when this GradientSync was made, but "
                "has one now: close it and make a new one"
            )

    def _complete(self) -> None:
        while len(self._reductions) < len(self._buckets):
            self._begin_next()
        for reduction in self._reductions:
            reduction.work.wait()

    def _adopt_order(self) -> None:
        """Use the order in which rank 0 got its gradients on all ranks."""
        everyone = (parameter.number for parameter in self._parameters)
        numbers = dict.fromkeys([*self._seen, *everyone])
        tensor = torch.tensor(list(numbers), device=device_of(self._comm))
        self._comm.broadcast(tensor)
        before = self._buckets
        self._arrange([self._parameters[index] for index in tensor.tolist()])
        for bucket in self._buckets:
            bucket.move_from(before)
        self._learned = True

    def _check_for_newcomers(self) -> None:
        """Only once: looking for them in every step would be slow."""
        known = {id(parameter.tensor) for parameter in self._parameters} | {
            id(parameter) for _, parameter in self._frozen
        }
        new = [name for name, parameter in self._named_parameters() if id(parameter) not in known]
        if new:
            raise UnisonoError(
                f"{', '.join(new)} was added after this GradientSync was made: close it and "
                "make a new one"
            )

    def discard(self) -> None:
        """Drop a failed step: none of its gradients stays on this rank.

        All ranks call it; or the ranks without an error call `finish`, which then raises as for
        missing gradients, unless all messages had already started.

        >>> weight = torch.zeros(1, requires_grad=True)
        >>> sync = unisono.training.GradientSync([weight])
        >>> weight.sum().backward()
        >>> sync.discard()
        >>> weight.grad is None
        True
        """
        for bucket in self._buckets:
            if not bucket.begun:
                bucket.forget()
        self._complete()
        for bucket in self._buckets:
            bucket.forget()
        self._reductions = []

    def close(self) -> None:
        """Remove the hooks from the model. Closing twice does nothing.

        >>> weight = torch.zeros(1, requires_grad=True)
        >>> unisono.training.GradientSync([weight]).close()
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _default_bucket_bytes(comm: Communicator) -> int:
    """The default size of buckets, by rank 0's machine."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    crowded = comm.backend == "unisono" and cores < 2 * comm.size
    usual = torch.tensor([_BUCKET_BYTES_WITHOUT_ROOM if crowded else BUCKET_BYTES])
    usual = usual.to(device_of(comm))
    comm.broadcast(usual)
    return int(usual)


def sync_gradients(
    parameters: buckets.Parameters,
    group: Group = None,
    *,
    op: str = "mean",
    unused: str = "error",
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Average the gradients of a module, or of a list of parameters, over all ranks, in one call.

    Call it after backward, on every rank of `group` (None: the world), with `parameters` of the
    same shapes and dtypes in the same order; a message has about `bucket_bytes`. `op` and `unused`
    are as in GradientSync. Raises what its `finish` raises. Cost: an all_reduce of the gradients.
    See also `GradientSync`.

    >>> weight = torch.zeros(1, requires_grad=True)
    >>> (weight * (comm.rank + 1)).sum().backward()
    >>> unisono.training.sync_gradients([weight])
    >>> weight.grad
    tensor([1.5000])
    """
    known = buckets.check_options(bucket_bytes, unused, op)
    comm = resolve(group)
    named = buckets.named_parameters_of(parameters)
    made = buckets.buckets_of(named, comm, bucket_bytes, known, kept=False)
    reductions = [bucket.begin() for bucket in made]
    missing: list[buckets.MissingGradient] = []
    for reduction in reductions:
        reduction.work.wait()
        missing += reduction.end()
    if unused == "error":
        buckets.check_used(missing, comm)
