"""The expected result of a collective, computed from every rank's inputs with NumPy and torch.

Inputs depend only on (seed, rank), so each rank can compute those of all others. Reductions are
done here in the plain way: one whole array after another, in rank order, in the accumulator's type,
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any

import numpy
import torch

import unisono
from unisono import PremulSum
from unisono.comm.communicator import Communicator

SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
INTEGERS = (*SIGNED, *UNSIGNED)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEXES = (torch.complex64, torch.complex128)
REDUCIBLE = (*INTEGERS, torch.bool, *FLOATS, *COMPLEXES)
OPS = ("sum", "avg", "mean", "product", "min", "max", "band", "bor", "bxor")

_HALVES = (torch.float16, torch.bfloat16)
_PERIOD = 65_537  # prime, so that no cut of a large tensor aligns with the period


def meaningful(dtype: torch.dtype, op: str | PremulSum) -> bool:
    """Whether this reduction is supported for this type."""
    if dtype not in REDUCIBLE:
        return False
    if op in ("avg", "mean"):
        return dtype in FLOATS + COMPLEXES
    if op in ("band", "bor", "bxor"):
        return dtype in (*INTEGERS, torch.bool)
    if op in ("min", "max"):
        return dtype not in COMPLEXES
    if isinstance(op, PremulSum):
        if dtype in INTEGERS:
            return op.factor == int(op.factor)
        return dtype is not torch.bool
    return True


def gloo_has(dtype: torch.dtype, op: str | PremulSum) -> bool:
    """Whether gloo supports a reduction that is defined; others are rejected."""
    if dtype in COMPLEXES:
        return op in ("sum", "avg", "mean")
    return (
        dtype not in (torch.int16, torch.uint16, torch.uint32, torch.uint64)
        and not isinstance(op, PremulSum)
        and (dtype, op) != (torch.bool, "sum")
    )


def promised(comm: Communicator, dtype: torch.dtype, op: str | PremulSum) -> bool:
    """Whether a group guarantees this reduction to the last bit: gloo rounds half types in
    between."""
    on_gloo = comm.backend == "gloo"
    is_half = dtype in (torch.float16, torch.bfloat16)
    return meaningful(dtype, op) and not (on_gloo and (is_half or not gloo_has(dtype, op)))


def values(dtype: torch.dtype, count: int, seed: int, rank: int) -> torch.Tensor:
    """Rank `rank`'s input: `count` elements from the type's whole range."""
    return copy_of(_values(dtype, count, seed, rank))


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a row, also of types that torch itself cannot copy."""
    return tensor.view(torch.uint8).clone().view(tensor.dtype)


def inputs(size: int, dtype: torch.dtype, count: int, seed: int = 0) -> list[torch.Tensor]:
    """The inputs of all ranks of a group; they are cached: clone them before you write."""
    return [_values(dtype, count, seed, rank) for rank in range(size)]


