"""What can be measured: every collective's sizes and bandwidths, as nccl-tests defines them."""

from collections.abc import Sequence

from unisono.cases.primitives import PRIMITIVES, Primitive

STREAM_MESSAGES = 16
STREAM_BYTES = 64 << 20
"""A stream has this many messages, or fewer if they would exceed this many bytes."""

GRADIENT_LAYERS = 12
BIAS_SHARE = 64
"""A list of gradients: this many layers, each a weight and a bias this many times smaller."""


MAIN = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier")
"""What is measured by default."""

_ORDER = (*MAIN[:4], "reduce", "gather", "scatter", *MAIN[4:])
_VARIANTS = (
    Primitive("ping_pong", is_collective=False),
    Primitive("stream", is_collective=False),
    PRIMITIVES["all_reduce"]._replace(name="all_reduce_async"),
    PRIMITIVES["all_reduce"]._replace(name="gradients"),
)
COLLECTIVES = {name: PRIMITIVES[name] for name in _ORDER} | {each.name: each for each in _VARIANTS}

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")


def item_bytes(dtype: str) -> int:
    digits = "".join(character for character in dtype if character.isdigit())
    return int(digits) // 8


def messages(name: str, nbytes: int) -> int:
    """How many messages, in sequence or at once, make up one call."""
    if name == "ping_pong":
        return 2
    if name == "stream":
        return max(2, min(STREAM_MESSAGES, STREAM_BYTES // max(1, nbytes)))
    return 1


def bandwidths(
    collective: Primitive, size_bytes: int, seconds: float, ranks: int
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
