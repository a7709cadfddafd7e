"""From times to numbers: thresholds, and from which size on which algorithm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.comm.tuning import ENGINES_OWN
from unisono.tune.compare import Times, is_faster

BELOW, ABOVE = "below", "above"
"""The two ways between which a threshold chooses, as candidates."""


def differing_sizes(sizes: Sequence[int], one: int, other: int) -> list[int]:
    """The sizes that two thresholds send different ways."""
    return [size for size in sizes if (size >= one) != (size >= other)]


def is_better_threshold(times: Mapping[int, Times], default: int, other: int) -> bool:
    """Whether the sizes at which two thresholds differ are faster by `other`."""
    ratios, clear = [], []
    for size in differing_sizes(list(times), default, other):
        ways = (ABOVE, BELOW) if size >= other else (BELOW, ABOVE)
        ratios.append(times[size].ratio(*ways))
        clear.append(times[size].is_clear(*ways))
    return is_faster(ratios, clear)


def find_threshold(times: Mapping[int, Times], default: int) -> int | None:
    """The size from which on the way "above" is faster, if that is not where the default has it."""
    sizes = sorted(times)

    def cost(threshold: int) -> float:
        return sum(
            math.log(times[size].us(ABOVE if size >= threshold else BELOW)) for size in sizes
        )

    best = min([*sizes, 2 * sizes[-1]], key=cost)
    return best if is_better_threshold(times, default, best) else None


def algorithm_steps(fastest: Mapping[int, str]) -> list[dict[str, Any]]:
    """From the fastest algorithm at each size that was measured to steps, as the table has them.
    Nothing is said where the engine's own way always is."""
    steps: list[dict[str, Any]] = []
    present = ENGINES_OWN
    for size in sorted(fastest):
        if fastest[size] != present:
            present = fastest[size]
            steps.append({"from_bytes": size, "algorithm": present})
    return steps
