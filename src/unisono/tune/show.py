"""The table for people: which way every collective goes at each size, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from unisono.bench.ways import COLLECTIVES, Way, way_of
from unisono.comm import engine
from unisono.comm.tuning import ENGINES_OWN
from unisono.errors import name_number
from unisono.plan.predict import fit
from unisono.plan.sizes import format_size

SIZES = tuple(1 << power for power in (10, 14, 16, 18, 20, 22, 24))


def numbers(group: Mapping[str, Any]) -> Iterator[str]:
    """What differs from the defaults, a line for each number."""
    defaults = default_sizes(group["ranks"], group["crowded"])
    for name, value in group["sizes"].items():
        if value != defaults[name]:
            yield f"{name}: {format_size(value)} in place of {format_size(defaults[name])}"


def default_sizes(ranks: int, crowded: bool) -> dict[str, int]:
    """The numbers of a group that nobody has tuned."""
    return dict(zip(engine.TUNED, engine.default_tuning(ranks, crowded), strict=True))


def heading(group: Mapping[str, Any]) -> str:
    """Which groups it is for, and when that was measured."""
    cores = "more ranks than cores" if group["crowded"] else "a core for each"
    when = f", measured {group['measured_on']}" if "measured_on" in group else ", not measured"
    return f"{name_number(group['ranks'], 'rank')} ({cores}){when}"


def ways(group: Mapping[str, Any]) -> Table:
    """Every collective at each size: its way, the time that was measured beside the one that the
    other sizes let expect, and why it is this way."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("collective", "size", "way", "us", "predicted", "untuned us"):
        table.add_column(title, justify="left" if title in ("collective", "way") else "right")
    table.add_column("why")
    for row in rows(group):
        table.add_row(
            row["collective"],
            format_size(row["size_bytes"]),
            row["way"],
            _number(row["us"]),
            _number(row["predicted_us"]),
            _number(row["untuned_us"]),
            row["why"],
        )
    return table


def rows(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What `ways` shows, as plain values."""
    measured = {(row["collective"], row["size_bytes"]): row for row in group.get("measured", ())}
    keys = list(measured) or [(name, size) for name in COLLECTIVES for size in SIZES]
    found = []
    for collective, size in keys:
        row = measured.get((collective, size), {})
        times_us = {
            other: _taken_us(of_other)
            for (name, other), of_other in measured.items()
            if name == collective and other != size
        }
        found.append(
            {
                "collective": collective,
                "size_bytes": size,
                "way": str(way_of(collective, size, group["ranks"], group["sizes"])),
                "us": _taken_us(row) if row else None,
                "predicted_us": _predicted_us(times_us, size),
                "untuned_us": row.get("untuned_us"),
                "why": _why(group, collective, size, row),
            }
        )
    return found


def _taken_us(row: Mapping[str, Any]) -> float:
    return float(row.get("tuned_us", row["untuned_us"]))


def _predicted_us(times_us: Mapping[int, float], size: int) -> float | None:
    """By the alpha-beta model through the other sizes; none beyond them."""
    if not times_us or not min(times_us) <= size <= max(times_us):
        return None
    return fit({size: us / 1e6 for size, us in times_us.items()}).predict_s(size) * 1e6


def _why(group: Mapping[str, Any], collective: str, size: int, row: Mapping[str, Any]) -> str:
    defaults = default_sizes(group["ranks"], group["crowded"])
    untuned = way_of(collective, size, group["ranks"], defaults)
    if "ratio" in row:
        why = f"{row['ratio']:.2f} of untuned ({untuned})"
    else:
        why = _why_default(group.get("tried", {}), collective, size, untuned)
    for key, title in (("algorithms", "auto"), ("algorithms_reordered", "auto, reordered")):
        name = _algorithm(group.get(key, {}), collective, size)
        if name != ENGINES_OWN:
            why += f"; {title}: {name}{_share(row, name)}"
    return why


def _why_default(
    tried: Mapping[str, Mapping[str, float]], collective: str, size: int, way: Way
) -> str:
    """How the ways that were not taken compare with the default."""
    if way.kind in ("flat", "cut") and str(size) in tried.get("cut_from", {}):
        return f"default: cut takes {tried['cut_from'][str(size)]:.2f} of flat"
    others = tried.get(f"{collective}_turn", {})
    if way.kind == "post" or way.turns == 1 or not others:
        return "default"
    listed = ", ".join(f"of {format_size(int(turn))} {others[turn]:.2f}" for turn in others)
    return f"default: turns {listed} of its time"


def _share(row: Mapping[str, Any], name: str) -> str:
    times_us = row.get("by_algorithm_us", {})
    if name not in times_us or ENGINES_OWN not in times_us:
        return ""
    return f" at {times_us[name] / times_us[ENGINES_OWN]:.2f} of it"


def _algorithm(steps: Mapping[str, Any], collective: str, size: int) -> str:
    found = ENGINES_OWN
    for step in steps.get(collective, ()):
        if size >= step["from_bytes"]:
            found = step["algorithm"]
    return found


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
