"""`breakpoint()` in a rank: a debugger for one rank at a time, or a sentence."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys

import pytest

from user_programs import DEADLINE_S, Program, WriteProgram, plain_environment

PROGRAM = """
    import unisono

    def work():
        comm = unisono.init()
        secret = 42 + comm.rank
        breakpoint()
        comm.barrier()
        return secret

    if __name__ == "__main__":
        print("returned", unisono.launch(work, 2))
"""

SCRIPT = """
    import unisono
    comm = unisono.init()
    secret = 42 + comm.rank
    breakpoint()
    comm.barrier()
    print("all", "over")
"""


def debug(
    written: Program, commands: str | None, *before: str, **variables: str
) -> tuple[str, str]:
    """The program's output, with these lines as its input, or with none at all."""
    done = subprocess.run(
        [sys.executable, *before, str(written.path)],
        input=commands,
        stdin=subprocess.DEVNULL if commands is None else None,
        env=plain_environment() | variables,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.stdout, done.stderr


def test_one_rank_after_the_other_reads_from_a_pipe(program: WriteProgram) -> None:
    out, err = debug(program(PROGRAM), "p secret * 1000\nc\n" * 2)
    assert "returned [42, 43]" in out, err
    for rank in (0, 1):
        assert f"(Pdb rank {rank}) {42 + rank}000" in out


def test_a_script_is_debugged_and_a_step_over_a_collective_lets_others_come(
    program: WriteProgram,
) -> None:
    """The first rank steps into the barrier and waits there for the other one, which waits for the
    debugger."""
    run = ("-m", "unisono", "run", "-n", "2")
    commands = "n\nc\n" + "c\n" * 3
    out, err = debug(program(SCRIPT), commands, *run)
    assert out.count("all over") == 2, (out, err)
    assert "waits until the debugger is free" in out


def test_nothing_to_read_is_a_sentence(program: WriteProgram) -> None:
    written = program(PROGRAM)
    out, err = debug(written, None)
    assert re.search(
        r"breakpoint\(\) in rank \d, .*program.py:\d+: the debugger needs a terminal", err
    )
    out, err = debug(written, "p secret\n")
    assert "standard input has ended" in err
    assert "BdbQuit" not in err
    out, err = debug(written, None, PYTHONBREAKPOINT="0")
    assert "returned [42, 43]" in out, err


@pytest.mark.parametrize("how", ["c", "kill"])
def test_on_a_terminal(program: WriteProgram, how: str) -> None:
    """The rank has the terminal while it is debugged, and the launching process afterwards."""
    text = PROGRAM.replace(
        'print("returned", unisono.launch(work, 2))',
        """try:
            print("returned", unisono.launch(work, 2))
        except unisono.errors.RanksFailed as error:
            print("returned", str(error).splitlines()[0])
        import os
        print("foreground", os.tcgetpgrp(0) == os.getpgrp())""",
    )
    path = program(text).path
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, str(path)], plain_environment())
    try:
        seen = read_until(terminal, rb"\(Pdb rank (\d)\) ")
        os.write(terminal, b"p secret * 1000\n")
        # the other rank's line that it waits may come before the prompt
        seen += read_until(terminal, rb"(?s)4[23]000\r\n.*\(Pdb rank \d\) ")
        if how == "c":
            os.write(terminal, b"c\n")
            seen += read_until(terminal, rb"\(Pdb rank \d\) ")
            os.write(terminal, b"c\n")
        else:
            os.write(terminal, b"import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
        seen += read_until(terminal, rb"foreground \w+")
    finally:
        os.close(terminal)  # hangs up on what still runs
        os.waitpid(pid, 0)
    expected = "returned [42, 43]" if how == "c" else "SIGKILL"
    assert expected in seen.decode(), seen
    assert b"foreground True" in seen


def read_until(terminal: int, pattern: bytes) -> bytes:
    seen = b""
    while not re.search(pattern, seen):
        assert select.select([terminal], [], [], DEADLINE_S)[0], seen
        try:
            data = os.read(terminal, 4096)
        except OSError:
            data = b""
        assert data, seen
        seen += data
    return seen
