"""Single-file HTML pages: text, data, styles and scripts, with nothing loaded from elsewhere.

Outside text is escaped. assets/ has the styles and scripts; page.css is shared.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

# Whatever a page contains, the browser does not let it reach the network.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)


def escape(text: object) -> str:
    """Text escaped for HTML, also for attributes."""
    return html.escape(str(text), quote=True)


def as_data(name: str, data: Any) -> str:
    """Data for a page's scripts: an element with the id `name` whose text is JSON."""
    # "<" would end the element if "/script" followed it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'


def build_page(title: str, body: str, assets: Sequence[str] = ()) -> str:
    """A whole page: `body` is HTML, `assets` are names of files in assets/, .css and .js."""
    styles = "".join(_read(name) for name in ("page.css", *assets) if name.endswith(".css"))
    scripts = "".join(
        f"<script>\n{_read(name)}</script>\n" for name in assets if name.endswith(".js")
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>\n{styles}</style>\n</head>\n<body>\n{body}\n{scripts}</body>\n</html>\n"
    )


def in_frame(page: str, height_px: int, title: str) -> str:
    """A page inside another one, such as a notebook: it runs its scripts and can do nothing
    else."""
    return (
        f'<iframe title="{escape(title)}" sandbox="allow-scripts" loading="lazy" '
        f'style="width:100%;height:{height_px}px;border:0;border-radius:10px" '
        f'srcdoc="{escape(page)}"></iframe>'
    )


def _read(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
