"""A page that plays for every algorithm, and the frames in which other pages show them."""

from __future__ import annotations

from html import escape
from itertools import groupby
from pathlib import Path

from unisono.plan.player import write_catalog

_RANKS = 8
_HEIGHT_PX = 880


def write_all(source: Path) -> dict[str, str]:
    """Write the pages; returns a picture "players": a frame for each algorithm, by collective."""
    folder = source / "_static/players"
    entries = [(entry, path.name) for entry, path in write_catalog(folder, _RANKS)]
    lines = []
    for collective, group in groupby(entries, key=lambda found: found[0].collective):
        lines.append(f"### {collective}\n")
        for entry, file in group:
            title = f"{collective} by {entry.name}"
            lines.append(
                f'<details class="player"><summary>{escape(entry.name)} '
                f'<a href="_static/players/{escape(file)}">alone</a></summary>'
                f'<iframe title="{escape(title)}" src="_static/players/{escape(file)}" '
                f'loading="lazy" height="{_HEIGHT_PX}"></iframe></details>\n'
            )
    return {"players": "\n".join(lines)}
