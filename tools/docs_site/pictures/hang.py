"""A rank that never comes: the program of docs/tutorial.md, under the watch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

from sources import BadSource

from unisono.doctor.saved_reports import Reading, draw_ranks, incident_page, read

ROOT = Path(__file__).resolve().parents[3]
_ATTEMPTS = 3
"""On a busy machine the ranks may not even meet within the seconds that the program gives them."""
_PROGRAM = re.compile(r"<!-- file: late\.py -->\n+```python\n(.*?)^```", re.M | re.S)


def run() -> Reading:
    """The incident, as the ranks of the program have saved it."""
    found = _PROGRAM.search((ROOT / "docs/tutorial.md").read_text())
    if found is None:
        raise BadSource("docs/tutorial.md has no program late.py")
    with tempfile.TemporaryDirectory(prefix="unisono-docs-") as name:
        folder = Path(name)
        (folder / "late.py").write_text(found[1])
        environment = os.environ | {
            "UNISONO_WATCH_FOLDER": str(folder / "reports"),
            "UNISONO_WATCH_HANG_S": "1",
        }
        for _ in range(_ATTEMPTS):
            done = subprocess.run(
                [sys.executable, "-m", "unisono", "run", "--watch", "-n", "4", "late.py"],
                cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
                check=False,
            )  # fmt: skip
            reading = read(sorted((folder / "reports").glob("*.json")))
            if reading.incidents:
                return reading
        raise BadSource(f"late.py of docs/tutorial.md has saved no report; it wrote\n{done.stderr}")


def draw(reading: Reading) -> str:
    """The ranks of the incident: who waits, and for whom."""
    return f'<div class="incident">{draw_ranks(reading.incidents[0].report)}</div>'


def page(reading: Reading) -> str:
    """The page that `unisono doctor --html` writes."""
    return incident_page(reading)


def style() -> str:
    """What the table looks like, as on that page."""
    sheet = resources.files("unisono.show").joinpath("assets/incident.css").read_text()
    return "".join(line for line in sheet.splitlines(True) if ".ranks" in line or ".blamed" in line)
