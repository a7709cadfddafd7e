"""An algorithm of your own: written as data, then verified, run, compared and drawn.

    python examples/own_algorithm.py
    unisono run -n 4 examples/own_algorithm.py

All-reduce in a star: all ranks send to rank 0, which adds and sends back. It needs only two steps,
but all data passes through one rank.
"""

from __future__ import annotations

import numpy as np

import unisono
from unisono.plan import (
    PRESETS,
    Schedule,
    ScheduleError,
    Step,
    algorithm,
    explain,
    find,
    rank_algorithms,
    verify,
)
from unisono.plan.draw import to_svg
from unisono.plan.sizes import format_seconds


@algorithm("all_reduce", "star")
def star(ranks: int) -> Schedule:
    """Every rank ends up with the sum."""
    inward = [(rank, 0, 0, "reduce") for rank in range(1, ranks)]
    outward = [(0, rank, 0, "copy") for rank in range(1, ranks)]
    return Schedule.from_steps("all_reduce", "star", ranks, 1, [inward, outward])


def run(comm: unisono.Communicator) -> list[float]:
    """On real ranks: inside the engine, and on other backends message by message."""
    numbers = np.array([1.0, 10.0]) * (comm.rank + 1)
    comm.all_reduce(numbers, algorithm="star")
    total = comm.size * (comm.size + 1) / 2
    assert numbers.tolist() == [total, 10 * total], f"the star gave {numbers}, not {total} times"
    return numbers.tolist()


def prove(schedule: Schedule) -> None:
    """It is a correct all_reduce; without rank 3's transfer it is not."""
    verify(schedule)
    first, second = schedule.steps
    steps = [Step.listing(list(first)[:-1]), second]
    try:
        verify(Schedule.from_steps("all_reduce", "star", 4, 1, steps))
    except ScheduleError as error:
        print(f"\nwithout rank 3: {error}")
    else:
        raise AssertionError("the mistake was not found")


def compare(size_bytes: int) -> None:
    ranking = rank_algorithms("all_reduce", 64, size_bytes, PRESETS["h100"])
    for choice in ranking.choices:
        print(f"{size_bytes:>8} bytes  {choice.label:<24} {format_seconds(choice.time_s)}")
    print(explain(ranking))


def main() -> None:
    comm = unisono.init()
    result = run(comm)
    if comm.rank == 0:
        schedule = find("all_reduce", "star").schedule(4)
        print(schedule)
        prove(schedule)
        print(f"\non {comm.size} rank(s) of this machine: {result}")
        print("\nsimulated on 64 GPUs of H100 nodes:")
        for size_bytes in (8, 1 << 20):
            compare(size_bytes)
        print(f"\nits drawing is {len(to_svg(schedule).splitlines())} lines of SVG")
    unisono.shutdown()


if __name__ == "__main__":
    main()
