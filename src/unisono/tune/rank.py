"""What one rank of a measurement does, from the first cell to the last.

A first pass looks for a better number for everything that can be tuned. A second pass, later,
compares only what it found with the defaults, and only what wins again is kept. A last look at all
collectives is what `unisono tune --show` shows; what is slower there goes back to its default.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from unisono.bench.control import Control
from unisono.bench.ways import COLLECTIVES, ways_differ
from unisono.comm import engine
from unisono.comm.compiled_schedules import schedule_for
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator
from unisono.comm.tuning import ENGINES_OWN, LIMITS
from unisono.plan.catalog import catalog
from unisono.plan.order import keeps_rank_order
from unisono.plan.schedule import Schedule
from unisono.plan.sizes import format_size
from unisono.tune.calls import make_call
from unisono.tune.compare import FASTER, Candidate, Comparer, Times, is_faster, mean_ratio
from unisono.tune.decide import (
    ABOVE,
    BELOW,
    algorithm_steps,
    differing_sizes,
    find_threshold,
    is_better_threshold,
)

MARK = "\x1eunisono-tune "
"""Begins the lines in which rank 0 tells the process that started it what is being measured."""

KIB, MIB = 1 << 10, 1 << 20
TURNS = (32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB)
TURN_SIZES = (256 * KIB, MIB, 4 * MIB)
SHOWN_SIZES = (KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
ALGORITHM_SIZES = (16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
_WORTH_A_LOOK = 1.5
"""An algorithm that takes more than so many times as long at first sight is not measured."""
_SLOWER = 1.05
_OVERTIME_S = 8.0
"""How much longer the last look may take on a machine that has other work, too."""
_CELLS = 90
"""About as many comparisons as there are in all, for the time of each."""


@dataclass(frozen=True)
class Threshold:
    """A number of bytes from which on calls go another way, and on what to measure it."""

    name: str
    collective: str
    sizes: tuple[int, ...]
    shared: bool = False
    reads: bool = False


THRESHOLDS = (
    Threshold("cut_from", "all_reduce", tuple(2 * KIB << power for power in range(8))),
    Threshold(
        "direct_from", "all_reduce", tuple(2 * KIB << power for power in range(7)), shared=True
    ),
    # What is written past the cache is read from memory by whoever asked for it.
    Threshold("bypass_from", "all_gather", (MIB, 4 * MIB, 16 * MIB), reads=True),
)


def measure(budget_s: float) -> dict[str, Any] | None:
    """Measure on all ranks for about `budget_s` seconds. On rank 0, what a table has for groups of
    so many ranks; None on the others."""
    import unisono

    os.environ.pop("UNISONO_ALGO", None)  # it is the engine's own way that is tuned
    os.environ["UNISONO_TUNING"] = "off"  # from its defaults, whatever table there is
    unisono.init(backend="unisono")
    world = unisono.get_world()
    assert isinstance(world, SharedMemoryCommunicator)
    measured = world.split(range(world.size), "measured")
    assert isinstance(measured, SharedMemoryCommunicator)

    def say(text: str) -> None:
        if world.rank == 0:
            print(MARK + json.dumps(text), flush=True)

    found = _Search(Comparer(measured, Control(world)), budget_s, say).run()
    measured.close()
    unisono.shutdown()
    return found if world.rank == 0 else None


class _Search:
    def __init__(self, comparer: Comparer, budget_s: float, say: Callable[[str], None]) -> None:
        self._comparer, self._comm, self._say = comparer, comparer.comm, say
        self._ranks = comparer.comm.size
        self._cell_s = budget_s / _CELLS
        self._end_s = time.perf_counter() + budget_s
        self._defaults = comparer.comm.default_tuning
        self._tuned = dict(self._defaults)
        self._tried: dict[str, dict[str, float]] = {}
        room = engine.memory_room() // 8 // self._ranks
        bits = self._comparer.control.agree(float(room.bit_length() - 1))
        self._most_bytes = 1 << max(16, int(bits))

    def run(self) -> dict[str, Any]:
        self._comm.tune(self._defaults)
        nominated = self._find_thresholds() | self._find_turns()
        algorithms = self._measure_algorithms("first")
        self._confirm(nominated)
        self._comm.tune(self._tuned)
        again = self._measure_algorithms("second", algorithms)
        in_order, reordered = self._choose_algorithms(algorithms, again)
        rows = self._look_at_all(again)
        comparer = self._comparer
        return {
            "ranks": self._ranks,
            "crowded": self._comm.is_crowded,
            "sizes": self._tuned,
            "algorithms": in_order,
            "algorithms_reordered": reordered,
            "tried": self._tried,
            "measured": rows,
            "disturbed": round(comparer.queued_s / max(comparer.took_s, 1e-9), 3),
        }

    def _fitting(self, sizes: tuple[int, ...]) -> list[int]:
        return [size for size in sizes if size <= self._most_bytes]

    # -- thresholds and turns --------------------------------------------------------------------

    def _find_thresholds(self) -> dict[str, int]:
        found = {}
        for threshold in THRESHOLDS:
            if self._comparer.is_over(self._end_s):
                break
            times = {
                size: self._compare_ways(threshold, size) for size in self._fitting(threshold.sizes)
            }
            ratios = {str(size): of_size.ratio(ABOVE, BELOW) for size, of_size in times.items()}
            self._tried[threshold.name] = {size: round(ratios[size], 3) for size in ratios}
            better = find_threshold(times, self._defaults[threshold.name])
            if better is not None:
                found[threshold.name] = better
        return found

    def _compare_ways(self, threshold: Threshold, size: int) -> Times:
        self._say(f"{threshold.name}: {threshold.collective} of {format_size(size)}")
        call = make_call(
            self._comm,
            threshold.collective,
            size,
            shared=threshold.shared,
            reads=threshold.reads,
        )
        least, most, _ = LIMITS[threshold.name]
        ways = [
            Candidate(BELOW, {threshold.name: most}, call),
            Candidate(ABOVE, {threshold.name: least}, call),
        ]
        return self._comparer.compare(ways, self._cell_s)

    def _find_turns(self) -> dict[str, int]:
        found = {}
        for collective in COLLECTIVES:
            if self._comparer.is_over(self._end_s):
                break
            name = f"{collective}_turn"
            others = [
                turn
                for turn in TURNS
                if any(self._differ(collective, size, {name: turn}) for size in TURN_SIZES)
            ]
            times = {
                size: self._compare_turns(collective, size, others)
                for size in self._fitting(TURN_SIZES)
            }
            ratios = {
                str(turn): mean_ratio([of_size.ratio(str(turn), "") for of_size in times.values()])
                for turn in others
            }
            self._tried[name] = {turn: round(ratios[turn], 3) for turn in ratios}
            better = [turn for turn in others if self._is_better_turn(collective, turn, times)]
            if better:
                found[name] = min(better, key=lambda turn: ratios[str(turn)])
        return found

    def _differ(self, collective: str, size: int, changed: Mapping[str, int]) -> bool:
        """Whether numbers other than the defaults make a difference to calls of this size."""
        other = self._defaults | dict(changed)
        return ways_differ(collective, size, self._ranks, other, self._defaults)

    def _compare_turns(self, collective: str, size: int, turns: list[int]) -> Times:
        self._say(f"{collective}_turn: {collective} of {format_size(size)}")
        call = make_call(self._comm, collective, size)
        numbers: dict[str, dict[str, int]] = {"": {}}
        numbers |= {str(turn): {f"{collective}_turn": turn} for turn in turns}
        candidates = [Candidate(name, numbers[name], call) for name in numbers]
        return self._comparer.compare(candidates, self._cell_s * len(candidates) / 2)

    def _is_better_turn(self, collective: str, turn: int, times: Mapping[int, Times]) -> bool:
        changed = {f"{collective}_turn": turn}
        differing = [times[size] for size in times if self._differ(collective, size, changed)]
        ratios = [of_size.ratio(str(turn), "") for of_size in differing]
        return is_faster(ratios, [of_size.is_clear(str(turn), "") for of_size in differing])

    def _confirm(self, nominated: Mapping[str, int]) -> None:
        """The second pass: what the first one found against the defaults, and nothing else."""
        thresholds = {threshold.name: threshold for threshold in THRESHOLDS}
        for name, value in nominated.items():
            if self._comparer.is_over(self._end_s):
                return
            default = self._defaults[name]
            if name in thresholds:
                sizes = self._fitting(thresholds[name].sizes)
                times = {
                    size: self._compare_ways(thresholds[name], size)
                    for size in differing_sizes(sizes, default, value)
                }
                wins = is_better_threshold(times, default, value)
            else:
                collective = name.removesuffix("_turn")
                times = {
                    size: self._compare_turns(collective, size, [value])
                    for size in self._fitting(TURN_SIZES)
                }
                wins = self._is_better_turn(collective, value, times)
            if wins:
                self._tuned[name] = value

    # -- algorithms ------------------------------------------------------------------------------

    def _measure_algorithms(
        self, which: str, before: Mapping[tuple[str, int], Times] | None = None
    ) -> dict[tuple[str, int], Times]:
        """By collective and size: the engine's own way and the algorithms that may be faster; in
        the second pass, only those that were."""
        found: dict[tuple[str, int], Times] = {}
        for collective in (*COLLECTIVES, "reduce"):
            names = self._algorithms(collective) if before is None else []
            for size in self._fitting(ALGORITHM_SIZES):
                if self._comparer.is_over(self._end_s):
                    return found
                if before is not None:
                    names = _faster(before.get((collective, size)))
                if names:
                    self._say(f"algorithms, {which} pass: {collective} of {format_size(size)}")
                    calls = {name: self._call(collective, size, name) for name in names}
                    calls = {ENGINES_OWN: self._call(collective, size), **calls}
                    candidates = [Candidate(name, {}, calls[name]) for name in calls]
                    budget_s = self._cell_s * len(candidates) / 2
                    found[collective, size] = self._comparer.compare(candidates, budget_s)
        return found

    def _call(self, collective: str, size: int, algorithm: str | None = None) -> Any:
        return make_call(self._comm, collective, size, algorithm)

    def _algorithms(self, collective: str) -> list[str]:
        """The algorithms that are not far too slow at first sight, without those that do the same
        as others on so many ranks."""
        seen: set[bytes] = set()
        promising = []
        own_s = self._comparer.time_once_s(self._call(collective, MIB))
        for entry in catalog(collective):
            try:
                schedule = schedule_for(collective, entry.name, self._ranks)
            except ValueError:
                continue
            what = _moves_of(schedule)
            if what not in seen:
                seen.add(what)
                call = self._call(collective, MIB, entry.name)
                if self._comparer.time_once_s(call) <= _WORTH_A_LOOK * own_s:
                    promising.append(entry.name)
        return promising

    def _choose_algorithms(
        self, first: Mapping[tuple[str, int], Times], second: Mapping[tuple[str, int], Times]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The algorithms of each collective, as the table has them: in rank order, and in any."""
        in_order: dict[str, Any] = {}
        reordered: dict[str, Any] = {}
        for chosen, any_order in ((in_order, False), (reordered, True)):
            fastest: dict[str, dict[int, str]] = {}
            for (collective, size), times in first.items():
                names = set(_faster(times)) & set(_faster(second.get((collective, size))))
                fitting = [
                    name for name in names if any_order or self._keeps_bits(collective, name)
                ]
                again = second.get((collective, size), times)
                best = min(fitting, key=again.us, default=ENGINES_OWN)
                fastest.setdefault(collective, {})[size] = best
            for collective, by_size in fastest.items():
                if steps := algorithm_steps(by_size):
                    chosen[collective] = steps
        return in_order, reordered

    def _keeps_bits(self, collective: str, algorithm: str) -> bool:
        if collective in ("reduce", "reduce_scatter"):
            return False
        return collective != "all_reduce" or keeps_rank_order(
            schedule_for(collective, algorithm, self._ranks)
        )

    # -- what is shown ---------------------------------------------------------------------------

    def _look_at_all(self, algorithms: Mapping[tuple[str, int], Times]) -> list[dict[str, Any]]:
        """Every collective at every size, as tuned and by the defaults."""
        rows: list[dict[str, Any]] = []
        for collective, size in product(COLLECTIVES, self._fitting(SHOWN_SIZES)):
            if self._comparer.is_over(self._end_s + _OVERTIME_S):
                break
            self._say(f"tuned and untuned: {collective} of {format_size(size)}")
            rows.append(self._row(collective, size, algorithms.get((collective, size))))
        for row in rows:  # what went back to its default meanwhile was not worth it anywhere
            if not self._changes(row["collective"], row["size_bytes"]):
                row.pop("tuned_us", None)
                row.pop("ratio", None)
        return rows

    def _changes(self, collective: str, size: int) -> list[str]:
        """The numbers that differ from the defaults and matter to calls of this size."""
        return [
            name
            for name in (f"{collective}_turn", "cut_from", "bypass_from")
            if self._differ(collective, size, {name: self._tuned[name]})
        ]

    def _row(self, collective: str, size: int, algorithms: Times | None) -> dict[str, Any]:
        call = self._call(collective, size)
        candidates = [Candidate("untuned", self._defaults, call)]
        changed = self._changes(collective, size)
        if changed:
            candidates.append(Candidate("tuned", self._tuned, call))
        times = self._comparer.compare(candidates, self._cell_s / 3)
        row: dict[str, Any] = {"collective": collective, "size_bytes": size}
        row["untuned_us"] = round(times.us("untuned"), 2)
        if changed and times.ratio("tuned", "untuned") > _SLOWER:
            for name in changed:
                self._tuned[name] = self._defaults[name]
            self._comm.tune(self._tuned)
        elif changed:
            row["tuned_us"] = round(times.us("tuned"), 2)
            row["ratio"] = round(times.ratio("tuned", "untuned"), 3)
        if algorithms is not None:
            others = {name: us for name in algorithms.blocks_us if (us := algorithms.us(name))}
            row["by_algorithm_us"] = {name: round(us, 2) for name, us in others.items()}
        return row


def _faster(times: Times | None) -> list[str]:
    """The algorithms that beat the engine's own way."""
    if times is None:
        return []
    return [
        name
        for name in times.blocks_us
        if name != ENGINES_OWN
        and times.ratio(name, ENGINES_OWN) <= FASTER
        and times.is_clear(name, ENGINES_OWN)
    ]


def _moves_of(schedule: Schedule) -> bytes:
    columns = (column for step in schedule.steps for column in step.columns())
    return repr([list(column) for column in columns]).encode()
