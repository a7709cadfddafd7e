"""The public names: one table, the same for Python and type checkers."""

from __future__ import annotations

import ast
import runpy
import warnings
from pathlib import Path

import pytest

import unisono
from user_programs import run_python

ROOT = Path(__file__).parent.parent


def test_the_stub_is_what_the_table_says() -> None:
    tool = runpy.run_path(str(ROOT / "tools/write_stub.py"))
    text = tool["stub_text"]()
    assert tool["STUB"].read_text() == text, "run python tools/write_stub.py"
    named = {line.split()[-1] for line in text.splitlines() if " as " in line}
    assert named == {*unisono.__all__, "cleanup", "debug_communication", "setup"}


def test_the_stubs_are_what_their_modules_say() -> None:
    tool = runpy.run_path(str(ROOT / "tools/write_overloads.py"))
    for module in tool["MODULES"]:
        path = ROOT / module
        wanted = ast.parse(tool["stub_of"](path.read_text()))
        found = ast.parse(path.with_suffix(".pyi").read_text())
        for tree in (wanted, found):
            tree.body = [node for node in tree.body if "Import" not in type(node).__name__]
        assert ast.dump(wanted) == ast.dump(found), "run python tools/write_overloads.py"


def test_the_numbers_of_the_engine_are_those_of_its_header() -> None:
    tool = runpy.run_path(str(ROOT / "tools/write_engine_numbers.py"))
    told = "run python tools/write_engine_numbers.py"
    assert tool["NUMBERS"].read_text() == tool["numbers_text"](), told


def test_every_public_name_is_there_once() -> None:
    assert len(set(unisono.__all__)) == len(unisono.__all__)
    for name in unisono.__all__:
        assert getattr(unisono, name) is not None
        assert name in dir(unisono)
    assert not {"Any", "importlib", "sys"} & {*dir(unisono)}
    assert {"rank", "size", "global_ranks", "all_reduce"} <= {*dir(unisono.Communicator)}
    with pytest.raises(AttributeError, match="has no attribute 'all_reduced'"):
        _ = unisono.all_reduced


def test_names_of_the_notes_are_silent_and_former_ones_gone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert unisono.cleanup is unisono.shutdown
        assert unisono.debug_communication is unisono.self_test
        assert callable(unisono.setup)
    assert not any(hasattr(unisono, name) for name in ("mean", "execute", "share", "softmax"))
    assert not any(hasattr(unisono.get_world(), name) for name in ("peer", "refuse"))
    assert not {"mean", "execute", "setup"} & {*unisono.__all__}


def test_to_import_it_imports_neither_torch_nor_numpy() -> None:
    program = "import sys, unisono; print({'torch', 'numpy'} & {*sys.modules})"
    done = run_python("-c", program)
    assert done.stdout == "set()\n", done.stderr


def test_no_two_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "src/unisono").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 100
    assert not {name: where for name, where in places.items() if len(where) > 1}
