"""Gradients in buckets: which are reduced together, in which memory, and which ranks had none.

A bucket that is kept from step to step is a flat tensor, and the gradients become views of it as
they arrive: that costs less than new pages for all of them. A bucket that is used once is, on
unisono, a list of the gradients in place. After its gradients every bucket has a number for each
parameter: 1 from a rank that has no gradient for it. So no rank waits for such a rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import torch

from unisono.collectives.arguments import refuse_type
from unisono.collectives.objects import all_gather_object
from unisono.comm.communicator import Communicator
from unisono.comm.reductions import NamedReduction as Reduction
from unisono.comm.reductions import WireFormat
from unisono.comm.work import FinishedWork, Work, join_works
from unisono.errors import UnisonoError
from unisono.math import HALF_DTYPES
from unisono.torch_autograd import mark_written, outlasting_inference_mode
from unisono.training.contributions import ContributionRows
from unisono.training.memory import shares_storage, views_of, zeros_for

Parameters: TypeAlias = (
    torch.nn.Module | Iterable[torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
)

UNUSED = ("error", "zero")
_OPS: dict[str, Reduction] = {"mean": "avg", "avg": "avg", "sum": "sum"}


class NamedParameter(NamedTuple):  # a NamedTuple is fast to make, and models have many parameters
    """A parameter, its number in the model and its name."""

    number: int
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True)
class MissingGradient:
    parameter: NamedParameter
    ranks: int
    here: bool


def named_parameters_of(parameters: Parameters) -> list[NamedParameter]:
    """The parameters that require gradients, each once, in the model's order."""
    given: Iterable[Any]
    given = parameters.named_parameters() if isinstance(parameters, torch.nn.Module) else parameters
    named = [
        item if isinstance(item, tuple) else (f"parameter {number}", item)
        for number, item in enumerate(given)
    ]
    once = {id(parameter): (name, parameter) for name, parameter in reversed(named)}
    wanted = [pair for pair in reversed(once.values()) if pair[1].requires_grad]
    return [NamedParameter(number, *pair) for number, pair in enumerate(wanted)]


def check_the_same_everywhere(
    comm: Communicator, parameters: Sequence[NamedParameter], options: str = ""
) -> None:
    """Raise ValueError on every rank if options or parameters differ."""
    mine = [
        f"{parameter.name} of {str(parameter.tensor.dtype).removeprefix('torch.')} "
        f"{tuple(parameter.tensor.shape)}"
        for parameter in parameters
    ]
    digest = hashlib.sha256("\n".join([options, *mine]).encode()).digest()
    if len(set(all_gather_object(digest, comm))) == 1:
        return
    first_options, *_ = everyone = all_gather_object(options, comm)
    for rank, theirs in enumerate(everyone):
        if theirs != first_options:
            raise ValueError(
                f"the ranks' options differ: rank 0 has {first_options}, rank {rank} has {theirs}"
            )
    lists = all_gather_object(mine, comm)
    for rank, listed in enumerate(lists):
        pairs = zip_longest(lists[0], listed, fillvalue="no more")
        for number, (first, other) in enumerate(pairs):
            if first != other:
                raise ValueError(
                    f"the ranks' parameters differ: number {number} is {first} on rank 0, "
                    f"{other} on rank {rank}"
                )


