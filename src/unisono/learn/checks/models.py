"""Chapters 13 to 15: tensor, pipeline and expert parallelism."""

from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.learn.checks.requirements import Recorder, require, require_equal

Exercise = Any


def _layer(comm: Communicator) -> tuple[torch.Tensor, ...]:
    """Whole x, a, b and the gradient of the output, and this rank's columns of a and rows of b."""
    draw = torch.Generator().manual_seed(0)
    x, a = torch.randn(3, 4, generator=draw), torch.randn(4, 2 * comm.size, generator=draw)
    b, dy = torch.randn(2 * comm.size, 4, generator=draw), torch.randn(3, 4, generator=draw)
    mine = slice(2 * comm.rank, 2 * comm.rank + 2)
    return x, a, b, dy, a[:, mine].clone(), b[mine].clone()


def mlp(exercise: Exercise, comm: Communicator) -> None:
    """torch.relu(x @ a) @ b is this rank's term of a sum over the ranks."""
    x, a, b, _, my_a, my_b = _layer(comm)
    recorder = Recorder(comm, "all_reduce")
    got = exercise.mlp(recorder, x, my_a, my_b)
    require_equal(got, torch.relu(x @ a) @ b, f"the output on rank {comm.rank}")


def mlp_backward(exercise: Exercise, comm: Communicator) -> None:
    """With h = relu(x @ a): db = h.T @ dy; dh = dy @ b.T where h > 0, else 0; da = x.T @ dh; and
    dx = dh @ a.T is a term of a sum over the ranks."""
    x, a, b, dy, my_a, my_b = _layer(comm)
    whole = [tensor.clone().requires_grad_() for tensor in (x, a, b)]
    dx, da, db = torch.autograd.grad(torch.relu(whole[0] @ whole[1]) @ whole[2], whole, dy)
    mine = slice(2 * comm.rank, 2 * comm.rank + 2)
    expected = (dx, da[:, mine], db[mine])
    got = exercise.mlp_backward(Recorder(comm, "all_reduce"), x, my_a, my_b, dy)
    require_equal(len(got), 3, "the number of results")
    for name, one, other in zip(("dx", "da", "db"), got, expected, strict=True):
        require_equal(one, other, f"{name} on rank {comm.rank}")


def bubble(exercise: Exercise) -> None:
    """A stage computes microbatches slots and waits stages - 1 of them."""
    for stages, microbatches in ((4, 4), (4, 12), (1, 3), (8, 32)):
        expected = (stages - 1) / (microbatches + stages - 1)
        got = float(exercise.bubble(stages, microbatches))
        require_equal(got, expected, f"bubble({stages}, {microbatches})")


def one_f_one_b(exercise: Exercise) -> None:
    """First stages - 1 - stage forwards, but no more than there are; then one forward and one
    backward by turns; then the backwards that are left."""
    for stages, microbatches in ((4, 6), (3, 2), (1, 2)):
        for stage in range(stages):
            first = min(stages - 1 - stage, microbatches)
            expected = [f"F{number}" for number in range(first)]
            for number in range(microbatches - first):
                expected += [f"F{first + number}", f"B{number}"]
            expected += [f"B{number}" for number in range(microbatches - first, microbatches)]
            what = f"one_f_one_b({stage}, {stages}, {microbatches})"
            require_equal(list(exercise.one_f_one_b(stage, stages, microbatches)), expected, what)


def send_counts(exercise: Exercise) -> None:
    """Expert e is on rank e // (num_experts // size); torch.bincount counts with minlength."""
    for choices, num_experts, size in (([0, 3, 3, 1], 4, 2), ([5], 6, 3), ([], 2, 2)):
        experts = torch.tensor(choices, dtype=torch.int64)
        owners = [choice // (num_experts // size) for choice in choices]
        got = [int(count) for count in exercise.send_counts(experts, num_experts, size)]
        what = f"send_counts({choices}, {num_experts}, {size})"
        require_equal(got, [owners.count(rank) for rank in range(size)], what)


def through_experts(exercise: Exercise, comm: Communicator) -> None:
    """Sort the tokens by their rank (argsort, stable), send a part to each with
    unisono.all_to_all, apply the expert, send the parts back, and undo the sorting."""
    tokens = torch.arange(10.0).view(5, 2) + 100 * comm.rank
    for shift in (0, 1):
        experts = torch.tensor([2, 0, 1, 0, 0]) * shift % comm.size
        got = exercise.through_experts(comm, tokens.clone(), experts, lambda x: x * (comm.rank + 2))
        require_equal(got, tokens * (experts + 2)[:, None], f"the tokens of rank {comm.rank}")
    require(tuple(got.shape) == (5, 2), f"the result has the shape {tuple(got.shape)}")
