"""Write the .pyi files beside modules whose calls return a result, or with `async_op` a Work.

python tools/write_overloads.py

Each such function is written once, with `async_op: bool = False` and `Result | Work` as what it
returns; type checkers want three signatures for it, and find them in the stub.
"""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = (
    "src/unisono/comm/communicator.py",
    "src/unisono/collectives/primitives.py",
)
KEPT = ("__init__", "__enter__", "__exit__", "_transport_for", "_refuse_for", "_refuse_message")
"""Of a class's private methods those that others call."""
NEED_INPUT = ("all_gather", "gather", "all_to_all")
HEAD = "# Written by tools/write_overloads.py from the module beside it.\n"


def stub_of(source: str) -> str:
    """The stub of a module."""
    tree = ast.parse(source)
    lines = [HEAD, "from typing import Literal as _Literal, overload as _overload\n"]
    for node in written_once(tree.body):
        lines += statements(node)
    return "\n".join(lines) + "\n"


def written_once(body: list[ast.stmt]) -> list[ast.stmt]:
    """A body without the functions whose signatures stand above them, and without their marks."""
    kept: list[ast.stmt] = []
    overloaded = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            marks = [mark for mark in node.decorator_list if ast.unparse(mark) == "overload"]
            if marks:
                overloaded.add(node.name)
            elif node.name in overloaded or (node.name[0] == "_" and node.name not in KEPT):
                continue
            node.decorator_list = [
                mark
                for mark in node.decorator_list
                if ast.unparse(mark) in ("property", "staticmethod")
                or "setter" in ast.unparse(mark)
            ]
        kept.append(node)
    return kept


def statements(node: ast.stmt) -> list[str]:
    """What a statement of a module or class is in its stub."""
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return []
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [ast.unparse(node)]
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return [line for inner in node.body for line in statements(inner)]
    if isinstance(node, ast.ClassDef):
        return class_lines(node)
    if isinstance(node, ast.FunctionDef):
        return function_lines(node)
    if isinstance(node, (ast.AnnAssign, ast.Assign)) and ast.unparse(node)[0] == "_":
        return []
    if isinstance(node, ast.AnnAssign):
        keeps = "TypeAlias" in ast.unparse(node.annotation)
        value = node.value if keeps else None
        return [ast.unparse(ast.AnnAssign(node.target, node.annotation, value, 1))]
    if isinstance(node, ast.Assign) and (
        isinstance(node.value, (ast.Name, ast.Attribute)) or "TypeVar" in ast.unparse(node.value)
    ):
        return [ast.unparse(node)]
    return []


def class_lines(node: ast.ClassDef) -> list[str]:
    bases = ", ".join(map(ast.unparse, node.bases))
    head = f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    body = [line for inner in written_once(node.body) for line in statements(inner)]
    return [head, *("    " + line for line in body or ["..."])]


def without_refused(arguments: ast.arguments, name: str) -> None:
    """Leave out what a method takes only to say what was meant: no input, and torch's splits."""
    inputs = [argument for argument in arguments.args if argument.arg == "input"]
    if name in NEED_INPUT and inputs and arguments.defaults:
        arguments.defaults.pop(0)  # it is the first one that has a default
        annotation = inputs[0].annotation
        assert isinstance(annotation, ast.BinOp)
        inputs[0].annotation = annotation.left  # the other half is None
    if arguments.vararg is not None and arguments.vararg.arg == "splits":
        arguments.vararg = None


def function_lines(node: ast.FunctionDef) -> list[str]:
    """A function as it is, or overloaded if it may return a Work."""
    stub = copy.deepcopy(node)
    stub.body = [ast.Expr(ast.Constant(...))]
    without_refused(stub.args, stub.name)
    now, later = results(stub)
    places = [arg for arg in stub.args.kwonlyargs if arg.arg == "async_op"]
    if later is None or not places:
        return text_of(stub)
    lines = []
    at = stub.args.kwonlyargs.index(places[0])
    for kind, default, result in (
        ("_Literal[False]", True, now),
        ("_Literal[True]", False, later),
        ("bool", False, ast.unparse(stub.returns) if stub.returns else ""),
    ):
        one = copy.deepcopy(stub)
        one.args.kwonlyargs[at].annotation = ast.parse(kind, mode="eval").body
        one.args.kw_defaults[at] = ast.Constant(False) if default else None
        one.returns = ast.parse(result, mode="eval").body
        lines += ["@_overload", *text_of(one)]
    return lines


def results(node: ast.FunctionDef) -> tuple[str, str | None]:
    """What a call returns, and what it returns with `async_op`; None: it knows no Work."""
    text = ast.unparse(node.returns) if node.returns else ""
    parts: list[ast.expr] = []
    left = node.returns
    while isinstance(left, ast.BinOp):
        parts.insert(0, left.right)
        left = left.left
    if left is not None:
        parts.insert(0, left)
    works = [part for part in map(ast.unparse, parts) if part.split("[")[0] == "Work"]
    others = [part for part in map(ast.unparse, parts) if part.split("[")[0] != "Work"]
    return (" | ".join(others), works[0]) if works and others else (text, None)


def text_of(node: ast.FunctionDef) -> list[str]:
    head, _, _ = ast.unparse(ast.fix_missing_locations(node)).rpartition("\n")
    return [*head.split("\n")[:-1], head.split("\n")[-1] + " ..."]


def main() -> None:
    for module in MODULES:
        path = ROOT / module
        stub = path.with_suffix(".pyi")
        stub.write_text(stub_of(path.read_text()))
        for command in ("format", "check --fix", "format"):
            tidy = [sys.executable, "-m", "ruff", *command.split(), "--quiet", stub]
            subprocess.run(tidy, check=True)


if __name__ == "__main__":
    main()
