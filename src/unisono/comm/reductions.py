"""Reductions by name, and which dtypes they are defined for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from unisono.comm.engine.numbers import REDUCTION_NUMBERS, Form

if TYPE_CHECKING:
    from torch.distributed import ReduceOp


class PremulSum:
    """The reduction sum(`factor` * x); the factor must be the same on every rank. See also
    `all_reduce`.

    >>> x = torch.ones(2)
    >>> unisono.all_reduce(x, unisono.PremulSum(0.5))
    tensor([1., 1.])
    """

    # No dataclass: making one takes a millisecond at the start of every process.

    def __init__(self, factor: float) -> None:
        self.factor: Final = factor

    def __eq__(self, other: object) -> bool:
        return self.factor == other.factor if isinstance(other, PremulSum) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.factor)

    def __repr__(self) -> str:
        return f"PremulSum(factor={self.factor!r})"


ReductionName: TypeAlias = Literal[
    "sum", "avg", "mean", "product", "min", "max", "band", "bor", "bxor"
]
NamedReduction: TypeAlias = ReductionName | PremulSum

AnyReduction: TypeAlias = (
    "NamedReduction | Literal['prod'] | ReduceOp | ReduceOp.RedOpType | Reduction"
)
"""What callers pass as `op`: a name, a PremulSum, or torch's."""

REDUCTIONS: tuple[ReductionName, ...] = (
    "sum",
    "avg",
    "product",
    "min",
    "max",
    "band",
    "bor",
    "bxor",
)
"""The names of the reductions; `PremulSum(factor)` is the ninth, "mean" an alias of "avg"."""


REDUCTION_NAMES = (*REDUCTIONS, "premul_sum", "avg")
"""By the engine's number. The last one is TRUNCATED_AVG, which errors call an average."""


FORM_SHIFT, WIRE_SHIFT = 4, 2
"""The engine's number of a reduction has its form above so many bits, and the form has the number
of its wire format above so many."""

WireFormat: TypeAlias = Literal["int8", "fp8", "bfloat16"]
WIRES: tuple[WireFormat, ...] = ("int8", "fp8", "bfloat16")
"""From 1 on, as in csrc/unisono.h."""


def describe_reduction(number: int) -> str:
    """A reduction as ranks have posted it, with its form: "reproducible sum"."""
    form = number >> FORM_SHIFT
    name = REDUCTION_NAMES[number & (1 << FORM_SHIFT) - 1]
    if form >> WIRE_SHIFT:
        return f"{name}, wire {WIRES[(form >> WIRE_SHIFT) - 1]}"
    if form & Form.CONTRIBUTIONS:
        return f"reproducible {name} of listed contributions"
    return f"reproducible {name}" if form & Form.REPRODUCIBLE else name


class Reduction:
    """A reduction as transports take it: the engine's number, and a factor."""

    __slots__ = ("factor", "name", "number")

    def __init__(self, name: str, factor: float = 1.0) -> None:
        self.name = name
        self.number = REDUCTION_NUMBERS[name]
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reduction):
            return NotImplemented
        return (self.name, self.factor) == (other.name, other.factor)

    def __hash__(self) -> int:
        return hash((self.name, self.factor))

    def __str__(self) -> str:
        return f"premul_sum({self.factor})" if self.name == "premul_sum" else self.name


TRUNCATED_AVG = Reduction("truncated_avg")
"""For the torch backend, only on the engine: "avg", and for integers the sum divided, towards
zero, as in NCCL. Elsewhere a caller who averages integers must decide about fractions."""

_BY_NAME: dict[str, ReductionName] = {name: name for name in REDUCTIONS}
_BY_NAME |= {"mean": "avg", "prod": "product"}


def known_reduction(op: Any) -> NamedReduction | None:
    """What callers pass as `op`, as a name or a PremulSum; None if it is not a reduction. Names
    are case-insensitive. A torch ReduceOp is identified by its name, not its number, which
    depends on the version of torch."""
    if isinstance(op, str):
        return _BY_NAME.get(op.lower())
    if isinstance(op, PremulSum):
        return op
    kind = getattr(op, "op", op)  # a ReduceOp has its type in `op`; it may be that type itself
    name = str(getattr(kind, "name", ""))
    if name == "PREMUL_SUM" and hasattr(op, "__getstate__"):
        state = op.__getstate__()
        return PremulSum(float(state[1])) if isinstance(state, tuple) else None
    return _BY_NAME.get(name.lower())


def has_meaning(op: str, dtype: str) -> bool:
    """Whether a reduction is defined for a dtype, both by name: the rule of csrc/base/reduce.c."""
    if dtype.startswith(("float8", "float4", "bcomplex", "float128", "complex32", "longdouble")):
        return False
    if dtype == "bool":
        return op not in ("avg", "premul_sum", "truncated_avg")
    if "int" in dtype:
        return op != "avg"
    if dtype.startswith("complex"):
        return op in ("sum", "avg", "product", "premul_sum", "truncated_avg")
    return op not in ("band", "bor", "bxor")


def holds(dtype: str, factor: float) -> bool:
    """Whether a factor can scale numbers of this dtype: integers need a whole number of 64 bits."""
    return "int" not in dtype or (float(factor).is_integer() and -(2**63) <= factor < 2**63)
