"""Spelling, and phrases that read as translated: `make check` runs it and fails on any.

Spelling is codespell's. A phrase is found across line ends, in comments and strings, too.

python tools/check_words.py [FILE ...]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
WHERE = ("README.md", "CONTRIBUTING.md", "csrc", "docs", "examples", "src", "tests", "tools")
TEXTS = (".c", ".css", ".h", ".js", ".md", ".py", ".pyi", ".toml")
EXEMPT = ("docs/conformance.md", "tests/test_wording.py", "tools/check_words.py")

WORDS = ("fro", "lates", "nempty", "rime", "whit", "wights", "worke")
"""What codespell takes for a mistake and is none: parts of words, names and planted typos."""

BANNED = {
    r"nothing is to be said": "no configuration is needed",
    r"left out of account": "ignored",
    r"be had beside": "also be started",
    r"makes? no sense": "invalid; malformed",
    r"that nobody knows": "unknown",
    r"that there is not\b": "no such ...",
    r"any case of letters": "case-insensitive",
    r"comes? to meet": "post the matching send",
    r"counted round": "indices wrap",
    r"not for this way": "the fast path does not apply",
    r"to have another\b": "to change it",
    r"is known to new_group": "new_group detects ...",
    r"what may not be installed": "optional dependencies",
    r"\d are meant": "budget: ...",
    r"ended in order": "exited cleanly",
    r"ha(s|ve|d) brought": "contributed",
    r"behind its name in a sentence": 'completes "rank 3 ..."',
}
"""Phrases as regular expressions, and what to write instead."""

_BETWEEN_WORDS = r'["\s#*/]+(?:f?")?'
_PHRASES = [
    (re.compile(phrase.replace(" ", _BETWEEN_WORDS), re.IGNORECASE), instead)
    for phrase, instead in BANNED.items()
]


def find_phrases(text: str) -> Iterator[tuple[int, str, str]]:
    """Each banned phrase in a text: its line, the phrase as it stands there, what to write."""
    for phrase, instead in _PHRASES:
        for found in phrase.finditer(text):
            yield text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), instead


def main(files: list[str]) -> int:
    """Print what is wrong in these files, or in all; returns the exit code."""
    if not files:
        files = subprocess.check_output(["git", "ls-files", *WHERE], text=True, cwd=ROOT).split()
    files = [file for file in files if file.endswith(TEXTS) and file not in EXEMPT]
    wrong = 0
    for file in files:
        for line, phrase, instead in find_phrases((ROOT / file).read_text()):
            print(f"{file}:{line}: {phrase!r}: write {instead}")
            wrong = 1
    spelling = [sys.executable, "-m", "codespell_lib", "-L", ",".join(WORDS), *files]
    return subprocess.run(spelling, cwd=ROOT).returncode or wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
