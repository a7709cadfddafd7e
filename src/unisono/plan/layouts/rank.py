"""All layouts of some ranks that hold a model, the fastest first, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unisono.errors import name_number
from unisono.plan.layouts.calls import Calls
from unisono.plan.layouts.memory import RECOMPUTE, Layout, memory_by_part
from unisono.plan.layouts.model import Model
from unisono.plan.layouts.roofline import check_device
from unisono.plan.layouts.step import StepTime, step_time
from unisono.plan.sizes import format_seconds
from unisono.plan.topology import Topology

_SEQUENCES, _CHUNKS = (1, 2, 4, 8, 16), (1, 2, 4)
"""What a ranking tries: sequences in a micro-batch, chunks of a stage."""


@dataclass(frozen=True)
class LayoutChoice:
    """A `layout` with its `step`, and the bytes that its fullest rank needs, by part (`memory`)."""

    layout: Layout
    step: StepTime
    memory: Mapping[str, float]

    @property
    def memory_bytes(self) -> float:
        """All parts together."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class LayoutRanking:
    """The layouts of `model` on `ranks` ranks of `cluster` for a step of `batch` sequences:
    `choices` that fit, the fastest first; `left_out`, the sentence for each that would not fit into
    memory, the smallest first. See also `rank_layouts`.

    >>> from unisono import plan
    >>> from unisono.plan import layouts
    >>> model = layouts.Model(layers=2, width=64, heads=4, positions=32, vocabulary=128)
    >>> ranking = layouts.rank_layouts(model, plan.find_topology("h100"), ranks=2, batch=4)
    >>> ranking.best is ranking.choices[0] is ranking.best_of_axes()[0]
    True
    """

    model: Model
    cluster: Topology
    ranks: int
    batch: int
    choices: tuple[LayoutChoice, ...]
    left_out: tuple[tuple[Layout, str], ...]

    def best_of_axes(self) -> list[LayoutChoice]:
        """The fastest choice for each tp x cp x pp x dp x ep, the fastest first."""
        found: dict[str, LayoutChoice] = {}
        for choice in self.choices:
            found.setdefault(choice.layout.label, choice)
        return list(found.values())

    @property
    def best(self) -> LayoutChoice:
        """The fastest."""
        return self.choices[0]


