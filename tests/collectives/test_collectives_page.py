"""The snippets of docs/collectives.md run on real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import unisono
from unisono.comm.base import Communicator

PAGE = Path(__file__).parents[2] / "docs" / "collectives.md"


@pytest.mark.ranks([1, 2, 4])
def test_every_snippet_runs(comm: Communicator) -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) >= 5
    for snippet in snippets:
        if comm.size == 4 or "torch.ones(4)" not in snippet:
            exec(snippet, {"comm": comm, "torch": torch, "unisono": unisono})


@pytest.mark.ranks(4)
def test_the_comments_of_the_first_one_are_true(comm: Communicator) -> None:
    first = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    lines = first.splitlines()
    names = {"comm": comm, "torch": torch, "unisono": unisono}
    exec("\n".join(lines[:2]), names)
    assert names["x"].tolist() == [6, 10, 14, 18]  # type: ignore[attr-defined]
    exec("\n".join(lines[2:]), names)
    assert [len(part) for part in names["parts"]] == [0, 1, 2, 3]  # type: ignore[attr-defined]
    assert names["mine"].tolist() == [1] * comm.rank  # type: ignore[attr-defined]
    assert names["half"].tolist() == [4]  # type: ignore[attr-defined]
    assert names["swapped"].tolist() == [comm.rank] * 4  # type: ignore[attr-defined]
