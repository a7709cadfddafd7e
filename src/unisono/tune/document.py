"""The table as it is kept in the user's cache folder: readable, versioned, replaced as a whole."""

from __future__ import annotations

import datetime
import json
import os
from typing import Any

import unisono
from unisono.bench import machine
from unisono.cache import write_whole
from unisono.comm import engine
from unisono.comm.tuning import FORMAT, read_document


def merge(path: str, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A table with these groups, and with those of other sizes that the present one has."""
    try:
        kept = {group["ranks"]: group for group in read_document(path)["groups"]}
    except (OSError, ValueError, LookupError, TypeError):
        kept = {}
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    for group in groups:
        kept[group["ranks"]] = {"measured_on": now, "unisono": unisono.__version__} | group
    facts = machine.machine()
    return {
        "format": FORMAT,
        "processor": engine.processor_model(),
        "model": facts["processor"],
        "cores": os.cpu_count(),
        "groups": [kept[ranks] for ranks in sorted(kept)],
    }


def write(path: str, document: dict[str, Any]) -> None:
    """Write the table. Raises OSError; then the one that was there still is."""
    write_whole(path, json.dumps(document, indent=1) + "\n")
