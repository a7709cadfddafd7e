"""The sources of the documentation's site: a dead link or a name without a docstring is an
error."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import unisono
from commit import commit
from docs.blocks import ROOT


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools/docs_site")
    for name in ("sources", "reference"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("sources")


def test_a_link_that_leads_nowhere_is_refused(sources: ModuleType) -> None:
    def with_links(text: str) -> str:
        led: str = sources.with_site_links(text, "docs/launching.md", ROOT, set())
        return led

    assert with_links("[what is new](../CHANGELOG.md#x)") == "[what is new](changelog.md#x)"
    assert with_links("[hosts.md](hosts.md#x)") == "[Several hosts](hosts.md#x)"
    with pytest.raises(sources.BadSource, match=r"docs/launching\.md links to nowhere\.md"):
        with_links("[somewhere](nowhere.md)")


def test_a_public_name_without_a_docstring_is_refused(
    sources: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = importlib.import_module("reference")
    names = reference.write_pages(tmp_path)
    assert {"reference/unisono", "reference/unisono.plan", "reference/unisono.testing"} <= set(
        names
    )
    modules = {n for n in unisono.__all__ if isinstance(getattr(unisono, n), ModuleType)}
    pages = {page.stem.removeprefix("unisono.") for page in (tmp_path / "reference").iterdir()}
    assert set(unisono.__all__) - modules <= pages
    monkeypatch.setattr(unisono.all_reduce, "__doc__", None)
    with pytest.raises(sources.BadSource, match=r"unisono\.all_reduce has no docstring"):
        reference.write_pages(tmp_path)


def test_the_lists_of_names_cut_no_sentence_short(sources: ModuleType, tmp_path: Path) -> None:
    importlib.import_module("reference").write_pages(tmp_path)
    text = "".join(page.read_text() for page in (tmp_path / "reference").iterdir())
    rows = [row for row in text.splitlines() if row.startswith("| [")]
    assert len(rows) > 100
    assert not [row for row in rows if row.count("(") != row.count(")")]


def test_names_in_the_reference_lead_to_its_pages(sources: ModuleType, tmp_path: Path) -> None:
    importlib.import_module("reference").write_pages(tmp_path)
    pages = {page.stem: page.read_text() for page in (tmp_path / "reference").iterdir()}
    links = {
        (name, link)
        for name, text in pages.items()
        for link in re.findall(r"\]\((unisono[\w.]*)\.md\)", text)
    }
    assert ("unisono.all_reduce", "unisono.reduce_scatter") in links
    assert ("unisono.differentiable.all_reduce", "unisono.differentiable.all_gather") in links
    assert ("unisono.PeerLost", "unisono.GroupError") in links
    assert ("unisono.plan.Choice", "unisono.plan.algorithm") not in links  # its field
    assert {link for _, link in links} <= pages.keys()


def test_a_page_that_no_list_has_is_refused(sources: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "forgotten.md").write_text("# Forgotten\n")
    drawn = ("plays-all_reduce-ring-4", "hang")
    with pytest.raises(sources.BadSource, match=r"every page but forgotten\.md"):
        sources.write_start_page(ROOT, tmp_path, [], dict.fromkeys(drawn, ""))


def test_overloads_stand_in_the_reference_as_type_checkers_see_them(sources: ModuleType) -> None:
    reference = importlib.import_module("reference")
    first, later = reference._signatures("unisono.broadcast", unisono.broadcast)
    assert first.endswith("async_op: Literal[False]=False) -> StructureT")
    assert later.endswith("async_op: Literal[True]) -> Work[StructureT]")
    assert len(reference._signatures("unisono.all_gather", unisono.all_gather)) == 4
    assert reference._signatures("unisono.barrier", unisono.barrier) == [
        reference._signature("unisono.barrier", unisono.barrier)
    ]


def test_plots_stand_in_the_page(sources: ModuleType) -> None:
    text = (ROOT / "docs/index.md").read_text()
    drawn = dict.fromkeys(("plays-all_reduce-ring-4", "hang"), "")
    page = sources._with_pictures(text, drawn, "docs/index.md", ROOT)
    assert page.count("<svg ") == 1
    assert "var(--unisono)" in page
    assert "<style>" not in page


@pytest.mark.parametrize(
    "page", ["conformance", "parity", "diagnosis-corpus", "performance", "hosts", "scale"]
)
def test_a_table_that_a_command_writes_names_its_commit(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    assert re.search(r"\bcommit \|? ?[0-9a-f]{8}\b", text, re.IGNORECASE)


def test_a_table_is_written_on_this_commit() -> None:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    number, _, rest = commit().partition(" ")
    assert (head.startswith(number) and rest in ("", "with changes")) or commit() == "no commit"
