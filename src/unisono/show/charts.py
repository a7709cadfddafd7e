"""Charts by matplotlib: whether it is there, how they are drawn and saved."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unisono.output_files import open_at_once

INSTALL = "pip install 'unisono[plot]'"


def is_available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def figure(size: tuple[float, float], style: Any = None) -> Iterator[Any]:
    """A figure to draw in. Text stays text, and the same chart is the same file every time."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # not pyplot, which would start a GUI backend

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "unisono", **(style or {})}):
        yield Figure(figsize=size, layout="constrained")


def save(figure: Any, path: Path, **how: Any) -> None:
    """Write a file, by the suffix of `path`."""
    metadata = {".svg": {"Date": None}, ".png": {"Software": None}}.get(path.suffix)
    with open(path, "wb", opener=open_at_once) as file:
        figure.savefig(file, format=path.suffix[1:], metadata=metadata, **how)
