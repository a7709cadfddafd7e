"""The snippets of docs/training.md run on real ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from unisono.comm.base import Communicator

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.mark.ranks([1, 2])
def test_every_snippet_runs(comm: Communicator) -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) == 5
    for snippet in snippets:
        model = torch.nn.Linear(3, 2)
        batches = [torch.ones(2, 3) * comm.rank for _ in range(2)]
        exec(snippet, {"torch": torch, "model": model, "batches": batches})
        for parameter in model.parameters():
            everyone = torch.empty(comm.size, *parameter.shape)
            comm.all_gather(everyone, parameter.detach())
            if "optimizer" in snippet:
                assert torch.equal(everyone[0], everyone[-1])
