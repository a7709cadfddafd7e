"""What the functions of the exercises must do: each check runs them, on ranks where they need some.

A check raises AssertionError with a sentence for the reader; CHAPTERS has them in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from unisono.comm.communicator import Communicator


@dataclass(frozen=True)
class Chapter:
    """An exercise. `check` runs once for each entry of `ranks`, on every rank of so many, with the
    reader's module and the Communicator; once without one where `ranks` is empty."""

    title: str
    check: Callable[..., None]
    ranks: tuple[int, ...]
    hint: str


def require(condition: object, otherwise: str) -> None:
    """An assert that `python -O` keeps."""
    if not condition:
        raise AssertionError(otherwise)


def require_equal(got: Any, expected: Any, what: str) -> None:
    import torch

    same = (
        torch.allclose(got, expected)
        if isinstance(got, torch.Tensor) and got.shape == expected.shape
        else got == expected
    )
    require(same is True, f"{what} is {got}, not {expected}")


def _ranks(module: ModuleType) -> None:
    for count, size in ((8, 4), (10, 4), (3, 4), (0, 2), (7, 1)):
        items = list(range(count))
        shares = [module.my_share(items, rank, size) for rank in range(size)]
        lengths = [len(share) for share in shares]
        require_equal(
            [item for share in shares for item in share],
            items,
            f"the shares of {size} ranks, joined,",
        )
        require(max(lengths) - min(lengths) <= 1, f"{count} items are cut into {lengths}")


def _collectives(module: ModuleType, comm: Communicator) -> None:
    import torch

    row = 10 * comm.rank + torch.arange(comm.size)
    column = 10 * torch.arange(comm.size) + comm.rank
    require_equal(module.transpose(comm, row), column, f"column {comm.rank}")


class _Counting:
    """A Communicator that counts the elements and the messages sent, and has no collectives."""

    def __init__(self, comm: Communicator) -> None:
        self.elements = self.messages = 0
        self.rank, self.size, self.next, self.prev = comm.rank, comm.size, comm.next, comm.prev
        self.recv, self.irecv = comm.recv, comm.irecv
        self.send = partial(self._count, comm.send)
        self.isend = partial(self._count, comm.isend)

    def _count(self, send: Callable[..., Any], x: torch.Tensor, *args: Any, **more: Any) -> Any:
        self.elements, self.messages = self.elements + x.numel(), self.messages + 1
        return send(x, *args, **more)


def _ring(module: ModuleType, comm: Communicator) -> None:
    import torch

    x = torch.arange(4.0 * comm.size) + 10 * comm.rank
    expected = comm.size * torch.arange(4.0 * comm.size) + 5 * comm.size * (comm.size - 1)
    counting = _Counting(comm)
    module.ring_all_reduce(counting, x)
    require_equal(x, expected, "the sum")
    most = 2 * (comm.size - 1) * 4
    require(counting.elements <= most, f"{counting.elements} elements were sent; {most} are enough")


def _cost(module: ModuleType) -> None:
    for ranks, latency, bandwidth in ((8, 1e-6, 1e10), (64, 5e-6, 5e10), (2, 1e-6, 1e9)):
        for size in (8.0, 1e6, 1e9):
            ring = 2 * (ranks - 1) * (latency + size / ranks / bandwidth)
            tree = 2 * math.log2(ranks) * (latency + size / bandwidth)
            for name, expected in (("ring_time", ring), ("tree_time", tree)):
                got = getattr(module, name)(size, ranks, latency, bandwidth)
                what = f"{name}({size:g}, {ranks}, {latency:g}, {bandwidth:g})"
                require(math.isclose(got, expected), f"{what} is {got:.4g}, not {expected:.4g}")
        if ranks > 2:
            at = module.crossover(ranks, latency, bandwidth)
            ring, tree = (
                function(at, ranks, latency, bandwidth)
                for function in (module.ring_time, module.tree_time)
            )
            require(
                math.isclose(ring, tree), f"at {at:.4g} bytes: ring {ring:.4g}, tree {tree:.4g}"
            )


def _tree(module: ModuleType, comm: Communicator) -> None:
    import torch

    x = torch.full((3,), 7.0 if comm.rank == 0 else -1.0)
    counting = _Counting(comm)
    module.tree_broadcast(counting, x)
    require_equal(x, torch.full((3,), 7.0), "x")
    most = math.ceil(math.log2(comm.size))
    require(counting.messages <= most, f"{counting.messages} messages; {most} are enough")


def _swap(module: ModuleType, comm: Communicator) -> None:
    import torch

    received = module.swap(comm, torch.full((1_000_000,), float(comm.rank)))
    require_equal(received[:2], torch.full((2,), float(comm.rank ^ 1)), "what was received")


def _overlap(module: ModuleType, comm: Communicator) -> None:
    import torch

    begun = 0

    class Watched:
        rank, size = comm.rank, comm.size

        def all_reduce(self, x: torch.Tensor, *args: Any, **more: Any) -> Any:
            nonlocal begun
            begun += bool(more.get("async_op"))
            return comm.all_reduce(x, *args, **more)

    seen: list[int] = []

    def layer(number: int) -> torch.Tensor:
        seen.append(begun)
        return torch.full((4,), float(number))

    gradients = module.backward(Watched(), [partial(layer, number) for number in range(3)])
    for number, gradient in enumerate(gradients):
        require_equal(gradient, torch.full((4,), float(number * comm.size)), f"gradient {number}")
    require(seen == [0, 1, 2], "a gradient was not under way when the next layer computed")


