"""The chapters of the course also run as notebooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs.blocks import ROOT

sys.path.append(str(ROOT / "tools" / "docs_site"))

import notebooks

CHAPTERS = sorted(page.stem for page in (ROOT / "docs").glob("course-*.md"))


def test_cells() -> None:
    page = (
        "# T\n\nText.\n\n<!-- ranks: 2 -->\n```python\nx = 1\n```\n\n<!-- file: a.py -->\n"
        "```python\ny\n```\n\n```sh\npython a.py\n```\n\n```text\nout\n```\n"
        "<!-- picture: p -->\nSee [2](course-02-x.md), [a](b.md#c).\n\n"
        "<!-- picture: plays-all_reduce-ring-4 -->\n"
    )
    cells = notebooks.notebook_of(page)["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    assert sources[0] == "# T\n\nText."
    assert "    x = 1\n" in sources[2]
    assert "ranks=2" in sources[2]
    player = 'from unisono import plan\n\nplan.find("all_reduce", "ring").schedule(4)'
    text = "See [2](course-02-x.ipynb), a."
    assert sources[3:] == ["%%writefile a.py\ny", "!python a.py", text, player]


FIRST = f"""
%reset_selective -f .
import os, sys
import unisono
os.environ["PATH"] = f"{{os.path.dirname(sys.executable)}}:{{os.environ['PATH']}}"
sys.path.append({str(ROOT / "tests")!r})
vars(unisono).pop("launch", None)
"""
"""Comes before the cells of a chapter."""
WARM = """
import torch._dynamo
from ranks import RankPool

def launch(*args, **options):
    with RankPool() as ranks:
        return ranks.launch(*args, **options)

unisono.launch = launch
"""
"""Its ranks are then forked where torch is loaded already."""
COLD = "course-03-all-reduce"
"""The chapter that starts its ranks as the reader does."""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """One kernel for all chapters: torch is imported once."""
    manager = pytest.importorskip("jupyter_client").KernelManager(kernel_name="python3")
    yield manager
    if manager.has_kernel:
        manager.shutdown_kernel(now=True)


@pytest.mark.docs
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_runs(chapter: str, tmp_path: Path, kernel: Any) -> None:
    nbformat, nbclient = (pytest.importorskip(name) for name in ("nbformat", "nbclient"))
    notebooks.write_all(ROOT / "docs", tmp_path)
    notebook = nbformat.read(tmp_path / f"{chapter}.ipynb", as_version=4)
    first = f"%cd -q {tmp_path}{FIRST}{WARM if chapter != COLD else ''}"
    for cell in notebook.cells:
        if cell.source.startswith("!"):
            cell.source = cell.source.replace("\n", "\nassert _exit_code == 0\n")
            cell.source += "\nassert _exit_code == 0"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(first))
    nbclient.NotebookClient(notebook, timeout=120, km=kernel).execute()
