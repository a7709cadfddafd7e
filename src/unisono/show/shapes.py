"""Rectangles, lines and text in SVG."""

from __future__ import annotations

from html import escape


def picture(wide: str, narrow: str) -> str:
    """A picture that stands in a page: `narrow` is what a phone shows. It is one line, so that
    markdown leaves it alone."""
    return f'<div class="picture">{wide}{narrow}</div>'


def drawing(kind: str, width: float, height: float, label: str, parts: list[str]) -> str:
    """One drawing; `kind` is "wide" or "narrow"."""
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{escape(label)}">'
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="tip" d="M0 0 10 5 0 10z"/></marker></defs>'
        f"{''.join(parts)}</svg>"
    )


def box(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A rectangle with round corners; `title` shows where somebody points at it."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="4">{inside}</rect>'
    )


def text(x: float, y: float, words: object, kind: str = "", anchor: str = "middle") -> str:
    """Words whose middle, begin ("start") or end ("end") is at x."""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{escape(str(words))}</text>"
    )


def arrow(x1: float, y1: float, x2: float, y2: float, kind: str, title: str = "") -> str:
    """A line that ends in a tip."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'marker-end="url(#tip)">{inside}</line>'
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A line."""
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
