"""How messages name ranks, and the tools that check our texts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from unisono.errors import name_ranks, plural

TOOLS = Path(__file__).parent.parent / "tools"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "no rank"),
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        ([0, 1, 3], "ranks 0, 1 and 3"),
        ([1, 2, 3], "ranks 1-3"),
        ([0, 4, 5, 6, 9], "ranks 0, 4-6 and 9"),
        (range(0, 40, 2), "ranks 0, 2, 4, 6, 8, 10 and 14 more"),
    ],
)
def test_ranks_are_named_as_a_sentence_does(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text


@pytest.mark.parametrize(
    ("singular", "several"),
    [("was killed by SIGKILL", "were killed by SIGKILL"), ("raised", "raised")],
)
def test_what_one_rank_did_is_said_of_several(singular: str, several: str) -> None:
    assert plural(singular) == several


def test_banned_phrases_are_found_across_lines_and_quotes() -> None:
    find = runpy.run_path(str(TOOLS / "check_words.py"))["find_phrases"]
    texts = [
        "one\n# two that nobody\n# knows",
        'raise ValueError(f"an argument {x} that "\n        f"makes no sense")',
        "/* has\n * brought */",
        "IN ANY CASE OF LETTERS",
    ]
    assert [[line for line, _, _ in find(text)] for text in texts] == [[2], [2], [1], [1]]
    assert not list(find("an invalid argument; it knows nobody"))


def test_messages_are_listed_with_their_lines(tmp_path: Path) -> None:
    messages_of = runpy.run_path(str(TOOLS / "list_messages.py"))["messages_of"]
    (tmp_path / "module.py").write_text(
        '"""Not a message."""\n'
        "def f(x):\n"
        '    """Nor is this."""\n'
        '    warnings.warn("a warning")\n'
        '    if x:\n        return "some text" if x > 1 else "word"\n'
        '    raise ValueError(f"rank {x + 1} " "failed")\n'
    )
    assert list(messages_of(tmp_path / "module.py")) == [
        (4, "warn", "a warning"),
        (6, "return", "some text"),
        (7, "raise", "rank {x + 1} failed"),
    ]
