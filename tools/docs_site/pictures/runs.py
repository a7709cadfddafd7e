"""All pictures by name: of the course, and of real runs."""

from __future__ import annotations

from pathlib import Path

from pictures import hang, levels
from unisono.learn import pictures as collectives
from unisono.show.pages import asset


def draw_all(source: Path) -> dict[str, str]:
    """Run what is to be seen and draw it: each picture's HTML by its name. Pages that a picture
    leads to are written below `source`."""
    pictures = {name: collectives.as_svg(name) for name in collectives.ALGORITHMS}
    pictures["collectives"] = "\n\n".join(
        f"**{name}** by {algorithm}\n\n{pictures[name]}"
        for name, algorithm in collectives.ALGORITHMS.items()
    )
    pictures["levels"] = levels.draw(levels.measure())
    incident = hang.run()
    pictures["hang"] = hang.draw(incident)
    static = source / "_static"
    static.mkdir(parents=True, exist_ok=True)
    (static / "incident.html").write_text(hang.page(incident), encoding="utf-8")
    (static / "picture.css").write_text(asset("picture.css"), encoding="utf-8")
    (static / "incident.css").write_text(hang.style(), encoding="utf-8")
    return pictures
