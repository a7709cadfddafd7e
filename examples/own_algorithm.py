"""An algorithm of one's own: written as data, then proven, compared and drawn.

    python examples/own_algorithm.py
    unisono run -n 4 examples/own_algorithm.py

All-reduce in a star: everybody sends to rank 0, which adds and sends back. It needs two steps only,
and everything passes one rank.
"""

from __future__ import annotations

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


@algorithm("all_reduce", "star", steps="2", sends="n - 1", source="this example")
def star(ranks: int) -> Schedule:
    """Every rank ends with the sum of all."""
    inward = [(rank, 0, 0, "reduce") for rank in range(1, ranks)]
    outward = [(0, rank, 0, "copy") for rank in range(1, ranks)]
    return Schedule.from_steps("all_reduce", "star", ranks, 1, [inward, outward])


def main() -> None:
    schedule = find("all_reduce", "star").schedule(4)
    verify(schedule)
    print(schedule)

    # A mistake, as it would be found: rank 3 is forgotten on the way in.
    first, second = schedule.steps
    steps = [Step.listing(list(first)[:-1]), second]
    forgetful = Schedule.from_steps("all_reduce", "star", 4, 1, steps)
    try:
        verify(forgetful)
    except ScheduleError as error:
        print(f"\nwithout rank 3: {error}")

    print("\nsimulated on 64 GPUs of H100 nodes:")
    for size in (8, 1 << 20):
        ranking = rank_algorithms("all_reduce", 64, size, PRESETS["h100"])
        for choice in ranking.choices:
            print(f"{size:>8} bytes  {choice.label:<24} {format_seconds(choice.time_s)}")
        print(explain(ranking))

    print(f"\nits drawing is {len(to_svg(schedule).splitlines())} lines of SVG")


if __name__ == "__main__":
    main()
