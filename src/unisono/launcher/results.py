"""What the ranks of a launch have returned, in rank order."""

from __future__ import annotations

from typing import TypeVar

Result = TypeVar("Result")

_LONGEST = 300


class RankResults(list[Result]):
    """A list, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        from unisono.pages import html_table  # not before a notebook asks for it

        return html_table(("rank", "result"), [(rank, _shown(x)) for rank, x in enumerate(self)])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