class GradientBucket:
    """Gradients of one dtype and device that are reduced together: their memory, and which of them
    have arrived. `kept`: for many steps."""

    @outlasting_inference_mode()
    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        comm: Communicator,
        op: Reduction,
        kept: bool,
        wide: bool,
        wire: WireFormat | None = None,
        contributions: int = 0,
    ) -> None:
        tensors = [parameter.tensor for parameter in parameters]
        dtype, device = tensors[0].dtype, tensors[0].device
        self.parameters, self.comm, self.op = parameters, comm, op
        self.total: int | None = None  # contributions of all ranks, where these bring several
        self.wide = wide and dtype in HALF_DTYPES
        self.dtype = torch.float32 if self.wide else dtype
        sizes = [tensor.numel() for tensor in tensors]
        self.flat: torch.Tensor | None = None
        self.views: list[torch.Tensor] = []  # of the flat tensor, one for each gradient
        if kept or comm.backend != "unisono":
            self.flat = zeros_for(comm, sum(sizes) + len(sizes), self.dtype, device)
            self.views, self.absent = views_of(self.flat, tensors), self.flat[-len(sizes) :]
        else:
            self.absent = torch.zeros(len(sizes), dtype=self.dtype, device=device)
        self.wire = wire
        if wire is not None:
            self.residual = torch.zeros(sum(sizes))
        self.rows: ContributionRows | None = None
        if contributions and self.flat is not None:
            self.rows = ContributionRows(contributions, self.flat, tensors)
        self.start_over()

    def start_over(self) -> None:
        self.begun = False
        self.waiting_for = len(self.parameters)
        self.arrived = [False] * len(self.parameters)
        self.summed: set[int] = set()  # of a wide bucket: sums that have begun
        if self.wide and self.flat is not None:
            self.flat.zero_()
        if self.rows is not None:
            self.rows.start_over()

    def collect(self, index: int) -> None:
        """A gradient has arrived: move it in, or add it to the sum in float32, and drop it."""
        tensor = self.parameters[index].tensor
        if self.views and tensor.grad is self.views[index]:
            return
        gradient = self.gradient(index)
        assert gradient is not None
        if self.wide:
            self.views[index].add_(gradient)
            self.summed.add(index)
            tensor.grad = None
        else:
            self.move_in(index, gradient)

    def collect_row(self, index: int, row: int) -> None:
        """The same of one of several contributions."""
        gradient = self.gradient(index)
        assert gradient is not None
        assert self.rows is not None
        if self.rows.has(row, index):
            raise UnisonoError(
                f"a second gradient for {self.parameters[index].name} in one contribution: make "
                "one backward pass for each number of sync.contributions()"
            )
        self.rows.add(row, index, gradient)
        self.parameters[index].tensor.grad = None

    def gradient(self, index: int) -> torch.Tensor | None:
        """The gradient; TypeError, here and on the other ranks, if it is not dense."""
        parameter = self.parameters[index]
        gradient = parameter.tensor.grad
        if gradient is None:
            return None
        if gradient.layout is not torch.strided:
            name, kind = parameter.name, str(gradient.layout).removeprefix("torch.")
            why = f"the gradient of {name} is {kind}, but only dense gradients are reduced"
            refuse_type(self.comm, "all_reduce", f"{why}: use sparse=False")
        return gradient.detach() if gradient.requires_grad else gradient

    def move_in(self, index: int, gradient: torch.Tensor) -> bool:
        """Copy a gradient into its view, which replaces it unless other tensors share its
        memory."""
        view = self.views[index]
        if gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
            view.copy_(gradient)
            if shares_storage(gradient):
                return False
            self.parameters[index].tensor.grad = None if self.wide else view
        return True

    @outlasting_inference_mode()
    def move_from(self, others: Iterable[GradientBucket]) -> None:
        """Move in the gradients that are views of discarded buckets."""
        theirs = {id(view) for other in others for view in other.views}
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.tensor.grad
            if gradient is not None and id(gradient) in theirs:
                parameter.tensor.grad = view.copy_(gradient)

    def begin(self) -> BucketReduction:
        """Start reducing. A parameter without a gradient counts as zero, and is marked."""
        self.begun = True
        return BucketReduction(self)

    def forget(self) -> None:
        for parameter in self.parameters:
            parameter.tensor.grad = None
        self.start_over()


