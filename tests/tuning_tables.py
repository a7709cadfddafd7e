"""Tables for tests, as `unisono tune` would write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unisono.comm import engine
from unisono.comm.tuning import FORMAT

SMALL = {
    "cut_from": 2048,
    "direct_from": 128,
    "bypass_from": 4096,
    "all_reduce_turn": 4096,
    "broadcast_turn": 4160,
    "all_gather_turn": 8192,
    "reduce_scatter_turn": 4096,
    "all_to_all_turn": 12288,
}
LARGE = {name: 262144 if name.endswith("_turn") else 1 << 30 for name in engine.TUNED}
"""Two tunings at either end of what is possible."""


def table(ranks: int, crowded: bool, sizes: dict[str, int], **more: Any) -> dict[str, Any]:
    """For groups of so many ranks."""
    group = {"ranks": ranks, "crowded": crowded, "sizes": sizes}
    group |= {"algorithms": {}, "algorithms_reordered": {}} | more
    return {"format": FORMAT, "processor": engine.processor_model(), "groups": [group]}


def write_table(folder: Path, document: Any, name: str = "table.json") -> str:
    """Write it, as JSON or as the text that it is, and return the path."""
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)
