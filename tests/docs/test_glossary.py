"""The glossary has every name of torch.distributed, and links to sections that exist."""

from __future__ import annotations

import re

import torch.distributed as dist
from torch.distributed import distributed_c10d

import unisono
from docs.blocks import ROOT

PAGE = (ROOT / "docs/glossary.md").read_text()
TABLE = PAGE.partition("## Every call of torch.distributed")[2]
ROWS = [line for line in TABLE.splitlines() if line.startswith("| `")]


def test_every_call_of_torch_is_in_the_table() -> None:
    rows = [row.split("|")[1] for row in ROWS]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    calls = [
        name
        for name in distributed_c10d.__all__
        if hasattr(dist, name) and not name.endswith("Options")
    ]
    assert len(calls) > 50
    assert [name for name in calls if name not in named] == []


def test_what_the_table_offers_instead_exists() -> None:
    offered = {name for row in ROWS for name in re.findall(r"`(\w+)\(", row.split("|")[2])}
    assert {"all_reduce", "broadcast_object", "init", "PremulSum"} <= offered
    assert [name for name in offered if not hasattr(unisono, name)] == []


def test_links_lead_to_sections() -> None:
    for page, section in re.findall(r"\((\w[\w-]*\.md)#([\w-]+)\)", PAGE):
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(), re.M)
        anchors = {
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
        }
        assert section in anchors, f"{page} has no section {section}"