@lru_cache(maxsize=48)
def _values(dtype: torch.dtype, count: int, seed: int, rank: int) -> torch.Tensor:
    if not count:
        return torch.empty(0, dtype=dtype)
    random = numpy.random.default_rng([seed, rank, dtype.itemsize])
    made = min(count, _PERIOD)
    if dtype is torch.bool:
        block = torch.from_numpy(random.random(made) < 0.7)
    elif dtype in INTEGERS:
        block = torch.from_numpy(random.integers(0, 256, made * dtype.itemsize, numpy.uint8))
        block = block.view(dtype)
    elif dtype in COMPLEXES:
        part = torch.float32 if dtype is torch.complex64 else torch.float64
        block = torch.view_as_complex(_reals(random, 2 * made).to(part).reshape(made, 2))
    elif dtype in FLOATS:
        block = _reals(random, made).to(dtype)
    else:  # a type that is only moved: any bytes are valid
        raw = random.integers(0, 256, made * dtype.itemsize, numpy.uint8)
        block = torch.from_numpy(raw).view(dtype)
    if made == count:
        return block
    repeats = -(-count // made)
    raw = block.view(torch.uint8).repeat(repeats)[: count * dtype.itemsize]
    return raw.view(dtype).clone()


def _reals(random: numpy.random.Generator, count: int) -> torch.Tensor:
    """Magnitudes that differ enough for the order of a sum to show."""
    sizes = numpy.exp2(random.integers(-6, 7, count))
    return torch.from_numpy(random.standard_normal(count) * sizes)


placement = ""
"""The hosts of a world's ranks, a letter each: a group over hosts adds inside each host first, then
hosts by lowest rank."""


def _fold(two: Callable[[Any, Any], Any], rows: list[Any]) -> Any:
    if len(rows) != len(placement):
        return reduce(two, rows)
    hosts = dict.fromkeys(placement)
    return reduce(
        two,
        [
            reduce(two, [row for row, where in zip(rows, placement, strict=True) if where == host])
            for host in hosts
        ],
    )


def reduced(inputs: list[torch.Tensor], op: str | PremulSum) -> torch.Tensor:
    """The inputs of all ranks, combined in rank order, or host by host."""
    dtype = inputs[0].dtype
    if not inputs[0].numel():
        return inputs[0].clone()
    if dtype is torch.bool:
        return torch.from_numpy(_combine_bools([row.numpy() for row in inputs], str(op)))
    if dtype in COMPLEXES and op != "product":  # they add and scale as pairs of reals
        pairs = [torch.view_as_real(row.contiguous()) for row in inputs]
        return torch.view_as_complex(reduced(pairs, op))
    if dtype in COMPLEXES:
        return _fold(_multiply_complex, inputs)
    wide = [row.float() if dtype in _HALVES else row for row in inputs]
    arrays = [row.numpy() for row in wide]
    if isinstance(op, PremulSum):
        factor = _factor(op.factor, arrays[0].dtype)
        with numpy.errstate(over="ignore"):
            arrays = [array * factor for array in arrays]
    result = _combine(arrays, "sum" if isinstance(op, PremulSum) else op)
    return torch.from_numpy(numpy.asarray(result)).to(dtype)


def after(
    collective: str, inputs: list[torch.Tensor], rank: int, root: int = 0
) -> torch.Tensor | None:
    """What a rank has after a collective (sum) of the inputs of all; None: no output."""
    length = len(inputs[rank]) // len(inputs)
    mine, is_root = slice(rank * length, (rank + 1) * length), rank == root
    return {
        "all_reduce": lambda: reduced(inputs, "sum"),
        "reduce": lambda: reduced(inputs, "sum") if is_root else inputs[rank],
        "reduce_scatter": lambda: reduced(inputs, "sum")[mine],
        "broadcast": lambda: inputs[root],
        "scatter": lambda: inputs[root][mine],
        "all_gather": lambda: torch.cat(inputs),
        "gather": lambda: torch.cat(inputs) if is_root else None,
        "all_to_all": lambda: torch.cat([row[mine] for row in inputs]),
    }[collective]()


def _factor(factor: float, dtype: numpy.dtype[Any]) -> Any:
    if dtype.kind in "iu":
        return numpy.array(int(factor), numpy.int64).astype(dtype)
    return dtype.type(factor)


def _combine(arrays: list[Any], op: str) -> Any:
    two = {
        "sum": numpy.add,
        "avg": numpy.add,
        "mean": numpy.add,
        "product": numpy.multiply,
        "min": lambda a, b: numpy.where((b < a) | (b != b), b, a),
        "max": lambda a, b: numpy.where((b > a) | (b != b), b, a),
        "band": numpy.bitwise_and,
        "bor": numpy.bitwise_or,
        "bxor": numpy.bitwise_xor,
    }[op]
    with numpy.errstate(all="ignore"):
        result = _fold(two, arrays)
        if op in ("avg", "mean"):
            result = result / arrays[0].dtype.type(len(arrays))
    return result


def _combine_bools(arrays: list[Any], op: str) -> Any:
    stacked = numpy.stack(arrays)
    if op in ("sum", "max", "bor"):
        return stacked.any(axis=0)
    if op in ("product", "min", "band"):
        return stacked.all(axis=0)
    return stacked.sum(axis=0) % 2 == 1


def _multiply_complex(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    real = a.real * b.real - a.imag * b.imag
    imag = a.real * b.imag + a.imag * b.real
    return torch.complex(real, imag)


def raw(tensor: Any) -> numpy.ndarray[Any, Any]:
    """The bytes of a tensor's elements, in order."""
    tensor = _as_tensor(tensor)
    if not tensor.numel():
        return numpy.empty(0, numpy.uint8)
    row = tensor.detach().contiguous().flatten()
    return row.as_strided(row.shape, (1,)).view(torch.uint8).numpy()  # any stride, for one element


def _as_tensor(given: Any) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given
    return torch.from_numpy(numpy.ascontiguousarray(given))


def assert_same(actual: Any, expected: Any, what: object = "") -> None:
    """Equal in type, shape and every bit, except that any NaN equals any other."""
    actual, expected = _as_tensor(actual), _as_tensor(expected)
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, not {expected.shape}"
    if numpy.array_equal(raw(actual), raw(expected)):
        return
    ours, theirs = actual.detach().flatten(), expected.detach().flatten()
    if actual.dtype in COMPLEXES:
        assert_same(torch.view_as_real(ours), torch.view_as_real(theirs), what)
        return
    size = actual.dtype.itemsize
    differ = (raw(ours).reshape(-1, size) != raw(theirs).reshape(-1, size)).any(axis=1)
    if actual.dtype in FLOATS:
        differ &= ~(torch.isnan(ours) & torch.isnan(theirs)).numpy()
    indices = numpy.flatnonzero(differ)
    assert not len(indices), (
        f"{what}: {len(indices)} of {len(differ)} elements differ, the first at {indices[0]}: "
        f"{ours[indices[0]]} and not {theirs[indices[0]]}"
    )


def assert_reduced(
    comm: Communicator, actual: Any, expected: torch.Tensor, what: object = ""
) -> None:
    """The same bits, except for the order in which another library adds floats."""
    actual, expected = _as_tensor(actual), _as_tensor(expected)
    if comm.backend == "unisono" or comm.size < 3 or expected.dtype not in FLOATS + COMPLEXES:
        assert_same(actual, expected, what)
        return
    steps = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.complex64: 1e-3}
    torch.testing.assert_close(
        actual,
        expected,
        rtol=steps.get(expected.dtype, 1e-10),
        atol=1e-3,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def movable_dtypes() -> list[torch.dtype]:
    """Every dtype of torch with plain tensors of whole bytes, except bcomplex32, which DLPack does
    not have."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    named = {str(dtype).removeprefix("torch."): dtype for dtype in found}
    return [
        dtype
        for name, dtype in sorted(named.items())
        if not name.startswith(("bits", "qint", "quint", "bcomplex"))
    ]


def parts_of(tensor: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    """A separate contiguous piece for each count."""
    assert tensor.numel() == sum(counts)
    return [piece.clone() for piece in torch.split(tensor, counts)]


def doubles(seed: int, *shape: int) -> torch.Tensor:
    """Normal random numbers, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


Function = Callable[..., torch.Tensor]
# Functions of sharded tensors, and torch's of whole ones.
SPREAD: dict[str, tuple[Function, Function]] = {  # results have the shape of the shard
    "softmax": (unisono.math.softmax, torch.softmax),
    "log_softmax": (unisono.math.log_softmax, torch.log_softmax),
    "normalize": (unisono.math.normalize, lambda x, d: torch.nn.functional.normalize(x, dim=d)),
}
REDUCED: dict[str, tuple[Function, Function]] = {  # the results lack dim
    "logsumexp": (unisono.math.logsumexp, torch.logsumexp),
    "l2_norm": (unisono.math.l2_norm, lambda x, d: torch.linalg.vector_norm(x, dim=d)),
    "mean": (unisono.math.mean, torch.mean),
    "variance": (unisono.math.variance, torch.var),
}
