"""Single-file HTML pages: elements, data, styles and scripts, with nothing loaded from elsewhere.

Whatever is not Html is escaped. assets/ has the styles and scripts; page.css is shared.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

# Whatever a page contains, the browser does not let it reach the network.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)


class Html(str):
    """Text that is HTML already."""


def escape(text: object) -> Html:
    """Text escaped for HTML, also for attributes, unless it is Html."""
    return text if isinstance(text, Html) else Html(html.escape(str(text), quote=True))


def join(parts: Iterable[object]) -> Html:
    return Html("".join(map(escape, parts)))


def element(name: str, /, *content: object, **attributes: object) -> Html:
    """An element. An attribute that is a word of Python's ends with "_"; None leaves it out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>{join(content)}</{name}>")


def elements(name: str, contents: Iterable[object], **attributes: object) -> Html:
    """One element for each content."""
    return join(element(name, content, **attributes) for content in contents)


def table(
    heads: Iterable[object], rows: Iterable[object], kind: str = "scroll", **how: Any
) -> Html:
    """A table of `rows`, which are elements, below the cells of its head, in a box that scrolls."""
    head = element("thead", element("tr", *heads))
    return element("div", element("table", head, element("tbody", *rows), **how), class_=kind)


def panel(title: str, *content: object, kind: str = "") -> Html:
    return element("section", element("h2", title), *content, class_=f"panel {kind}".strip())


def data(name: str, value: Any) -> Html:
    """Data for a page's scripts: an element with the id `name` whose text is JSON."""
    # "<" would end the element if "/script" followed it.
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return element("script", Html(text), type="application/json", id=name)


def build_page(title: str, body: Iterable[object], assets: Sequence[str] = ()) -> str:
    """A whole page: `body` are its parts, `assets` are names of files in assets/, .css and .js."""
    styles = "".join(asset(name) for name in ("page.css", *assets) if name.endswith(".css"))
    scripts = "".join(
        f"<script>\n{asset(name)}</script>\n" for name in assets if name.endswith(".js")
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>\n{styles}</style>\n</head>\n<body>\n{join(body)}\n{scripts}</body>\n</html>\n"
    )


def in_frame(page: str, height_px: int, title: str) -> str:
    """A page inside another one, such as a notebook: it runs its scripts and can do nothing
    else."""
    style = f"width:100%;height:{height_px}px;border:0;border-radius:10px"
    how = {"sandbox": "allow-scripts", "loading": "lazy", "style": style, "srcdoc": page}
    return element("iframe", title=title, **how)


def asset(name: str) -> Html:
    """The text of a file in assets/."""
    file = resources.files(__package__).joinpath("assets", name)
    return Html(file.read_text(encoding="utf-8"))
