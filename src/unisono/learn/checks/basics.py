"""Chapters 1 to 6: ranks, collectives, algorithms, messages."""

import math
from collections.abc import Callable
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.errors import ScheduleError
from unisono.learn.checks.requirements import MESSAGES, Recorder, require, require_equal
from unisono.plan import Schedule, Transfer, verify
from unisono.plan.schedule import Action

Exercise = Any
"""The functions that the reader's file defines, as attributes."""


def every_size_th(exercise: Exercise) -> None:
    """A slice can have a step: items[begin :: step]."""
    for count, size in ((10, 4), (3, 4), (0, 2)):
        for rank in range(size):
            got = exercise.every_size_th(list(range(count)), rank, size)
            require_equal(
                got,
                [item for item in range(count) if item % size == rank],
                f"the share of rank {rank} of {size} in {count} items",
            )


def my_share(exercise: Exercise) -> None:
    """divmod(len(items), size) says how many ranks have one item more than the others."""
    for count, size in ((8, 4), (10, 4), (3, 4), (0, 2), (7, 1)):
        items = list(range(count))
        shares = [exercise.my_share(items, rank, size) for rank in range(size)]
        joined = [item for share in shares for item in share]
        require_equal(joined, items, f"the joined list of the shares of {size} ranks")
        lengths = [len(share) for share in shares]
        require(max(lengths) - min(lengths) <= 1, f"{count} items are cut into {lengths}")


def largest(exercise: Exercise, comm: Communicator) -> None:
    """comm.all_reduce(x, "max") replaces x; .item() is the number in a tensor of one."""
    numbers = [-3.0, -1.0, -2.0]
    got = exercise.largest(comm, numbers[comm.rank])
    require_equal(got, -1.0, f"the largest of {numbers}")


def transpose(exercise: Exercise, comm: Communicator) -> None:
    """Every rank has a part for every rank: element r of each row belongs to rank r."""
    row = 10 * comm.rank + torch.arange(comm.size)
    column = 10 * torch.arange(comm.size) + comm.rank
    require_equal(exercise.transpose(comm, row), column, f"column {comm.rank}")


def sum_in_halves(exercise: Exercise, comm: Communicator) -> None:
    """The output of reduce_scatter has x.numel() // comm.size elements, and is the input of the
    all_gather."""
    x = torch.arange(2.0 * comm.size) + comm.rank
    expected = comm.size * torch.arange(2.0 * comm.size) + comm.size * (comm.size - 1) / 2
    exercise.sum_in_halves(Recorder(comm, "reduce_scatter", "all_gather"), x)
    require_equal(x, expected, "x afterwards")


def part_to_send(exercise: Exercise) -> None:
    """In step s of the first round rank r sends part (r - 1 - s) % n, and in step s of the second
    round part (r - s) % n, counted from the first step of that round."""
    for size in (2, 3, 4, 7):
        steps = []
        for step in range(2 * (size - 1)):
            action: Action = "reduce" if step < size - 1 else "copy"
            parts = [exercise.part_to_send(rank, step, size) for rank in range(size)]
            for rank, part in enumerate(parts):
                what = f"step {step} of {size} ranks: part_to_send of rank {rank}"
                require(0 <= part < size, f"{what} is {part}, and there are parts 0 to {size - 1}")
            steps.append(
                [Transfer(rank, (rank + 1) % size, part, action) for rank, part in enumerate(parts)]
            )
        try:
            verify(Schedule.from_steps("all_reduce", "your ring", size, size, steps))
        except ScheduleError as error:
            require(False, str(error).partition("\n")[0])


NETWORKS = ((8, 1e-6, 1e10), (64, 5e-6, 5e10), (2, 1e-6, 1e9))


def _ring(size: float, n: int, latency: float, bandwidth: float) -> float:
    return 2 * (n - 1) * (latency + size / n / bandwidth)


def _tree(size: float, n: int, latency: float, bandwidth: float) -> float:
    return 2 * math.log2(n) * (latency + size / bandwidth)


def _compare_times(name: str, get: Callable[..., float], wanted: Callable[..., float]) -> None:
    for case in ((size, *network) for network in NETWORKS for size in (8.0, 1e6, 1e9)):
        require_equal(get(*case), wanted(*case), f"{name}{case}")


def ring_time(exercise: Exercise) -> None:
    """A ring has 2 (n - 1) steps of size / n bytes each."""
    _compare_times("ring_time", exercise.ring_time, _ring)


def tree_time(exercise: Exercise) -> None:
    """A tree has 2 log2(n) steps of size bytes each."""
    _compare_times("tree_time", exercise.tree_time, _tree)


def crossover(exercise: Exercise) -> None:
    """Set the two times equal and solve for the size."""
    for network in NETWORKS[:2]:
        at = exercise.crossover(*network)
        ring, tree = _ring(at, *network), _tree(at, *network)
        times = f"the ring takes {ring:.4g} s and the tree {tree:.4g} s"
        require(math.isclose(ring, tree), f"crossover{network} is {at:.4g} bytes, but then {times}")


def children(exercise: Exercise) -> None:
    """The children of a rank are rank + 1, rank + 2, rank + 4, ... below its lowest set bit, as
    far as there are ranks; rank 0 has no set bit, and takes them all."""
    for size in (1, 6, 8):
        parents = {rank: rank & (rank - 1) for rank in range(1, size)}
        for rank in range(size):
            expected = [child for child, parent in parents.items() if parent == rank]
            got = sorted(exercise.children(rank, size))
            require_equal(got, expected, f"children({rank}, {size})")


def tree_broadcast(exercise: Exercise, comm: Communicator) -> None:
    """In the step of distance d = ... 4, 2, 1, a multiple of 2d sends to the rank d further on."""
    x = torch.full((3,), 7.0 if comm.rank == 0 else -1.0)
    recorder = Recorder(comm, *MESSAGES)
    exercise.tree_broadcast(recorder, x)
    require_equal(x, torch.full((3,), 7.0), f"x on rank {comm.rank}")
    sent, most = len(recorder.sent()), math.ceil(math.log2(comm.size))
    require(sent <= most, f"rank {comm.rank} sent {sent} messages; {most} are enough")


def swap(exercise: Exercise, comm: Communicator) -> None:
    """isend returns at once. Wait for its Work after you have received."""
    received = exercise.swap(comm, torch.full((1_000_000,), float(comm.rank)))
    require_equal(received[:2], torch.full((2,), float(comm.rank ^ 1)), "what was received")


def ring_all_reduce(exercise: Exercise, comm: Communicator) -> None:
    """Chapter 3's exercise says which part to send. What arrives in step s of the first round is
    part (r - 2 - s) % n: add it. In the second it is part (r - 1 - s) % n: replace it."""
    x = torch.arange(4.0 * comm.size) + 10 * comm.rank
    expected = comm.size * torch.arange(4.0 * comm.size) + 5 * comm.size * (comm.size - 1)
    recorder = Recorder(comm, *MESSAGES)
    exercise.ring_all_reduce(recorder, x)
    require_equal(x, expected, f"x on rank {comm.rank}")
    sent, most = sum(recorder.sent()), 2 * (comm.size - 1) * 4
    require(sent <= most, f"rank {comm.rank} sent {sent} elements; {most} are enough")
