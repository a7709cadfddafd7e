"""The snippets of docs/shared.md run on real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import unisono
from unisono.comm.communicator import Communicator

PAGE = Path(__file__).parents[2] / "docs" / "shared.md"


@pytest.mark.ranks([1, 2])
def test_every_snippet_runs(comm: Communicator) -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 4
    for snippet in snippets:
        names = {"comm": comm, "torch": torch, "unisono": unisono}
        exec(snippet, names)
        if "mine" in names:
            assert names["mine"].unique().tolist() == [1.0]  # type: ignore[attr-defined]
