"""Causal attention over a sharded sequence: how long each rank computes, and how long it all takes.

    python benchmarks/attention.py                    4 ranks, a minute
    python benchmarks/attention.py --ranks 8 --positions 4096 --goals
    python benchmarks/attention.py --json attention.json
    python benchmarks/attention.py --decode           one query against a cache that the ranks share

A turn is one forward and one backward pass of one layer, in float32, one thread per rank; all
variants run in the same processes and take turns, in an order that is shuffled each time.
"Computing" is the CPU time that a rank's thread used outside communication, so it does not depend
on how many ranks share a core; "all" is the slowest rank's wall-clock time, which does. Figures are
medians in ms. A ring is as fast as the rank that computes longest.

Ulysses uses torch's kernel for the attention itself; the rings use plain matrix products.

With --decode every rank has the same query of one position, and --positions are the keys in all. A
tree (`tree_attention`) sends parts of the softmax; a ring sends keys and values around, as
`ring_attention` does; "gather" gathers them on every rank. Median us of the slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import unisono

PLAIN, ZIGZAG = "ring", "ring, zigzag"


@dataclass(frozen=True)
class Row:
    """One variant: each rank's computing time, and the slowest rank's wall-clock time."""

    way: str
    computing_ms: list[float]
    all_ms: float

    @property
    def balance(self) -> float:
        """The longest computing time over the mean: 1 if all ranks compute equally long."""
        return max(self.computing_ms) / statistics.mean(self.computing_ms)


class Communication:
    """How much of this thread's time the calls that communicate have used."""

    def __init__(self, stack: ExitStack) -> None:
        from unisono.training import attention

        self.used_s = 0.0
        for owner, name in (
            (attention._Lane, "pass_on"),
            (attention._Lane, "wait"),
            (unisono.Communicator, "all_to_all"),
            (unisono.Communicator, "all_gather"),
        ):
            timed = self._timed(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, timed))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin_s = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.used_s += time.thread_time() - begin_s

        return timed


def ways(comm: Any, heads: int) -> dict[str, Callable[..., Any]]:
    """What is compared: functions of this rank's query, key and value."""
    from unisono.training import ring_attention, ulysses_attention

    found: dict[str, Callable[..., Any]] = {
        PLAIN: partial(ring_attention, group=comm),
        ZIGZAG: partial(ring_attention, group=comm, order="zigzag"),
    }
    half = comm.size // 2
    if comm.size > 2 and comm.size % 2 == 0:
        found["double ring, zigzag"] = partial(found[ZIGZAG], inner_size=half)
        manager = unisono.ProcessGroupManager(tp_size=2, cp_size=half, group=comm)
        if heads % 2 == 0:
            found["heads x ring, zigzag"] = partial(
                ulysses_attention, group=manager.tp, context=manager.cp, order="zigzag"
            )
    if heads % comm.size == 0:
        found["Ulysses"] = partial(ulysses_attention, group=comm)
    return found


