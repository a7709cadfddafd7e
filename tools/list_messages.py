"""Print every message of the package, with file and line, for somebody to read as a list.

A message is a text of several words that is no docstring: what is raised, warned of, printed or
reported. Each line says where it stands, what is done with it (raise, the function that it is
passed to, return) and the text, with expressions in braces.

python tools/list_messages.py [--kind raise] [src/unisono/watch ...]
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/unisono"
NO_MESSAGES = ("compile", "match", "search", "sub", "split", "strip", "add_argument", "TypeVar")
"""Functions whose arguments nobody reads."""


def messages_of(path: Path) -> Iterator[tuple[int, str, str]]:
    """The line, the kind and the text of each message in a file."""
    yield from _messages(ast.parse(path.read_text()), "text")


def _messages(node: ast.AST, kind: str) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.Raise):
        kind = "raise"
    elif isinstance(node, ast.Return) and kind == "text":
        kind = "return"
    elif isinstance(node, ast.Call) and kind != "raise":
        kind = _name_of(node.func)
    if kind in NO_MESSAGES or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    if isinstance(node, (ast.JoinedStr, ast.Constant)):
        text = _text_of(node)
        if len(text.split()) > 1:
            yield node.lineno, kind, text
        return
    for child in ast.iter_child_nodes(node):
        yield from _messages(child, kind)


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


def _text_of(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(
        _text_of(part) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
        for part in node.values
        if isinstance(part, (ast.Constant, ast.FormattedValue))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Print every message of the package.")
    parser.add_argument("paths", nargs="*", type=Path, default=[PACKAGE])
    parser.add_argument("--kind", help="raise, return, text, or a function: warn, echo, ...")
    arguments = parser.parse_args()
    for top in arguments.paths:
        for path in [top] if top.is_file() else sorted(top.rglob("*.py")):
            for line, kind, text in messages_of(path):
                if arguments.kind in (None, kind):
                    shown = text.replace("\n", "\\n")
                    print(f"{path.resolve().relative_to(ROOT)}:{line}: {kind}: {shown}")


if __name__ == "__main__":
    main()
