"""The command `unisono`: its table of commands, and what --help imports."""

from __future__ import annotations

import signal
import subprocess
import sys

import click
from click.testing import CliRunner

from unisono.cli import COMMANDS, main
from user_programs import DEADLINE_S, plain_environment, run_python


def test_the_table_says_what_the_commands_say() -> None:
    context = click.Context(main)
    for name, (module, sentence) in COMMANDS.items():
        command = main.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.callback is not None
        assert command.callback.__module__ == module
        assert command.get_short_help_str(limit=200) == sentence
    listed = CliRunner().invoke(main, ["--help"]).stdout
    assert all(f"\n  {name}  " in listed for name in COMMANDS)
    for wrong, right in (("demmo", "demo"), ("rum", "run")):
        refused = CliRunner().invoke(main, [wrong])
        assert refused.exit_code == 2
        assert f"No such command '{wrong}'. Did you mean '{right}'?" in refused.stderr


def test_the_usage_of_bench_names_no_hidden_command() -> None:
    shown = CliRunner().invoke(main, ["bench", "--help"], prog_name="unisono").stdout
    assert shown.splitlines()[0] == "Usage: unisono bench [OPTIONS] [COLLECTIVES]..."


def test_ctrl_c_is_no_verdict() -> None:
    """The exit code is 130, as in a shell after SIGINT; 1 means that a check failed."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "unisono", "doctor"],
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any(line.startswith("self-test") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "Aborted!"


def test_help_imports_neither_torch_nor_numpy() -> None:
    done = run_python("-c", PROBE)
    assert done.stdout.splitlines() == ["[]", "[]"], done.stderr


PROBE = """
import sys
from click.testing import CliRunner
from unisono.cli import main
assert CliRunner().invoke(main, ["--help"]).exit_code == 0
print([name for name in sys.modules if name.startswith("unisono.") and "command" in name])
for args in (["doctor", "--help"], ["demo", "--help"], ["run", "--help"], ["bench", "--help"]):
    assert CliRunner().invoke(main, args).exit_code == 0
print([name for name in ("torch", "numpy", "unisono.doctor.diagnosis") if name in sys.modules])
"""