def be_a_rank(positions: int, heads: int, width: int, turns: int) -> list[dict[str, Any]]:
    import torch

    torch.set_num_threads(1)
    comm = unisono.init()
    shape = (1, heads, positions // comm.size, width)
    three = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    found = ways(comm, heads)
    computing_ms: dict[str, list[float]] = {way: [] for way in found}
    all_ms: dict[str, list[float]] = {way: [] for way in found}
    order, shuffler = list(found), random.Random(1)
    gc.disable()
    with ExitStack() as stack:
        communication = Communication(stack)
        for turn in range(turns + 1):
            shuffler.shuffle(order)
            for way in order:
                comm.barrier()
                communication.used_s = 0.0
                begin_s, thread_s = time.perf_counter(), time.thread_time()
                found[way](*three, causal=True).sum().backward()
                used_s = time.thread_time() - thread_s - communication.used_s
                took = torch.tensor([time.perf_counter() - begin_s])
                comm.all_reduce(took, "max")
                if turn:  # the first one is a warm-up
                    computing_ms[way].append(used_s * 1e3)
                    all_ms[way].append(float(took) * 1e3)
    gc.enable()
    rows = []
    for way in found:
        medians = unisono.all_gather_object(statistics.median(computing_ms[way]))
        rows.append(asdict(Row(way, medians, statistics.median(all_ms[way]))))
    unisono.shutdown()
    return rows


def decode(positions: int, heads: int, width: int, turns: int) -> dict[str, float]:
    """The median us of the slowest rank for each way, which take turns; results are compared."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    from unisono.training.attention import _Rings, exp_less
    from unisono.training.tree_attention import tree_attention

    torch.set_num_threads(1)
    comm = unisono.init()
    torch.manual_seed(0)
    query = torch.randn(1, heads, 1, width)
    key, value = torch.randn(2, 1, heads, positions // comm.size, width) * (comm.rank + 1) ** 0.5
    gathered = torch.empty(comm.size, *key.shape), torch.empty(comm.size, *key.shape)

    def by_ring() -> Any:
        top, total, result = torch.full((1, heads, 1, 1), -torch.inf), 0.0, 0.0
        lengths = [key.shape[-2]] * comm.size
        for _, _, block in _Rings(comm, lengths, comm.size).blocks(torch.cat([key, value], -1)):
            keys, values = block.split_with_sizes([width, width], -1)
            scores = query @ keys.mT * width**-0.5
            highest = torch.maximum(top, scores.amax(-1, keepdim=True))
            old, weights = exp_less(top, highest), exp_less(scores, highest)
            total = total * old + weights.sum(-1, keepdim=True)
            result, top = result * old + weights @ values, highest
        return result / total

    def by_gathering() -> Any:
        for whole, mine in zip(gathered, (key, value), strict=True):
            comm.all_gather(whole, mine)
        return attend(query, *(torch.cat(list(whole), -2) for whole in gathered))

    found: dict[str, Callable[..., Any]] = {
        "tree": partial(tree_attention, query, key, value, comm),
        "ring": by_ring,
        "gather": by_gathering,
    }
    taken_us: dict[str, list[float]] = {way: [] for way in found}
    order, shuffler, expected = list(found), random.Random(1), by_gathering()
    with torch.inference_mode():
        for _ in range(turns):
            shuffler.shuffle(order)
            for way in order:
                comm.barrier()
                begin_s = time.perf_counter()
                result = found[way]()
                took = torch.tensor([time.perf_counter() - begin_s])
                comm.all_reduce(took, "max")
                taken_us[way].append(float(took) * 1e6)
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    unisono.shutdown()
    return {way: statistics.median(times) for way, times in taken_us.items()}


def goals(rows: Sequence[Row]) -> list[str]:
    """Which goals are met."""
    found = {row.way: row for row in rows}
    ranks = len(rows[0].computing_ms)
    ratio = max(found[PLAIN].computing_ms) / max(found[ZIGZAG].computing_ms)
    least = 0.8 * 4 * ranks / (2 * ranks + 1)  # of what the number of products predicts
    wanted = [
        (f"the busiest rank, {PLAIN} / {ZIGZAG}: {ratio:.2f}, at least {least:.2f}", ratio >= least)
    ]
    for row in rows:
        if "zigzag" in row.way:
            text = f"{row.way}, the busiest rank / the mean: {row.balance:.2f}, at most 1.1"
            wanted.append((text, row.balance <= 1.1))
    return [f"  {'met   ' if is_met else 'MISSED'} {text}" for text, is_met in wanted]


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--positions", type=int, default=2048, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--goals", action="store_true", help="say which goals are met or missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save everything measured")
    parser.add_argument("--decode", action="store_true", help="one query: tree, ring, gather")
    options = parser.parse_args(arguments)
    if options.positions % (2 * options.ranks):
        parser.error(f"--positions must be a multiple of {2 * options.ranks}, twice the ranks")
    sizes = (options.positions, options.heads, options.width)
    if options.decode:
        times = unisono.launch(decode, options.ranks, (*sizes, 10 * options.turns), threads=1)[0]
        print(
            f"{options.ranks} ranks, {os.cpu_count()} cores ({platform.machine()}), one query, "
            f"{sizes[0]} keys, {sizes[1]} heads of {sizes[2]}, float32, median us: "
            + ", ".join(f"{way} {time_us:.0f}" for way, time_us in times.items())
        )
        return 0
    results = unisono.launch(be_a_rank, options.ranks, (*sizes, options.turns), threads=1)
    rows = [Row(**row) for row in results[0]]
    machine = f"{options.ranks} ranks, {os.cpu_count()} cores ({platform.machine()})"
    print(f"{machine}, {sizes[0]} positions, {sizes[1]} heads of {sizes[2]}, causal, median ms")
    print(f"  {'':22}{'computing, by rank':{8 * options.ranks}}  busiest/mean       all")
    for row in rows:
        times = "".join(f"{time_ms:8.1f}" for time_ms in row.computing_ms)
        print(f"  {row.way:22}{times}{row.balance:14.2f}{row.all_ms:10.1f}")
    if options.goals:
        print("\n".join(["goals", *goals(rows)]))
    if options.json:
        facts = {**vars(options), "cores": os.cpu_count(), "machine": platform.machine()}
        del facts["json"], facts["goals"]
        saved = {**facts, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(saved, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
