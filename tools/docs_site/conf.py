"""What Sphinx is told: `python tools/docs_site` builds the pages, and calls it."""

import json
from pathlib import Path
from typing import Any

from docutils import nodes

import unisono

project = "unisono"
author = "The unisono developers"
release = version = unisono.__version__
extensions = ["myst_parser"]
root_doc = "index"
highlight_language = "text"
smartquotes = False
pygments_style = "default"
pygments_dark_style = "github-dark"

# Anchors as code hosts make them, so that links work in both.
myst_heading_anchors = 4
myst_links_external_new_tab = True
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_js_files = ["summaries.js", "site.js"]
html_title = f"unisono {release}"
html_css_files = ["site.css", "picture.css", "incident.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
# Summaries are fetched, which a browser refuses for files: titles alone work everywhere.
html_show_search_summary = False
html_theme_options = {"navigation_with_keys": True}

_SUMMARY_CHARACTERS = 180


def setup(app: Any) -> None:
    """Search shows a line of each page and section that it finds: they are in a file of their own,
    which a browser loads without a network."""
    summaries: dict[str, str] = {}

    def collect(app: Any, doctree: Any, name: str) -> None:
        for section in doctree.findall(nodes.section):
            paragraph = next(section.findall(nodes.paragraph), None)
            if paragraph is not None:
                words = " ".join(paragraph.astext().split())
                short = words[:_SUMMARY_CHARACTERS].rsplit(" ", 1)[0] + " ..."
                shown = words if len(words) <= _SUMMARY_CHARACTERS else short
                for anchor in section["ids"]:
                    summaries[f"{name}.html#{anchor}"] = shown
                if section.parent is doctree:
                    summaries[f"{name}.html"] = shown

    def write(app: Any, error: Exception | None) -> None:
        text = f"const SUMMARIES = {json.dumps(summaries)};\n"
        Path(app.outdir, "_static/summaries.js").write_text(text, encoding="utf-8")

    app.connect("doctree-resolved", collect)
    app.connect("build-finished", write)
