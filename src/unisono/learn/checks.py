"""What the functions of the exercises must do: each check runs them, on ranks where they need some.

A check raises AssertionError with a sentence for the reader. Its docstring is the reader's hint.
CHECKS has the checks in the order of the chapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from unisono.comm.communicator import Communicator

Exercise = Any  # the names that the reader's file defines, as attributes


def require_equal(got: Any, expected: Any, what: str) -> None:
    if isinstance(got, torch.Tensor) and got.shape == getattr(expected, "shape", None):
        same = torch.allclose(got, expected)
    else:
        same = got == expected
    assert same is True, f"{what} is {got}, not {expected}"


def ranks(exercise: Exercise) -> None:
    """divmod(len(items), size) says how many ranks have one item more than the others."""
    for count, size in ((8, 4), (10, 4), (3, 4), (0, 2), (7, 1)):
        items = list(range(count))
        shares = [exercise.my_share(items, rank, size) for rank in range(size)]
        joined = [item for share in shares for item in share]
        require_equal(joined, items, f"the joined list of the shares of {size} ranks")
        lengths = [len(share) for share in shares]
        assert max(lengths) - min(lengths) <= 1, f"{count} items are cut into {lengths}"


def collectives(exercise: Exercise, comm: Communicator) -> None:
    """Every rank has a part for every rank: element r of each row belongs to rank r."""
    row = 10 * comm.rank + torch.arange(comm.size)
    column = 10 * torch.arange(comm.size) + comm.rank
    require_equal(exercise.transpose(comm, row), column, f"column {comm.rank}")


class Recorder:
    """A Communicator with some of its methods alone, which records what they are given."""

    def __init__(self, comm: Communicator, *methods: str) -> None:
        self.rank, self.size, self.next, self.prev = comm.rank, comm.size, comm.next, comm.prev
        self.calls: list[tuple[str, torch.Tensor, dict[str, Any]]] = []
        for name in methods:
            setattr(self, name, partial(self._call, name, getattr(comm, name)))

    def _call(self, name: str, method: Any, x: torch.Tensor, *args: Any, **more: Any) -> Any:
        self.calls.append((name, x, more))
        return method(x, *args, **more)

    def sent(self) -> list[int]:
        """The number of elements of every message sent."""
        return [x.numel() for name, x, _ in self.calls if name in ("send", "isend")]


MESSAGES = ("send", "recv", "isend", "irecv")


def all_reduce(exercise: Exercise, comm: Communicator) -> None:
    """In step s, rank r sends part (r - 1 - s) % n and adds what it receives to (r - 2 - s) % n. In
    the second round it sends part (r - s) % n and replaces part (r - 1 - s) % n."""
    x = torch.arange(4.0 * comm.size) + 10 * comm.rank
    expected = comm.size * torch.arange(4.0 * comm.size) + 5 * comm.size * (comm.size - 1)
    recorder = Recorder(comm, *MESSAGES)
    exercise.ring_all_reduce(recorder, x)
    require_equal(x, expected, "the sum")
    sent, most = sum(recorder.sent()), 2 * (comm.size - 1) * 4
    assert sent <= most, f"rank {comm.rank} sent {sent} elements; {most} are enough"


def cost(exercise: Exercise) -> None:
    """A ring has 2 (n - 1) steps of size / n bytes each, a tree 2 log2(n) steps of size bytes."""
    for network in ((8, 1e-6, 1e10), (64, 5e-6, 5e10), (2, 1e-6, 1e9)):
        n, latency, bandwidth = network
        for size in (8.0, 1e6, 1e9):
            ring = 2 * (n - 1) * (latency + size / n / bandwidth)
            tree = 2 * math.log2(n) * (latency + size / bandwidth)
            for call, expected in ((exercise.ring_time, ring), (exercise.tree_time, tree)):
                got, what = call(size, *network), f"{call.__name__}({size:g}, {n}, ...)"
                assert math.isclose(got, expected), f"{what} is {got:.4g}, not {expected:.4g}"
        if n > 2:
            at = exercise.crossover(*network)
            both = [call(at, *network) for call in (exercise.ring_time, exercise.tree_time)]
            assert math.isclose(*both), f"ring and tree take {both} s for {at:.4g} bytes"


def trees(exercise: Exercise, comm: Communicator) -> None:
    """In the step of distance d = ... 4, 2, 1, a multiple of 2d sends to the rank d further on."""
    x = torch.full((3,), 7.0 if comm.rank == 0 else -1.0)
    recorder = Recorder(comm, *MESSAGES)
    exercise.tree_broadcast(recorder, x)
    require_equal(x, torch.full((3,), 7.0), "x")
    sent, most = len(recorder.sent()), math.ceil(math.log2(comm.size))
    assert sent <= most, f"rank {comm.rank} sent {sent} messages; {most} are enough"


def messages(exercise: Exercise, comm: Communicator) -> None:
    """isend returns at once. Wait for its Work after you have received."""
    received = exercise.swap(comm, torch.full((1_000_000,), float(comm.rank)))
    require_equal(received[:2], torch.full((2,), float(comm.rank ^ 1)), "what was received")


def overlap(exercise: Exercise, comm: Communicator) -> None:
    """all_reduce(gradient, async_op=True) returns a Work. Wait for all of them at the end."""
    recorder, seen = Recorder(comm, "all_reduce"), []

    def layer(number: int) -> torch.Tensor:
        seen.append(sum(bool(more.get("async_op")) for _, _, more in recorder.calls))
        return torch.full((4,), float(number))

    gradients = exercise.backward(recorder, [partial(layer, number) for number in range(3)])
    for number, gradient in enumerate(gradients):
        require_equal(gradient, torch.full((4,), float(number * comm.size)), f"gradient {number}")
    assert seen == [0, 1, 2], "a gradient was not under way when the next layer computed"


def groups(exercise: Exercise) -> None:
    """rank = tp_rank + tp * (dp_rank + dp * pp_rank)"""
    for size, tp, pp in ((8, 2, 2), (8, 4, 1), (24, 2, 3), (4, 1, 1)):
        mesh = torch.arange(size).view(pp, -1, tp)
        found = exercise.layout(size, tp, pp)
        for name, dim in (("pp", 0), ("dp", 1), ("tp", 2)):
            expected = mesh.movedim(dim, -1).reshape(-1, mesh.shape[dim]).tolist()
            require_equal(found.get(name), expected, f"{name} of layout({size}, tp={tp}, pp={pp})")


def training(exercise: Exercise, comm: Communicator) -> None:
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


def attention(exercise: Exercise) -> None:
    """torch.logaddexp(a_lse, b_lse) is the new lse. Each output counts exp(its lse - the new)."""

    def attend(keys: slice, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scores[:, keys].softmax(1) @ values[keys], scores[:, keys].logsumexp(1)

    torch.manual_seed(0)
    values = torch.randn(8, 3)
    for scores in (torch.randn(3, 8), 1000 * torch.randn(3, 8)):
        whole = attend(slice(0, 8), scores)
        merged = exercise.merge(*attend(slice(0, 3), scores), *attend(slice(3, 8), scores))
        for got, expected, what in zip(merged, whole, ("output", "lse"), strict=True):
            require_equal(got, expected, f"the merged {what}")


def weights(exercise: Exercise, comm: Communicator) -> None:
    """Receive into a copy, load it, all_reduce with "min" whether that worked, then copy it."""

    def load(received: torch.Tensor, refuses: bool) -> None:
        require_equal(received, torch.full((3,), 2.0), "what an engine received")
        if refuses:
            raise ValueError("these weights do not fit")

    for refusing in (None, comm.size - 1, 1):
        used = torch.full((3,), 1.0 if comm.rank else 2.0)
        changed = exercise.update(comm, used, partial(load, refuses=comm.rank == refusing))
        case = f"if engine {refusing} refuses," if refusing else "if no engine refuses,"
        assert changed is (refusing is None), f"{case} update returned {changed}"
        expected = torch.full((3,), 1.0 if comm.rank and refusing else 2.0)
        require_equal(used, expected, f"{case} the weights in use")


def what_goes_wrong(exercise: Exercise, comm: Communicator) -> None:
    """Every rank must make every call. Let the sum and the count of a step travel together."""
    losses = [float(comm.rank), math.nan if comm.rank == 1 else 6.0, 3.0]
    finite = [*range(comm.size), *[6.0] * (comm.size - 1), *[3.0] * comm.size]
    log: list[float] = []
    mean, expected = exercise.train(comm, losses, log), sum(finite) / len(finite)
    comm.barrier()  # a rank that has made fewer calls is here while others still call
    assert math.isclose(mean, expected, rel_tol=1e-6), f"the mean is {mean}, not {expected}"
    assert len(log) == (3 if comm.rank == 0 else 0), f"rank {comm.rank} logged {len(log)} steps"


Check = tuple[Callable[..., None], tuple[int, ...]]
CHECKS: tuple[Check, ...] = (
    (ranks, ()), (collectives, (4,)), (all_reduce, (1, 2, 4)), (cost, ()), (trees, (1, 3, 8)),
    (messages, (2, 4)), (overlap, (2,)), (groups, ()), (training, (1, 2, 4)), (attention, ()),
    (weights, (3,)), (what_goes_wrong, (2, 4)),
)  # fmt: skip
"""Each check, and the numbers of ranks on which it runs; none: once, without a Communicator."""
