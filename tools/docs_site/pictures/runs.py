"""All pictures of real runs, by name."""

from __future__ import annotations

from pictures import collectives, levels


def draw_all() -> dict[str, str]:
    """Run what is to be seen and draw it: each picture's HTML by its name."""
    runs = collectives.run_all()
    pictures = {name: collectives.draw(run) for name, run in runs.items()}
    pictures["collectives"] = "\n\n".join(
        f"**{name}** by {run.schedule.algorithm}\n\n{pictures[name]}" for name, run in runs.items()
    )
    pictures["levels"] = levels.draw(levels.measure())
    return pictures
