"""Count lines: of Python for each package, of C, of pages, of stubs, and of the tests apart.

python tools/size.py
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/unisono"


def count_lines(paths: list[Path]) -> int:
    """How many lines these files have together."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def name_part(path: Path) -> str:
    """The package that a Python file counts for: comm's hosts apart from the rest of it."""
    folders = path.relative_to(PACKAGE).parts[:-1]
    if folders[:2] == ("comm", "hosts"):
        return "comm/hosts"
    return folders[0] if folders else "(top level)"


def main() -> None:
    """Print the table."""
    parts: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        parts[name_part(path)] += count_lines([path])
    rows = parts.most_common()
    rows.append(("Python", sum(parts.values())))
    for name, folder, patterns in (
        ("C", ROOT / "csrc", ("*.c", "*.h")),
        ("JS and CSS", PACKAGE, ("*.js", "*.css")),
        ("stubs (.pyi)", PACKAGE, ("*.pyi",)),
    ):
        rows.append((name, count_lines([path for each in patterns for path in folder.rglob(each)])))
    total = sum(count for name, count in rows[len(parts) :])
    tests = [path for each in ("*.py", "*.c") for path in (ROOT / "tests").rglob(each)]
    rows += [("all of it", total), ("tests, apart", count_lines(tests))]
    for name, count in rows:
        print(f"{name:16}{count:8,}")


if __name__ == "__main__":
    main()