class BucketReduction:
    """A bucket in progress: its work, and the stand-ins of gradients that cannot be reduced in
    place."""

    @outlasting_inference_mode()
    def __init__(self, bucket: GradientBucket) -> None:
        self._bucket = bucket
        self._zeros: dict[int, torch.Tensor] = {}  # where this rank has no gradient
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradient, stand-in
        if bucket.rows is not None:
            assert bucket.flat is not None
            begun = bucket.comm.all_reduce(
                bucket.flat, bucket.op, async_op=True, contributions=bucket.rows.rows
            )
            self.work: Work = begun or FinishedWork()
            return
        bucket.absent.zero_()
        rows = [self._row(index) for index in range(len(bucket.parameters))]
        travelling = [*rows, bucket.absent] if bucket.flat is None else bucket.flat
        mark_written(rows)
        if bucket.wire is None:
            self.work = (
                bucket.comm.all_reduce(travelling, bucket.op, async_op=True) or FinishedWork()
            )
        else:
            self.work = self._begin_packed() or FinishedWork()

    def _begin_packed(self) -> Work | None:
        """The gradients by a wire format; which are absent in full."""
        bucket = self._bucket
        assert bucket.flat is not None
        gradients = bucket.flat[: bucket.residual.numel()]
        packed = bucket.comm.all_reduce(
            gradients, bucket.op, async_op=True, wire=bucket.wire, residual=bucket.residual
        )
        return join_works([packed, bucket.comm.all_reduce(bucket.absent, bucket.op, async_op=True)])

    def _row(self, index: int) -> torch.Tensor:
        """The tensor to reduce for one parameter."""
        bucket = self._bucket
        tensor = bucket.parameters[index].tensor
        view = bucket.views[index] if bucket.views else None
        if view is not None and (index in bucket.summed or tensor.grad is view):
            return view
        gradient = bucket.gradient(index)
        if gradient is None:
            bucket.absent[index] = 1
            zeros = torch.zeros_like(tensor) if view is None else view.zero_()
            self._zeros[index] = zeros
            return zeros
        if view is not None:
            if not bucket.move_in(index, gradient):
                self._copies.append((gradient, view))
            return view
        if not shares_storage(gradient):
            return gradient
        copy = gradient.clone()  # torch may leave views of memory that backward still needs
        self._copies.append((gradient, copy))
        return copy

    @outlasting_inference_mode()
    def end(self) -> list[MissingGradient]:
        """After the work has finished: set the parameters' gradients. Returns which were missing,
        and on how many ranks. If all ranks lacked one, the parameter has none."""
        bucket = self._bucket
        total = bucket.comm.size if bucket.total is None else bucket.total
        without: dict[int, int] = {}  # on how many ranks each is missing
        if bool(bucket.absent.any()):
            scale = total if bucket.op == "avg" else 1
            counts = (round(abs(number) * scale) for number in bucket.absent.tolist())
            without = {index: ranks for index, ranks in enumerate(counts) if ranks}
        given = self._zeros
        if bucket.wide or bucket.rows is not None:
            given = {
                index: view.to(bucket.parameters[index].tensor.dtype)
                for index, view in enumerate(bucket.views)
            }
        for index, gradient in given.items():
            if without.get(index) != total:
                bucket.parameters[index].tensor.grad = gradient
        for gradient, copy in self._copies:
            gradient.copy_(copy)
        rows = bucket.rows
        missing = [
            MissingGradient(
                bucket.parameters[index],
                ranks,
                index in self._zeros if rows is None else rows.lacks(index),
            )
            for index, ranks in without.items()
        ]
        bucket.start_over()
        return missing


def buckets_of(
    parameters: Sequence[NamedParameter],
    comm: Communicator,
    bucket_bytes: int,
    op: Reduction,
    *,
    kept: bool,
    wide: bool = False,
    wire: WireFormat | None = None,
    contributions: tuple[int, int] | None = None,
) -> list[GradientBucket]:
    """These parameters, in this order, cut into buckets of about this many bytes, each of one dtype
    on one device, in the order in which they fill up."""
    filling: dict[Any, list[int]] = {}
    sizes: dict[Any, int] = {}
    full: list[list[int]] = []
    for index, parameter in enumerate(parameters):
        kind = (parameter.tensor.dtype, parameter.tensor.device)
        size = parameter.tensor.numel() * parameter.tensor.dtype.itemsize
        if kind in filling and sizes[kind] + size > bucket_bytes:
            full.append(filling.pop(kind))
        if kind not in filling:
            filling[kind], sizes[kind] = [], 0
        filling[kind].append(index)
        sizes[kind] += size
    full = sorted([*full, *filling.values()], key=lambda indices: indices[-1])
    own, total = contributions or (0, None)
    made = [
        GradientBucket([parameters[index] for index in indices], comm, op, kept, wide, wire, own)
        for indices in full
    ]
    for bucket in made:
        bucket.total = total
    return made


def group_alike(parameters: Iterable[NamedParameter]) -> list[list[NamedParameter]]:
    """Parameters of one dtype and device, together, in the order in which these first appear."""
    groups: dict[Any, list[NamedParameter]] = {}
    for parameter in parameters:
        kind = parameter.tensor.dtype, parameter.tensor.device
        groups.setdefault(kind, []).append(parameter)
    return list(groups.values())


def check_used(
    missing: Iterable[MissingGradient], comm: Communicator, contributions: int | None = None
) -> None:
    """Raise UnisonoError, on every rank, if any rank, or contribution, lacked a gradient."""
    of = f"{comm.size} ranks" if contributions is None else f"{contributions} contributions"
    named = [
        f"{lack.parameter.name} (on {lack.ranks} of {of}{', this one too' * lack.here})"
        for lack in sorted(missing, key=lambda lack: lack.parameter.number)
    ]
    if named:
        raise UnisonoError(
            f"no gradient for {', '.join(named)}: the loss does not depend on it there. Freeze "
            'it, or pass unused="zero"'
        )


def check_options(bucket_bytes: int, unused: str, op: str) -> Reduction:
    """The Communicator's name for `op`. Raises ValueError for invalid options."""
    if unused not in UNUSED:
        raise ValueError(f"unused is {unused!r}: use {' or '.join(map(repr, UNUSED))}")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
    if op not in _OPS:
        raise ValueError(f"op must be 'mean' or 'sum' for gradients, not {op!r}")
    return _OPS[op]
