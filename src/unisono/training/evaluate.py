"""Evaluation on shards of a dataset, which often differ in size, or which samplers pad by repeating
samples: here every sample counts once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unisono.collectives import primitives, structures
from unisono.collectives.arguments import check_rank, refuse_type
from unisono.collectives.objects import all_gather_object, gather_object
from unisono.collectives.ragged import device_of
from unisono.comm.communicator import Communicator, Group
from unisono.world.world import resolve


def gather_in_order(
    results: torch.Tensor | Sequence[Any],
    indices: torch.Tensor | Sequence[int],
    total: int,
    dst: int = 0,
    group: Group = None,
) -> Any:
    """The results of all ranks, in the order of the dataset, on rank `dst` of `group` (None: the
    world); None elsewhere.

    `results` has this rank's results, rows of a tensor or a list of plain data (strings, dicts,
    ...), and `indices` the sample of each result, from 0 to `total` - 1. If several ranks have a
    sample, the lowest rank's first result is taken. Ranks may have any number of results, including
    none.

    Raises ValueError on every rank if a sample has no result or an index is out of range, if a
    rank's results and indices differ in number, or if ranks have results of different kinds;
    TypeError on a rank that passes something else. Cost: a gather of the results, and an all_gather
    of the indices. See also `mean_over_samples`.

    >>> mine = {0: "first", 2: "third"} if comm.rank == 0 else {1: "second"}
    >>> texts = unisono.training.gather_in_order([*mine.values()], [*mine], total=3)
    >>> texts == (["first", "second", "third"] if comm.rank == 0 else None)
    True
    """
    comm = resolve(group)
    check_rank(comm, "gather", dst)
    numbers = _as_indices(comm, indices)
    mine = [_length(comm, results), len(numbers), _kind(results), total]
    kind = _common_kind(comm, all_gather_object(mine, comm))
    positions = _first_positions(comm, primitives.all_gather(numbers, comm), total)
    if kind == _LIST:
        lists = gather_object(list(results), dst, comm)
        if lists is None:
            return None
        everything = [result for results in lists for result in results]
        return [everything[position] for position in positions]
    rows = results.detach() if isinstance(results, torch.Tensor) else torch.empty(0)
    tensors = primitives.gather(rows, dst, comm)
    if tensors is None:
        return None
    filled = [tensor for tensor in tensors if len(tensor)]
    return torch.cat(filled)[positions] if filled else rows


def mean_over_samples(
    sums: Mapping[str, float | torch.Tensor], count: int, group: Group = None
) -> dict[str, float]:
    """The mean of each of some quantities over all samples of all ranks of `group` (None: the
    world), on every rank.

    `sums` has this rank's sums over its own `count` samples: of losses, of right answers, ... It
    takes one message, in float64. The mean of the ranks' means would be wrong if ranks have
    different numbers of samples.

    Raises ValueError on every rank if the quantities differ or no rank has a sample. Cost: an
    all_reduce of the sums. See also `gather_in_order`.

    >>> sums, count = ({"loss": 1.0}, 1) if comm.rank == 0 else ({"loss": 6.0}, 3)
    >>> unisono.training.mean_over_samples(sums, count)
    {'loss': 1.75}
    """
    comm = resolve(group)
    try:
        mine = {"count": int(count), "sums": {name: float(value) for name, value in sums.items()}}
    except (TypeError, ValueError, RuntimeError) as error:
        refuse_type(comm, "all_gather", f"mean_over_samples takes numbers: {error}")
    everyone = structures.all_reduce(comm, mine, "sum", False)
    if everyone["count"] < 1:
        raise ValueError(f"no rank of group {comm.name} has a sample to take the mean of")
    return {name: value / everyone["count"] for name, value in everyone["sums"].items()}


_LIST = "a list"


def _kind(results: Any) -> str:
    """What must be the same on all ranks: for a tensor, the shape and dtype of its rows."""
    if isinstance(results, torch.Tensor):
        dtype = str(results.dtype).removeprefix("torch.")
        return f"a {dtype} tensor with rows of shape {list(results.shape[1:])}"
    return _LIST


def _length(comm: Communicator, results: Any) -> int:
    try:
        return len(results)
    except TypeError:
        what = f"gather_in_order takes a tensor with rows or a list, not {type(results).__name__}"
        refuse_type(comm, "all_gather", what)


def _as_indices(comm: Communicator, indices: Any) -> torch.Tensor:
    try:
        numbers = torch.as_tensor(indices, device=device_of(comm))
    except (TypeError, ValueError, RuntimeError) as error:
        refuse_type(comm, "all_gather", f"the indices of gather_in_order are not numbers: {error}")
    if numbers.numel() and (numbers.is_floating_point() or numbers.dim() != 1):
        what = f"{numbers.dtype} of shape {tuple(numbers.shape)}"
        why = f"gather_in_order takes a one-dimensional list of integer indices, not {what}"
        refuse_type(comm, "all_gather", why)
    return numbers.flatten().long()


def _common_kind(comm: Communicator, everyone: list[Any]) -> str:
    """The kind of results of the ranks that have any."""
    where = f"gather_in_order on group {comm.name}"
    expected = everyone[0][3]
    for rank, (results, indices, _, total) in enumerate(everyone):
        if results != indices:
            raise ValueError(f"{where}: rank {rank} has {results} results and {indices} indices")
        if total != expected:
            raise ValueError(f"{where}: rank 0 passed total={expected}, rank {rank} passed {total}")
    having = [rank for rank, theirs in enumerate(everyone) if theirs[0]] or [0]
    first, kind = having[0], str(everyone[having[0]][2])
    for rank in having:
        other = everyone[rank][2]
        if other != kind:
            raise ValueError(f"{where}: rank {first} has {kind}, rank {rank} has {other}")
    return kind


def _first_positions(comm: Communicator, indices: list[torch.Tensor], total: int) -> list[int]:
    """For each sample, the position of its result in the concatenated results of all ranks."""
    where: dict[int, int] = {}
    for position, index in enumerate(torch.cat(indices).tolist()):
        where.setdefault(index, position)
    outside = [index for index in where if not 0 <= index < total]
    missing = [index for index in range(total) if index not in where]
    for what, found in (("is out of range", outside), ("has no result", missing)):
        if found:
            others = f", nor have {len(found) - 1} others" if found is missing else ""
            raise ValueError(
                f"gather_in_order on group {comm.name}: of {total} samples, number {min(found)} "
                f"{what}{others if len(found) > 1 else ''}"
            )
    return [where[index] for index in range(total)]
