"""A page that plays for every algorithm, and the frames in which other pages show them."""

from __future__ import annotations

from html import escape
from itertools import groupby
from pathlib import Path

from unisono.plan import PRESETS, Algorithm, catalog
from unisono.plan.player import schedule_page

_RANKS, _FEW = 8, 4
_OVER_HOSTS = ("hierarchical", "lanes", "mates", "nccl_tree", "ring_2d")
_TELL_HEIGHT = (
    "<script>if (parent !== window) new ResizeObserver(() => parent.postMessage("
    "{ playerHeight: document.documentElement.offsetHeight }, '*')).observe(document.body);"
    "</script>"
)
"""For site.js, which makes the frame as high as the page in it."""


def write_all(source: Path) -> dict[str, str]:
    """Write the pages. Returns three kinds of pictures: "player-COLLECTIVE-ALGORITHM", a closed
    frame with 8 ranks; "player-COLLECTIVE-ALGORITHM-4", with 4; "plays-COLLECTIVE-ALGORITHM-4", or
    -8, an open one that plays. And "players": all of the first kind, by collective."""
    folder = source / "_static/players"
    folder.mkdir(parents=True, exist_ok=True)
    lines, pictures = [], {}
    for collective, group in groupby(catalog(), key=lambda entry: entry.collective):
        lines.append(f"### {collective}\n")
        for entry in group:
            name = f"{collective}-{entry.name}"
            for ranks in (_FEW, _RANKS):
                file = f"{name}-{ranks}.html"
                (folder / file).write_text(_page(entry, ranks), encoding="utf-8")
                title = f"{collective} by {entry.name}"
                pictures[f"player-{name}-{ranks}"] = _frame(title, file, is_open=False)
                pictures[f"plays-{name}-{ranks}"] = _frame(title, file, is_open=True)
            pictures[f"player-{name}"] = pictures[f"player-{name}-{_RANKS}"]
            lines.append(pictures[f"player-{name}"])
    return {**pictures, "players": "\n".join(lines)}


def _frame(title: str, file: str, *, is_open: bool) -> str:
    """A frame, with a link to the page in it."""
    address, words = f"_static/players/{escape(file)}", escape(title)
    opened, begins = (" open", "#play") if is_open else ("", "#frame")
    return (
        f'<details class="player"{opened}><summary>{words}, step by step '
        f'<a href="{address}">(full page)</a></summary>'
        f'<iframe title="{words}" src="{address}{begins}" loading="lazy"></iframe></details>\n'
    )


def _page(entry: Algorithm, ranks: int) -> str:
    topology = PRESETS["h100"]
    if entry.name in _OVER_HOSTS:
        topology = topology.with_nodes_of(ranks // 2)
    schedule = entry.schedule(ranks, node_size=ranks // 2, pieces=4 if ranks > _FEW else 1)
    return schedule_page(schedule, topology).replace("</body>", f"{_TELL_HEIGHT}</body>")