def _groups(module: ModuleType) -> None:
    for size, tp, pp in ((8, 2, 2), (8, 4, 1), (24, 2, 3), (4, 1, 1)):
        dp = size // tp // pp
        stage = tp * dp
        expected = {
            "tp": [list(range(first, first + tp)) for first in range(0, size, tp)],
            "dp": [
                list(range(start + lane, start + stage, tp))
                for start in range(0, size, stage)
                for lane in range(tp)
            ],
            "pp": [list(range(first, size, stage)) for first in range(stage)],
        }
        found = module.layout(size, tp, pp)
        for name, groups in expected.items():
            what = f"{name} of layout({size}, tp={tp}, pp={pp})"
            require_equal(found.get(name), groups, what)


def _sharded(module: ModuleType, comm: Communicator) -> None:
    import torch

    whole = torch.arange(2.0 * comm.size)
    parameters, expected = whole.clone(), whole.clone()
    momentum, whole_momentum = torch.zeros(2), torch.zeros_like(whole)
    for step in range(3):
        gradients = whole * (comm.rank + step)
        module.sharded_step(comm, parameters, gradients.clone(), momentum, lr=0.1)
        mean = whole * ((comm.size - 1) / 2 + step)
        whole_momentum = 0.9 * whole_momentum + mean
        expected -= 0.1 * whole_momentum
        require_equal(parameters, expected, f"parameters after step {step + 1}")


def _attention(module: ModuleType) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 1000.0):
        scores, values = (torch.randn(3, 8, generator=generator) for _ in range(2))
        scores, values = scores * scale, values.T

        def attend(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
            part = scores[:, keys]  # noqa: B023
            return part.softmax(1) @ values[keys], part.logsumexp(1)  # noqa: B023

        merged = module.merge(*attend(slice(0, 3)), *attend(slice(3, 8)))
        for got, expected, what in zip(merged, attend(slice(0, 8)), ("output", "lse"), strict=True):
            require_equal(got, expected, f"the merged {what}")


def _weights(module: ModuleType, comm: Communicator) -> None:
    import torch

    for bad in (None, comm.size - 1, 1):
        is_trainer = comm.rank == 0
        weights = torch.full((3,), 2.0 if is_trainer else 1.0)

        def load(received: torch.Tensor) -> None:
            require_equal(received, torch.full((3,), 2.0), "what an engine received")
            if comm.rank == bad:  # noqa: B023
                raise ValueError("these weights do not fit")

        changed = module.update(comm, weights, load)
        require(changed is (bad is None), f"returned {changed}; refusing engine: {bad}")
        has = 2.0 if is_trainer or bad is None else 1.0
        require_equal(weights, torch.full((3,), has), f"weights; refusing engine: {bad}:")


def _mended(module: ModuleType, comm: Communicator) -> None:
    losses = [float(comm.rank), math.nan if comm.rank == 1 else 6.0, 3.0]
    log: list[float] = []
    finite = [float(rank) for rank in range(comm.size)] + [6.0] * (comm.size - 1)
    expected = sum([*finite, *[3.0] * comm.size]) / (3 * comm.size - 1)
    mean = module.train(comm, losses, log)
    require(math.isclose(mean, expected, rel_tol=1e-6), f"the mean is {mean}, not {expected}")
    require(len(log) == (3 if comm.rank == 0 else 0), f"rank {comm.rank} logged {len(log)} steps")


CHAPTERS = (
    Chapter("Ranks", _ranks, (), "divmod(len(items), size) says how many ranks have one more."),
    Chapter("The collectives", _collectives, (4,), "Part r goes to rank r, from every rank."),
    Chapter(
        "all_reduce is reduce_scatter and all_gather",
        _ring,
        (1, 2, 4),
        "In step s rank r sends part (r - s) % n and adds what it receives to part "
        "(r - s - 1) % n; then it sends part (r + 1 - s) % n and replaces part (r - s) % n.",
    ),
    Chapter("What it costs", _cost, (), "A ring has 2 (n - 1) steps of size / n bytes each."),
    Chapter(
        "Trees", _tree, (1, 3, 8), "In the step of distance d, rank r < d sends to rank r + d."
    ),
    Chapter(
        "Messages and deadlock", _swap, (2, 4), "isend returns at once; wait for it at the end."
    ),
    Chapter("Overlap", _overlap, (2,), "all_reduce(gradient, async_op=True) returns a Work."),
    Chapter("Groups", _groups, (), "rank = tp_rank + tp * (dp_rank + dp * pp_rank)"),
    Chapter(
        "DDP, ZeRO and FSDP by hand",
        _sharded,
        (1, 2, 4),
        'comm.reduce_scatter(part, gradients, "mean"), then all_gather of the updated part.',
    ),
    Chapter(
        "Attention over ranks",
        _attention,
        (),
        "torch.logaddexp(a_lse, b_lse) is the new one; each output counts exp(own - new).",
    ),
    Chapter(
        "Weights for an engine",
        _weights,
        (3,),
        "Receive beside the old ones, load, all_reduce whether it went well (min), then copy.",
    ),
    Chapter(
        "What goes wrong",
        _mended,
        (2, 4),
        "Every rank must make every call: sum and count of a step travel together.",
    ),
)