def rank_layouts(
    model: Model,
    cluster: Topology,
    ranks: int,
    batch: int,
    fixed: Mapping[str, int | str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> LayoutRanking:
    """Every layout of `ranks` ranks of `cluster` that holds `model`, by the time of a step with a
    global `batch` of sequences.

    `fixed` has fields of `Layout` that must have a value. Without it, tp stays inside a node, a
    micro-batch has 1 to 16 sequences, a stage 1, 2 or 4 chunks, and backward computes again only
    what memory demands. `say` is told what is done next. Raises ValueError if no layout fits, with
    the reason; the topology must describe its devices.

    >>> from unisono import plan
    >>> from unisono.plan import layouts
    >>> model = layouts.Model(layers=32, width=4096, heads=32, positions=4096, vocabulary=32000)
    >>> ranking = layouts.rank_layouts(model, plan.find_topology("h100"), ranks=16, batch=64)
    >>> ranking.best.layout.ranks, ranking.best.memory_bytes < 80e9
    (16, True)
    """
    check_device(cluster)
    if ranks < 1 or batch < 1:
        raise ValueError(f"ranks and batch must be at least 1, not {ranks} and {batch}")
    if 0 < cluster.devices < ranks:
        raise ValueError(f"{cluster.name} has {cluster.devices} devices, not {ranks}")
    fixed = dict(fixed or {})
    Layout(**fixed)  # type: ignore[arg-type]
    ways = RECOMPUTE if model.plain_attention else ("none", "full")
    calls, choices, reasons = Calls(cluster), [], dict[str, None]()
    too_large: list[tuple[float, Layout, str]] = []
    has = f"of {cluster.memory_bytes / 1e9:.0f} on {name_number(ranks, 'rank')}"
    for number, layout in enumerate(_candidates(model, cluster, ranks, batch, fixed)):
        if number % 500 == 0:
            say(f"{number:,} layouts, {layout.label}")
        misfit = layout.misfit(model, batch)
        if misfit:
            reasons[misfit] = None
            continue
        for recompute in [fixed["recompute"]] if "recompute" in fixed else ways:
            layout = dataclasses.replace(layout, recompute=str(recompute))
            memory = memory_by_part(model, layout, batch)
            if sum(memory.values()) <= cluster.memory_bytes:
                step = step_time(model, layout, batch, cluster, calls)
                choices.append(LayoutChoice(layout, step, memory))
                break
        else:
            need, (part, most) = sum(memory.values()), max(memory.items(), key=lambda item: item[1])
            why = (
                f"needs {need / 1e9:.1f} GB {has}; the largest part is {part}, {most / 1e9:.1f} GB"
            )
            too_large.append((need, layout, why))
    too_large.sort(key=lambda each: each[0])
    if not choices:
        why = f"the smallest, {too_large[0][1].label}, {too_large[0][2]}" if too_large else (
            next(iter(reasons), f"{ranks} ranks cannot be divided so"))  # fmt: skip
        raise ValueError(f"no layout of {ranks} ranks fits: {why}")
    choices.sort(key=lambda each: (each.step.time_s, each.memory_bytes))
    left_out = tuple((layout, why) for _, layout, why in too_large)
    return LayoutRanking(model, cluster, ranks, batch, tuple(choices), left_out)


def _candidates(
    model: Model, cluster: Topology, ranks: int, batch: int, fixed: Mapping[str, int | str]
) -> Iterator[Layout]:
    """Every layout of so many ranks, without recomputation; those of fixed axes even if they do
    not fit the model."""
    limits = {
        "tp": min(cluster.node_size, model.heads),
        "cp": model.positions,
        "pp": model.layers,
        "ep": max(1, model.experts),
    }

    def sizes(axis: str, left: int) -> Sequence[int]:
        if axis in fixed:
            return [int(fixed[axis])] if left % int(fixed[axis]) == 0 else []
        return [size for size in range(1, min(left, limits[axis]) + 1) if left % size == 0]

    for tp in sizes("tp", ranks):
        for ep in sizes("ep", ranks // tp):
            for pp in sizes("pp", ranks // tp // ep):
                for cp in sizes("cp", ranks // tp // ep // pp):
                    dp = ranks // (tp * ep * pp * cp)
                    if fixed.get("dp", dp) == dp:
                        axes = Layout(tp=tp, ep=ep, pp=pp, cp=cp, dp=dp)
                        fits = not axes.misfit(model, batch)
                        yield from _variants(axes, batch, fixed) if fits else [axes]


def _variants(axes: Layout, batch: int, fixed: Mapping[str, int | str]) -> Iterator[Layout]:
    mine = batch // (axes.dp * axes.ep)
    counts = [mine // size for size in _SEQUENCES if mine % size == 0]
    stages = (0, 1, 2, 3) if axes.dp * axes.cp * axes.ep > 1 else (0,)
    chunks = _CHUNKS if axes.pp > 1 else (1,)
    sequence_parallel = bool(fixed.get("sequence_parallel", True))
    for zero in [fixed["zero"]] if "zero" in fixed else stages:
        for count in [fixed["micro_batches"]] if "micro_batches" in fixed else counts:
            for each in [fixed["chunks"]] if "chunks" in fixed else chunks:
                yield dataclasses.replace(
                    axes, zero=int(zero), micro_batches=int(count), chunks=int(each),
                    sequence_parallel=sequence_parallel,
                )  # fmt: skip


def explain_layout(ranking: LayoutRanking) -> str:
    """Why the fastest layout of a `ranking` wins: what its time consists of, and which part of the
    best layout with other axes takes longer. Raises nothing. See also `rank_layouts`.

    >>> from unisono import plan
    >>> from unisono.plan import layouts
    >>> model = layouts.Model(layers=32, width=4096, heads=32, positions=4096, vocabulary=32000)
    >>> ranking = layouts.rank_layouts(model, plan.find_topology("h100"), ranks=16, batch=64)
    >>> "% computing" in layouts.explain_layout(ranking)
    True
    """
    best = ranking.best
    parts = best.step.parts_s()
    largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
    of_step = [(name, time_s / best.step.time_s) for name, time_s in largest]
    shares = ", ".join(f"{share:.0%} {name}" for name, share in of_step if share >= 0.005)
    said = f"{best.layout.label} wins: {shares}."
    others = ranking.best_of_axes()[1:]
    if not others:
        return said + " No layout with other axes fits."
    other = others[0]
    theirs = other.step.parts_s()
    name, more_s = max(
        ((name, time_s - parts[name]) for name, time_s in theirs.items()), key=lambda item: item[1]
    )
    longer = other.step.time_s / best.step.time_s - 1
    return (
        f"{said} The next with other axes, {other.layout.label}, takes {longer:.1%} longer: "
        f"{format_seconds(more_s)} more of {name}."
    )
