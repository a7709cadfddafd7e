"""Every code block of the documentation runs, and writes what is shown (blocks.py says how)."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import unisono
from docs.blocks import (
    KNOWN,
    PAGES,
    ROOT,
    Block,
    blocks_of,
    first_line,
    further_lines,
    lines_missing,
    matches,
    output_of,
)
from unisono.comm.communicator import Communicator

BLOCKS = {page: blocks_of(page) for page in PAGES}
EVERY = [block for blocks in BLOCKS.values() for block in blocks]
TIMEOUT_S = 600
SHELL = ("sh", "console")


def is_python(block: Block, *marks: str) -> bool:
    return block.language == "python" and any(mark in block.marks for mark in marks)


IN_PROCESS = [
    block
    for block in EVERY
    if (block.language == "python" and block.marks.keys() <= {"prints"})
    or (block.language == "text" and "printed by" in block.marks)
]
ON_RANKS = [block for block in EVERY if is_python(block, "ranks")]


def is_dear(block: Block) -> bool:
    """Whether it needs processes of its own."""
    if "not run" in block.marks:
        return False
    return (
        block.language in SHELL
        or is_python(block, "run")
        or "file" in block.marks
        or "output of" in block.marks
    )


DEAR = [page for page, blocks in BLOCKS.items() if any(map(is_dear, blocks))]


def prose_before(block: Block) -> str:
    """The last paragraph before a block, and what is between that and the block."""
    lines = (ROOT / block.page).read_text().splitlines()[: block.line - 1]
    prose = re.sub(r"^```.*?^```$|<!--.*?-->", "", "\n".join(lines), flags=re.M | re.S).strip()
    return prose.rpartition("\n\n")[2]


def problems(block: Block, blocks: list[Block]) -> list[str]:
    found = [f"nobody knows the comment {name!r}" for name in block.marks if name not in KNOWN]
    if "not run" in block.marks:
        if len(block.marks["not run"].split()) < 2:
            found.append("it does not say why it is not run")
        return found
    before = blocks[: blocks.index(block)]
    if block.language == "text":
        is_output = bool(before) and output_of(before[-1], blocks) is block
        if not is_output and not block.marks.keys() & {"printed by", "output of"}:
            found.append("nothing is said of who writes this text")
    elif "then" in block.marks and "ranks" not in block.marks:
        found.append("only what runs on ranks is followed by further code")
    elif block.language not in ("python", *SHELL) and "file" not in block.marks:
        found.append(f"nothing runs {block.language or 'a block without a language'}")
    if "file" in block.marks:
        if f"`{block.marks['file']}`" not in prose_before(block):
            found.append(f"the text before it does not say that it is `{block.marks['file']}`")
        later = blocks[len(before) + 1 :]
        commands = [other.text for other in later if other.language in SHELL]
        commands += [other.marks.get("output of", "") for other in later]
        if not any(block.marks["file"] in command for command in commands):
            found.append(f"no later block runs {block.marks['file']}")
    return found


def test_every_block_says_how_it_is_run() -> None:
    assert len(EVERY) > 60
    found = [f"{block}: {what}" for block in EVERY for what in problems(block, BLOCKS[block.page])]
    assert not found, "\n".join(found)


def run_python(text: str, names: dict[str, Any], place: str) -> None:
    """Run a block statement by statement. If the comment after a statement is a value, or begins
    with a list, the statement must have that value."""
    lines = text.splitlines()
    for statement in ast.parse(text, place).body:
        name = ""
        if isinstance(statement, ast.Expr):
            name = "_result"
            statement = ast.copy_location(
                ast.Assign([ast.Name(name, ast.Store())], statement.value), statement
            )
            ast.fix_missing_locations(statement)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
        exec(compile(ast.Module([statement], []), place, "exec"), names)
        end = statement.end_lineno
        assert end is not None
        expected = value_in(lines[end - 1].partition("  # ")[2])
        if name and expected is not None and names[name] is not None:
            given = names[name]
            given = given.tolist() if hasattr(given, "tolist") else given
            assert given == expected[0], f"{place}: line {end} gives {given!r}"


def value_in(comment: str) -> tuple[Any] | None:
    """The value that a comment shows: everything up to a semicolon, or a list at its start."""
    bracketed = re.match(r"\[[^\]]*\](?=\s|;|$)", comment)
    shown = bracketed[0] if bracketed else comment.partition(";")[0].strip()
    try:
        value = ast.literal_eval(shown) if shown else None
    except (SyntaxError, ValueError):
        return None
    is_list_of_words = isinstance(value, tuple) and not shown.startswith("(")
    return None if value is None or is_list_of_words else (value,)


@pytest.mark.parametrize("block", IN_PROCESS, ids=str)
def test_runs_in_one_process(
    block: Block, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "unisono.launch(" in block.text:
        monkeypatch.setattr(unisono, "launch", request.getfixturevalue("fresh_pool").launch)
    names: dict[str, Any] = {"__name__": "__main__", "unisono": unisono, "torch": torch}
    printed = io.StringIO()
    code = block.marks.get("printed by", block.text)
    with contextlib.redirect_stdout(printed):
        run_python(code, names, block.place)
    shown = block.marks.get("prints")
    if block.language == "text":
        shown = block.text
    elif output := output_of(block, BLOCKS[block.page]):
        shown = output.text
    if shown is not None:
        assert matches(shown, printed.getvalue()), printed.getvalue()


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=pytest.mark.ranks(int(first_line(block.marks["ranks"]))))
        for block in ON_RANKS
    ],
    ids=str,
)
def test_runs_on_ranks(
    block: Block, comm: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"comm": comm, "numpy": numpy, "torch": torch, "unisono": unisono}
    exec(further_lines(block.marks["ranks"]), names)
    capsys.readouterr()
    run_python(block.text, names, block.place)
    output = output_of(block, BLOCKS[block.page])
    if output is not None and comm.rank == 0:
        assert matches(output.text, capsys.readouterr().out)
    exec(compile(block.marks.get("then", ""), f"{block.place}, then", "exec"), names)


class Folder:
    """A folder in which the commands of a page run, next to the repository's examples."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("examples", "benchmarks"):
            (path / name).symlink_to(ROOT / name)
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("UNISONO_")
        } | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "160",
            "TMPDIR": str(path),  # reports of runs that fail stay behind
            # An editable install is imported before pytest could rewrite it.
            "PYTEST_ADDOPTS": "-p no:cacheprovider -W ignore::pytest.PytestAssertRewriteWarning",
        }

    def run(self, script: str, place: str, exit_code: int | None = 0) -> tuple[str, str]:
        """What the script writes to stdout, and to stdout and stderr."""
        with subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=self.path, env=self._environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        ) as done:  # fmt: skip
            try:
                written = done.communicate(timeout=TIMEOUT_S)
            finally:
                if done.returncode is None:
                    os.killpg(done.pid, signal.SIGKILL)
        stdout, both = (
            text.replace(f"{self.path}/", "") for text in (written[0], "".join(written))
        )
        if exit_code is not None:
            assert done.returncode == exit_code, f"{place} ended with {done.returncode}\n{both}"
        return stdout, both

    def run_block(self, block: Block) -> None:
        marks = block.marks
        if "file" in marks:
            (self.path / marks["file"]).parent.mkdir(parents=True, exist_ok=True)
            (self.path / marks["file"]).write_text(block.text)
            return
        if "output of" in marks:
            _, both = self.run(marks["output of"], block.place, None)
            missing = lines_missing(block.text, both)
            assert not missing, f"{block}: not written: {missing}\nbut\n{both}"
            return
        script = marks.get("setup", "") + block.text
        if block.language == "python":
            program = self.path / "block.py"
            program.write_text(further_lines(marks["run"]) + block.text)
            script = f"{first_line(marks['run'])} block.py"
        stdout, both = self.run(script, block.place, int(marks.get("exit code", "0")))
        output = output_of(block, BLOCKS[block.page])
        if output is not None and marks.get("output") == "some lines":
            missing = lines_missing(output.text, both)
            assert not missing, f"{block}: not written: {missing}\nbut\n{both}"
        elif output is not None:
            assert matches(output.text, stdout), f"{block} wrote\n{both}"


@pytest.mark.docs
@pytest.mark.parametrize("page", DEAR)
def test_its_commands_run(page: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for block in filter(is_dear, BLOCKS[page]):
        folder.run_block(block)
