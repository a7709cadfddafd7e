"""Pages for a browser: one file that holds everything it needs, and asks nobody for anything.

page.py    a page from its parts: text, data, styles, scripts
table.py   a table for a notebook
assets/    what those are made of: page.css is shared, the others have a page each

Schedules that play are in `unisono.plan.player`, incidents in `unisono.doctor.incident_page`,
benchmarks in `unisono.bench.html`.
"""

from unisono.pages.page import as_data, build_page, escape, in_frame
from unisono.pages.table import html_table

__all__ = ["as_data", "build_page", "escape", "html_table", "in_frame"]
