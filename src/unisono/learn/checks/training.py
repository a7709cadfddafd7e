"""Chapters 7 to 12: overlap, groups, optimizers, attention, weights, mistakes."""

import math
from functools import partial
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.learn.checks.requirements import Recorder, require, require_equal

Exercise = Any


def sum_meanwhile(exercise: Exercise, comm: Communicator) -> None:
    """work = comm.all_reduce(x, async_op=True), then compute, then work.wait()."""
    recorder, x = Recorder(comm, "all_reduce"), torch.full((4,), float(comm.rank + 1))
    started: list[bool] = []

    def compute() -> int:
        started.extend(bool(more.get("async_op")) for _, _, more in recorder.calls)
        return 42

    require_equal(exercise.sum_meanwhile(recorder, x, compute), 42, "what was returned")
    require(started == [True], "no all_reduce was under way when compute() was called")
    require_equal(x, torch.full((4,), comm.size * (comm.size + 1) / 2), "x afterwards")


def backward(exercise: Exercise, comm: Communicator) -> None:
    """all_reduce(gradient, async_op=True) returns a Work. Wait for all of them at the end."""
    recorder, seen = Recorder(comm, "all_reduce"), []

    def layer(number: int) -> torch.Tensor:
        seen.append(sum(bool(more.get("async_op")) for _, _, more in recorder.calls))
        return torch.full((4,), float(number))

    gradients = exercise.backward(recorder, [partial(layer, number) for number in range(3)])
    for number, gradient in enumerate(gradients):
        require_equal(gradient, torch.full((4,), float(number * comm.size)), f"gradient {number}")
    require(seen == [0, 1, 2], "a gradient was not under way when the next layer computed")


def my_half(exercise: Exercise, comm: Communicator) -> None:
    """Even ranks pass [0, 2] to comm.split, odd ones [1, 3]."""
    half = exercise.my_half(comm)
    x = torch.tensor([comm.rank])
    half.all_reduce(x)
    require_equal(half.size, comm.size // 2, "the size of the group")
    require_equal(x.item(), 2 + 2 * (comm.rank % 2), f"the sum of the ranks with rank {comm.rank}")


def layout(exercise: Exercise) -> None:
    """rank = tp_rank + tp * (pp_rank + pp * dp_rank)"""
    for size, tp, pp in ((8, 2, 2), (8, 4, 1), (24, 2, 3), (4, 1, 1)):
        mesh = torch.arange(size).view(-1, pp, tp)
        found = exercise.layout(size, tp, pp)
        for name, dim in (("tp", 2), ("pp", 1), ("dp", 0)):
            expected = mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim]).tolist()
            require_equal(found.get(name), expected, f"{name} of layout({size}, tp={tp}, pp={pp})")


def average(exercise: Exercise, comm: Communicator) -> None:
    """comm.all_reduce(gradient, "mean") replaces one of them by the mean."""
    gradients = [torch.full((2,), float(comm.rank)), torch.full((3,), 3.0 * comm.rank)]
    exercise.average(comm, gradients)
    for number, gradient in enumerate(gradients):
        expected = torch.full_like(gradient, (1.0, 3.0)[number])
        require_equal(gradient, expected, f"gradient {number}")


def sharded_step(exercise: Exercise, comm: Communicator) -> None:
    """reduce_scatter the gradients with "mean", update your part, all_gather the parts."""
    recorder = Recorder(comm, "reduce_scatter", "all_gather")
    whole = torch.arange(2.0 * comm.size)
    parameters, expected = whole.clone(), whole.clone()
    momentum, whole_momentum = torch.zeros(2), torch.zeros_like(whole)
    for step in range(3):
        gradients = whole * (comm.rank + step)
        exercise.sharded_step(recorder, parameters, gradients, momentum, lr=0.1)
        whole_momentum = 0.9 * whole_momentum + whole * ((comm.size - 1) / 2 + step)
        expected -= 0.1 * whole_momentum
        require_equal(parameters, expected, f"parameters after step {step + 1}")


def share_of_first(exercise: Exercise) -> None:
    """exp(a) / (exp(a) + exp(b)) = 1 / (1 + exp(b - a)), which torch.sigmoid computes without an
    overflow."""
    a, b = torch.tensor([0.0, 1000.0, 1.0, -1000.0]), torch.tensor([0.0, 999.0, 2.0, 5.0])
    expected = torch.tensor([0.5, 0.7310586, 0.2689414, 0.0])
    require_equal(exercise.share_of_first(a, b), expected, f"share_of_first({a}, {b})")


def merge(exercise: Exercise) -> None:
    """torch.logaddexp(a_lse, b_lse) is the new lse. Each output counts exp(its lse - the new)."""

    def attend(keys: slice, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scores[:, keys].softmax(1) @ values[keys], scores[:, keys].logsumexp(1)

    torch.manual_seed(0)
    values = torch.randn(8, 3)
    for scores in (torch.randn(3, 8), 1000 * torch.randn(3, 8)):
        whole = attend(slice(0, 8), scores)
        merged = exercise.merge(*attend(slice(0, 3), scores), *attend(slice(3, 8), scores))
        require_equal(len(merged), 2, "the number of results")
        for got, expected, what in zip(merged, whole, ("output", "lse"), strict=True):
            require_equal(got, expected, f"the merged {what}")


def all_agree(exercise: Exercise, comm: Communicator) -> None:
    """all_reduce a tensor of one number, 1 for yes and 0 for no, with "min"."""
    for refusing in (None, 0, comm.size - 1):
        got = exercise.all_agree(comm, comm.rank != refusing)
        case = "if all say yes" if refusing is None else f"if rank {refusing} says no"
        require_equal(got, refusing is None, f"all_agree {case}")


def update(exercise: Exercise, comm: Communicator) -> None:
    """Receive into a copy, load it, all_reduce with "min" whether that worked, then copy it."""

    def load(received: torch.Tensor, refuses: bool) -> None:
        require_equal(received, torch.full((3,), 2.0), "what an engine received")
        if refuses:
            raise ValueError("these weights do not fit")

    for refusing in (None, comm.size - 1, 1):
        used = torch.full((3,), 1.0 if comm.rank else 2.0)
        changed = exercise.update(comm, used, partial(load, refuses=comm.rank == refusing))
        case = f"if engine {refusing} refuses," if refusing else "if no engine refuses,"
        require(changed is (refusing is None), f"{case} update returned {changed}")
        expected = torch.full((3,), 1.0 if comm.rank and refusing else 2.0)
        require_equal(used, expected, f"{case} the weights in use")


def mean_loss(exercise: Exercise, comm: Communicator) -> None:
    """Put sum and count into one tensor, all_reduce it, and divide afterwards."""
    losses = [[1.0, 2.0, 6.0], [], [4.0]][comm.rank]
    require_equal(exercise.mean_loss(comm, losses), 3.25, "the mean of 1, 2, 6 and 4")


def train(exercise: Exercise, comm: Communicator) -> None:
    """Every rank must make every call. Let the sum and the count of a step travel together."""
    losses = [float(comm.rank), math.nan if comm.rank == 1 else 6.0, 3.0]
    finite = [*range(comm.size), *[6.0] * (comm.size - 1), *[3.0] * comm.size]
    log: list[float] = []
    mean = exercise.train(comm, losses, log)
    comm.barrier()  # a rank that has made fewer calls is here while others still call
    require_equal(mean, sum(finite) / len(finite), "the mean")
    expected = 3 if comm.rank == 0 else 0
    require(
        len(log) == expected, f"rank {comm.rank} logged {len(log)} steps; there were {expected}"
    )
