"""The commit on which a table of the documentation is written, as the table says it."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit() -> str:
    """ "2f57a39f", "2f57a39f with changes" if the package differs from it, or "no commit"."""
    try:
        number = _git("rev-parse", "--short=8", "HEAD")
        return f"{number} with changes" if _git("status", "-s", "src", "csrc") else number
    except (OSError, subprocess.CalledProcessError):
        return "no commit"


def _git(*words: str) -> str:
    command = ["git", "-C", str(Path(__file__).resolve().parents[1]), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
