"""The settings of a run: parsed from the user's text, checked, and the same on every rank."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.bench.backends.base import BACKENDS, Case
from unisono.bench.collectives import COLLECTIVES, DTYPES, MAIN, item_bytes
from unisono.bench.floor import floor_bytes
from unisono.cases.primitives import Primitive
from unisono.errors import name_choices

DEFAULT_SIZES = "8,256,4K,16K,64K,256K,1M,4M,16M,64M"
DEFAULT_SWEEP = "8:256M"
SWEEP_FACTOR = 4
USUAL_BACKENDS = {"cpu": ("unisono", "gloo"), "cuda": ("unisono", "gloo", "nccl")}
DEVICES = tuple(USUAL_BACKENDS)

BUDGET_S = 2.0
DEFAULT_RUN_S = 55.0
"""Seconds for all rows of a run without a budget, if BUDGET_S for each would be more."""
LEAST_BUDGET_S = 0.15
MEMORY_SHARE = 0.9
"""The share of the free memory that a run may use."""

Names = str | Iterable[str] | None
"""Names in a list, or in a text with commas between them."""
Sizes = str | int | Iterable[int | str] | None


@dataclass(frozen=True)
class BenchSettings:
    """Everything that can be chosen. `budget_s` is for one row, all backends together."""

    ranks: int
    collectives: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    backends: tuple[str, ...]
    algorithms: tuple[str, ...] = ()
    device: str = "cpu"
    dtype: str = "float32"
    op: str = "sum"
    root: int | None = None
    floor: bool = True
    budget_s: float = BUDGET_S

    def cases(self, caches_bytes: tuple[int, ...] = ()) -> list[tuple[Case, bool]]:
        """All rows in the order of measuring, each with whether the model is fitted to it."""
        from unisono.plan.predict import calibration_sizes  # it needs NumPy

        found = []
        for name in self.collectives:
            collective = COLLECTIVES[name]
            sizes = self.sizes_bytes if not collective.is_empty else (0,)
            first = calibration_sizes(sizes, caches_bytes)
            others = [size for size in sizes if size not in first]
            # Without other sizes there is nothing to predict, and so nothing to fit.
            found += [(self._case(collective, size), bool(others)) for size in first]
            found += [(self._case(collective, size), False) for size in others]
        return found

    def _case(self, collective: Primitive, size: int) -> Case:
        # Interned, like a name in a program's source: the engine compares such names by address.
        op = sys.intern(self.op)
        roots = tuple(range(self.ranks)) if self.root is None else (self.root,)
        return Case(collective, size, self.dtype, op, roots, self.ranks)

    def memory_bytes(self) -> tuple[int, str]:
        """What the largest row needs on all ranks together, and what that row is: buffers, those of
        the floor, and once more the wide side because gloo and MPI keep copies."""
        from unisono.plan.sizes import format_size

        items = item_bytes(self.dtype)
        needs = []
        for case, _ in self.cases():
            counts = case.collective.counts(case.size_bytes, items, self.ranks)
            sides = [counts.output, counts.input]
            buffers = max(sides) if case.collective.is_in_place else sum(sides)
            each = items * (buffers + max(sides)) + (floor_bytes(case, items) if self.floor else 0)
            what = f"{case.collective.name} of {format_size(case.size_bytes)}B"
            needs.append((each * self.ranks, what))
        return max(needs, default=(0, "nothing"))


def check_settings(
    collectives: Names = None,
    *,
    there: int | None = None,
    sizes: Sizes = None,
    ranks: int | None = None,
    backends: Names = None,
    algo: Names = None,
    device: str = "cpu",
    budget_s: float | None = None,
    **others: Any,
) -> BenchSettings:
    """The settings for a user's arguments; None is the default. `there` is the number of existing
    ranks, if any; `others` are fields of BenchSettings. Raises ValueError, in one sentence, for
    invalid arguments."""
    names = _split(collectives)
    known = tuple(COLLECTIVES)
    (device,) = _known("device", [device], DEVICES)
    if sizes is None or sizes == "":
        sizes = DEFAULT_SWEEP if names else DEFAULT_SIZES
    settings = BenchSettings(
        ranks=_ranks(ranks, there),
        collectives=known if names == ["all"] else _known("collective", names or MAIN, known),
        sizes_bytes=_sizes(sizes),
        backends=_backends(device, backends),
        algorithms=_algorithms(algo),
        device=device,
        **others,
    )
    _check_choices(settings)
    if budget_s is None:  # a run of many rows must not take forever
        budget_s = max(LEAST_BUDGET_S, min(BUDGET_S, DEFAULT_RUN_S / len(settings.cases())))
    if budget_s <= 0:
        raise ValueError(f"the budget of a row must be more than {budget_s} s")
    _check_device(settings)
    return replace(settings, budget_s=budget_s)


def _split(names: Names) -> list[str]:
    texts = [names] if isinstance(names, str) else list(names or ())
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def _known(what: str, names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise ValueError(f"there is no {what} {name}: choose from {name_choices(known, name)}")
    return tuple(dict.fromkeys(names))


def _algorithms(names: Names) -> tuple[str, ...]:
    if names is None:
        return ()
    from unisono.bench.backends.ours import ENGINES_OWN
    from unisono.plan.catalog import catalog

    known = sorted({algorithm.name for algorithm in catalog()} - {ENGINES_OWN})
    return _known("algorithm", _split(names), [ENGINES_OWN, *known])


def _backends(device: str, names: Names) -> tuple[str, ...]:
    wanted = list(USUAL_BACKENDS[device]) if names is None else _split(names)
    if not wanted:
        raise ValueError(f"backends is empty: choose from {', '.join(BACKENDS)}")
    return _known("backend", wanted, BACKENDS)


def _check_choices(settings: BenchSettings) -> None:
    from unisono.cases.results import REDUCTIONS
    from unisono.comm.reductions import has_meaning

    _known("dtype", [settings.dtype], DTYPES)
    _known("reduction", [settings.op], [*REDUCTIONS])
    if not has_meaning(settings.op, settings.dtype):
        raise ValueError(f"{settings.op} is not defined for {settings.dtype}")
    if settings.root is not None and not 0 <= settings.root < settings.ranks:
        raise ValueError(f"root {settings.root} is not one of {settings.ranks} ranks")


def _sizes(wanted: str | int | Iterable[int | str]) -> tuple[int, ...]:
    from unisono.plan.sizes import parse_sizes

    texts = [wanted] if isinstance(wanted, (str, int)) else list(wanted)
    try:
        sizes = [size for text in texts for size in parse_sizes(str(text), SWEEP_FACTOR)]
    except ValueError as error:
        raise ValueError(f"sizes: {error}") from error
    if not sizes or min(sizes) < 1:
        raise ValueError("sizes: the smallest size is 1 byte")
    return tuple(sorted(set(sizes)))


def _ranks(asked: int | None, there: int | None) -> int:
    """The existing ranks, or the requested number, or the cores."""
    from unisono.launcher.share import core_count

    if asked is not None and asked < 1:
        raise ValueError(f"cannot measure on {asked} ranks")
    if there is None:
        return asked or max(2, core_count())
    if asked is not None and asked != there:
        raise ValueError(f"this process is one of {there} ranks: leave out the number {asked}")
    return there


def _check_device(settings: BenchSettings) -> None:
    """Raise before anything runs if there is no GPU, or if the largest row does not fit."""
    if settings.device != "cpu":  # the ranks that use a GPU check its memory
        import torch

        if not torch.cuda.is_available():
            raise ValueError("this machine has no CUDA device to measure on")
        return
    from unisono.comm.engine import native
    from unisono.plan.sizes import format_size

    room = MEMORY_SHARE * native.memory_room()
    need, what = settings.memory_bytes()
    if need > room:
        raise ValueError(
            f"{what} on {settings.ranks} ranks needs about {format_size(need)}B of memory, but "
            f"only {format_size(room)}B may be used: choose smaller sizes"
        )
