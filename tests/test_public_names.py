"""The public names: one table, which Python and type checkers see alike."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import unisono
from user_programs import run_python

ROOT = Path(__file__).parent.parent


def test_the_stub_is_what_the_table_says() -> None:
    tool = runpy.run_path(str(ROOT / "tools/write_stub.py"))
    text = tool["stub_text"]()
    assert tool["STUB"].read_text() == text, "run python tools/write_stub.py"
    named = [line.split()[-1] for line in text.splitlines() if " as " in line]
    assert sorted(named) == unisono.__all__


def test_every_public_name_is_there_once() -> None:
    assert len(set(unisono.__all__)) == len(unisono.__all__)
    for name in unisono.__all__:
        assert getattr(unisono, name) is not None
        assert name in dir(unisono)
    with pytest.raises(AttributeError, match="has no attribute 'all_reduced'"):
        _ = unisono.all_reduced


def test_to_import_it_imports_neither_torch_nor_numpy() -> None:
    program = "import sys, unisono; print({'torch', 'numpy'} & {*sys.modules})"
    done = run_python("-c", program)
    assert done.stdout == "set()\n", done.stderr


PROGRAM = """
import unisono

unisono.get_rank() + "text"
unisono.all_reduce()
unisono.all_reduced
with unisono.ProcessGroupManager(tp_size=2) as manager:
    reveal_type(manager.tp)
try:
    reveal_type(unisono.init())
except unisono.PeerLost as lost:
    reveal_type(lost.peer)
reveal_type(unisono.watch.start)
"""

SAID = {
    4: 'Unsupported operand types for + ("int" and "str")',
    5: 'Missing positional argument "tensor" in call to "all_reduce"',
    6: 'Module has no attribute "all_reduced"',
    8: 'Revealed type is "unisono.comm.base.Communicator"',
    10: 'Revealed type is "unisono.comm.base.Communicator"',
    12: 'Revealed type is "int"',
    13: 'Revealed type is "def (',
}


def test_a_users_program_has_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    (tmp_path / "program.py").write_text(PROGRAM)
    # Their types would take a minute, and are not what is looked at.
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nstrict = true\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--no-error-summary"]
    done = subprocess.run(
        [*mypy, "program.py"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT / "src"), "PATH": ""},
    )
    print(done.stdout, done.stderr)
    lines = {int(line.split(":")[1]): line for line in done.stdout.splitlines()}
    assert done.returncode == 1
    assert lines.keys() == SAID.keys()
    for number, text in SAID.items():
        assert text in lines[number]
