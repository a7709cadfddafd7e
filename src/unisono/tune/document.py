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
from unisono.comm.tuning import FORMAT, read_document, tuning_of

_FIGURES = ("tried", "measured", "disturbed")
"""Of a group, what only people want to know: every process that makes a group reads the rest."""


def read(path: str) -> dict[str, Any]:
    """The table with its figures, every group of it checked. Raises as `read_document`."""
    document = read_document(path)
    try:
        for group in document["groups"]:
            if type(group["ranks"]) is not int:
                raise ValueError(f"ranks is {group['ranks']!r}, and must be a number")
            tuning_of(group)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"it is damaged ({error!r})") from None
    try:
        with open(figures_path(path), "rb") as file:
            figures = json.load(file)
        for group in document["groups"]:
            of_group = figures["of"].get(str(group["ranks"]), {})
            if of_group.get("measured_on") == group.get("measured_on"):
                group |= of_group
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass  # a table without figures is a table
    return document


def figures_path(path: str) -> str:
    """Where the times are that a table was made from."""
    return path.removesuffix(".json") + "-measured.json"


def merge(path: str, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """A table with these groups, and with those of other sizes that the present one has, if that
    can be used."""
    try:
        kept = {group["ranks"]: group for group in read(path)["groups"]}
    except (OSError, ValueError):
        kept = {}
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
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
    """Write the table and its figures. Raises OSError; then the table that was there still is."""
    figures = {
        str(group["ranks"]): {name: group[name] for name in ("measured_on", *_FIGURES)}
        for group in document["groups"]
        if all(name in group for name in _FIGURES)
    }
    short = [
        {name: group[name] for name in group if name not in _FIGURES}
        for group in document["groups"]
    ]
    whole = {"format": FORMAT, "of": figures}
    write_whole(figures_path(path), json.dumps(whole, indent=1) + "\n")
    write_whole(path, json.dumps(document | {"groups": short}, indent=1) + "\n")
