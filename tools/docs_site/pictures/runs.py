"""All pictures of real runs, by name."""

from __future__ import annotations

from pathlib import Path

from pictures import collectives, hang, levels


def draw_all(source: Path) -> dict[str, str]:
    """Run what is to be seen and draw it: each picture's HTML by its name. Pages that a picture
    leads to are written below `source`."""
    runs = collectives.run_all()
    pictures = {name: collectives.draw(run) for name, run in runs.items()}
    pictures["collectives"] = "\n\n".join(
        f"**{name}** by {run.schedule.algorithm}\n\n{pictures[name]}" for name, run in runs.items()
    )
    pictures["levels"] = levels.draw(levels.measure())
    incident = hang.run()
    pictures["hang"] = hang.draw(incident)
    static = source / "_static"
    static.mkdir(parents=True, exist_ok=True)
    (static / "incident.html").write_text(hang.page(incident), encoding="utf-8")
    (static / "incident.css").write_text(hang.style(), encoding="utf-8")
    return pictures
