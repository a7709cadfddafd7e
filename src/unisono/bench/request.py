"""What is asked of a run, by the command or by a program, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from unisono.bench.settings import BenchSettings

DEFAULT_SIZES = "8,256,4K,16K,64K,256K,1M,4M,16M,64M"
DEFAULT_SWEEP = "8:256M"
SWEEP_FACTOR = 4
USUAL_BACKENDS = {"cpu": ("unisono", "gloo"), "cuda": ("unisono", "gloo", "nccl")}
DEVICES = tuple(USUAL_BACKENDS)
MEMORY_SHARE = 0.9
"""The share of the free memory that a run may use."""

Names = str | Iterable[str] | None
"""Names in a list, or in a text with commas between them."""
Sizes = str | int | Iterable[int | str] | None


class RequestOptions(TypedDict, total=False):
    """What a program may ask for, beside the collectives."""

    sizes: Sizes
    ranks: int | None
    backends: Names
    algo: Names
    device: str
    dtype: str
    op: str
    root: int | None
    place: str
    over: str
    budget_s: float | None
    mpi_spins: bool
    floor: bool
    fresh: bool


@dataclass(frozen=True)
class Request:
    """As a user writes it; None is the default."""

    collectives: Names = None
    sizes: Sizes = None
    ranks: int | None = None
    backends: Names = None
    algo: Names = None
    device: str = "cpu"
    dtype: str = "float32"
    op: str = "sum"
    root: int | None = None
    place: str = "natural"
    over: str = "max"
    budget_s: float | None = None
    mpi_spins: bool = False
    floor: bool = True
    fresh: bool = False
    factor: int = SWEEP_FACTOR

    def settings(self, there: int | None) -> BenchSettings:
        """What the ranks are told; `there` is how many there are already, if any.

        Raises ValueError, in one sentence, for what cannot be met.
        """
        from unisono.bench.backends.base import BACKENDS
        from unisono.bench.collectives import COLLECTIVES, DTYPES, MAIN
        from unisono.bench.settings import BenchSettings
        from unisono.bench.settings import budget_s as usual_budget_s

        names = _split(self.collectives)
        known = tuple(COLLECTIVES)
        collectives = known if names == ["all"] else _known("collective", names or MAIN, known)
        ranks = _ranks(self.ranks, there)
        sizes = self.sizes
        if sizes is None or sizes == "":
            sizes = DEFAULT_SWEEP if names else DEFAULT_SIZES
        device = _known("device", [self.device], DEVICES)[0]
        backends = list(USUAL_BACKENDS[device]) if self.backends is None else _split(self.backends)
        if not backends:
            raise ValueError(f"backends names none: choose from {', '.join(BACKENDS)}")
        if self.root is not None and not 0 <= self.root < ranks:
            raise ValueError(f"root {self.root} is not a rank: there are {ranks}")
        _known("place", [self.place], ["natural", "in", "out", "both"])
        _known("over", [self.over], ["max", "mean", "min"])
        settings = BenchSettings(
            ranks=ranks,
            collectives=collectives,
            sizes_bytes=_sizes(sizes, self.factor),
            backends=_known("backend", backends, BACKENDS),
            algorithms=_algorithms(self.algo),
            device=device,
            dtype=_known("dtype", [self.dtype], DTYPES)[0],
            op=_meaningful_op(self.op, self.dtype),
            root=self.root,
            placement=self.place,
            over=self.over,
            floor=self.floor,
            mpi_spins=self.mpi_spins,
            fresh=self.fresh,
        )
        cases = settings.cases()
        if not cases:
            where = "in place" if self.place == "in" else "out of place"
            raise ValueError(f"no collective that was asked for works {where}")
        seconds = usual_budget_s(len(cases)) if self.budget_s is None else self.budget_s
        if seconds <= 0:
            raise ValueError(f"a row needs more than {seconds} s")
        if device == "cpu":
            _check_memory(settings)  # a GPU's memory is looked at by the ranks that use it
        else:
            _check_gpu()
        return replace(settings, budget_s=seconds)


def _split(names: Names) -> list[str]:
    texts = [names] if isinstance(names, str) else list(names or ())
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def _known(what: str, names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise ValueError(f"there is no {what} {name}: choose from {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def _algorithms(names: Names) -> tuple[str, ...]:
    if names is None:
        return ()
    from unisono.bench.backends.ours import ENGINES_OWN
    from unisono.plan.catalog import RENAMED, catalog

    known = sorted({algorithm.name for algorithm in catalog()} - {ENGINES_OWN})
    asked = _split(names)
    known += sorted({name for _, name in RENAMED}.intersection(asked))
    return _known("algorithm", asked, [ENGINES_OWN, *known])


def _meaningful_op(op: str, dtype: str) -> str:
    from unisono.comm.base import has_meaning
    from unisono.plan.expectations import REDUCTIONS

    _known("reduction", [op], [*REDUCTIONS])
    if not has_meaning(op, dtype):
        raise ValueError(f"{op} has no meaning for {dtype}")
    return op


def _sizes(wanted: str | int | Iterable[int | str], factor: int) -> tuple[int, ...]:
    from unisono.plan.sizes import parse_sizes

    texts = [wanted] if isinstance(wanted, (str, int)) else list(wanted)
    try:
        sizes = [size for text in texts for size in parse_sizes(str(text), factor)]
    except ValueError as error:
        raise ValueError(f"sizes: {error}") from error
    if not sizes or min(sizes) < 1:
        raise ValueError("sizes: the smallest size is 1 byte")
    return tuple(sorted(set(sizes)))


def _ranks(asked: int | None, there: int | None) -> int:
    """As many as there are already, or were asked for, or cores."""
    from unisono.launcher.share import core_count

    if asked is not None and asked < 1:
        raise ValueError(f"{asked} ranks measure nothing")
    if there is None:
        return asked or max(2, core_count())
    if asked is not None and asked != there:
        raise ValueError(
            f"this process is one of {there} ranks already: leave the number {asked} out"
        )
    return there


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here to measure on")


def _check_memory(settings: BenchSettings) -> None:
    """Say before anything runs that the largest row does not fit."""
    from unisono.bench.machine import free_bytes
    from unisono.plan.sizes import format_size

    room = free_bytes()
    need, what = settings.memory_bytes()
    if room is not None and need > MEMORY_SHARE * room:
        raise ValueError(
            f"{what} on {settings.ranks} ranks needs about {format_size(need)}B of memory, and "
            f"{format_size(MEMORY_SHARE * room)}B may be used: choose smaller sizes"
        )
