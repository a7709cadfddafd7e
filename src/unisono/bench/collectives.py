"""What can be measured: every collective's sizes and bandwidths, as nccl-tests defines them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

STREAM_MESSAGES = 16
STREAM_BYTES = 64 << 20
"""A stream has this many messages, or fewer if they would exceed this many bytes."""

GRADIENT_LAYERS = 12
BIAS_SHARE = 64
"""A list of gradients: this many layers, each a weight and a bias this many times smaller."""


@dataclass(frozen=True)
class Collective:
    """`wide` says which sides hold a part for each rank: "output", "input" or both. `factor` turns
    algbw into busbw. `in_place` is as in torch's call."""

    name: str
    factor: Literal["2(n-1)/n", "(n-1)/n", "1", "0"]
    wide: tuple[str, ...] = ()
    reduces: bool = False
    rooted: bool = False
    in_place: bool = False
    sized: bool = True
    pairwise: bool = False

    def bus_factor(self, ranks: int) -> Fraction:
        """busbw / algbw, as in nccl-tests' PERFORMANCE.md."""
        if self.factor == "2(n-1)/n":
            return Fraction(2 * (ranks - 1), ranks)
        if self.factor == "(n-1)/n":
            return Fraction(ranks - 1, ranks)
        return Fraction(int(self.factor))

    def counts(self, nbytes: int, item_bytes: int, ranks: int) -> Counts:
        """The elements on each side for a size of `nbytes`: the wide side has that size."""
        if not self.sized:
            return Counts(0, 0, 0)
        whole = max(1, nbytes // item_bytes)
        if not self.wide:
            return Counts(whole, whole, whole)
        part = max(1, whole // ranks)
        output = part * ranks if "output" in self.wide else part
        input = part * ranks if "input" in self.wide else part
        return Counts(part * ranks, output, input)

    def messages(self, nbytes: int) -> int:
        """How many messages, in sequence or at once, make up one call."""
        if self.name == "ping_pong":
            return 2
        if self.name == "stream":
            return max(2, min(STREAM_MESSAGES, STREAM_BYTES // max(1, nbytes)))
        return 1


@dataclass(frozen=True)
class Counts:
    """Elements: of the size that is shown, of the output and of the input of one rank."""

    size: int
    output: int
    input: int


_ALL = (
    Collective("all_reduce", "2(n-1)/n", reduces=True, in_place=True),
    Collective("all_gather", "(n-1)/n", ("output",)),
    Collective("reduce_scatter", "(n-1)/n", ("input",), reduces=True),
    Collective("broadcast", "1", rooted=True, in_place=True),
    Collective("reduce", "1", reduces=True, rooted=True, in_place=True),
    Collective("gather", "(n-1)/n", ("output",), rooted=True),
    Collective("scatter", "(n-1)/n", ("input",), rooted=True),
    Collective("all_to_all", "(n-1)/n", ("output", "input")),
    Collective("barrier", "0", in_place=True, sized=False),
    Collective("ping_pong", "1", pairwise=True),
    Collective("stream", "1", pairwise=True),
    Collective("all_reduce_async", "2(n-1)/n", reduces=True, in_place=True),
    Collective("gradients", "2(n-1)/n", reduces=True, in_place=True),
)
COLLECTIVES = {collective.name: collective for collective in _ALL}

MAIN = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
"""What is measured by default."""

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")


def item_bytes(dtype: str) -> int:
    digits = "".join(character for character in dtype if character.isdigit())
    return int(digits) // 8


def bandwidths(
    collective: Collective, size_bytes: int, seconds: float, ranks: int
) -> tuple[float, float]:
    """(algbw, busbw) in GB/s, GB = 1e9; (0, 0) if nothing moves."""
    if size_bytes == 0 or seconds <= 0:
        return 0.0, 0.0
    algbw = size_bytes / seconds / 1e9
    return algbw, algbw * float(collective.bus_factor(ranks))


def gradient_counts(count: int) -> Sequence[int]:
    """How `count` elements are spread over a list of gradients."""
    layers = min(GRADIENT_LAYERS, count // 4)
    if layers == 0:
        return [count]
    layer = count // layers
    bias = max(1, layer // BIAS_SHARE)
    counts = [layer - bias, bias] * layers
    counts[0] += count - sum(counts)
    return counts


def neighbour(rank: int, size: int) -> int | None:
    """The partner of a rank for messages: 0 and 1, 2 and 3; a last single rank has none."""
    other = rank ^ 1
    return other if other < size else None
