"""`breakpoint()` in a rank, which has no terminal, is a sentence."""

from __future__ import annotations

import re
import subprocess
import sys

from user_programs import DEADLINE_S, Program, WriteProgram, plain_environment

PROGRAM = """
    import unisono

    def work():
        comm = unisono.init()
        breakpoint()
        comm.barrier()
        return 42 + comm.rank

    if __name__ == "__main__":
        print("returned", unisono.launch(work, 2))
"""

SCRIPT = """
    import unisono
    comm = unisono.init()
    breakpoint()
    comm.barrier()
    print("all", "over")
"""


def run(written: Program, *before: str, **variables: str) -> tuple[str, str]:
    """The program's output."""
    done = subprocess.run(
        [sys.executable, *before, str(written.path)],
        input="c\nc\n",
        env=plain_environment() | variables,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.stdout, done.stderr


def test_a_rank_has_no_terminal(program: WriteProgram) -> None:
    for text, before in ((PROGRAM, ()), (SCRIPT, ("-m", "unisono", "run", "-n", "2"))):
        written = program(text)
        out, err = run(written, *before)
        found = r"breakpoint\(\) in rank \d, .*program.py:\d+: a rank has no terminal"
        assert re.search(found, out + err), (out, err)
        out, err = run(written, *before, PYTHONBREAKPOINT="0")
        assert "returned [42, 43]" in out or out.count("all over") == 2, (out, err)


def test_another_debugger_is_called(program: WriteProgram) -> None:
    out, err = run(program(PROGRAM), PYTHONBREAKPOINT="builtins.id")
    assert "id() takes exactly one argument" in err, out
