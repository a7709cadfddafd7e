"""`unisono top`: what is shown once, or until `q`, and the keys."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import tty
from collections.abc import Iterator

import click
from rich.console import Console
from rich.live import Live

from unisono.errors import Misuse
from unisono.processes import command_of, state_of
from unisono.watch.top import Job, Verdicts, as_json, jobs
from unisono.watch.top_view import Window, render
from unisono.watch.whereabouts import whereabouts

_PERIOD_S = 1.0
_KEY = re.compile(r"\x1b[\[O][0-9]*[A-Za-z~]|.", re.S)
_NAMES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[5~": "page up", "\x1b[6~": "page down",
    "\x1b[H": "home", "\x1b[F": "end", "\x1b[1~": "home", "\x1b[4~": "end",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOH": "home", "\x1bOF": "end",
    "k": "up", "j": "down", " ": "page down", "g": "home", "G": "end",
}  # fmt: skip


@click.command()
@click.option("--once", is_flag=True, help="Show the jobs once and end.")
@click.option("--json", "wants_json", is_flag=True, help="The same as JSON, for scripts.")
@click.argument("pid", type=int, required=False)
def top(once: bool, wants_json: bool, pid: int | None) -> None:
    """Show the running jobs of this user on this machine, rank by rank.

    Finds every process that is in a group of unisono, or in one of another backend that is
    watched (unisono.watch); the jobs need not be prepared. A rank that is stuck is red, and one
    for which the others wait has a `!`; above the ranks stands what the watch says of it (where
    the rank is, if the job is watched). In a narrow terminal columns are left out.

    `s` shows stacks (of jobs that are watched), arrows, PgUp, PgDn, Home and End scroll, `q`
    and Ctrl-C quit. With PID, only the job of which that process is a rank or the launcher.
    """
    console, verdicts = Console(), Verdicts()
    found = jobs(pid, verdicts)
    if pid is not None and not found:
        raise Misuse(_why_not(pid))
    if wants_json:
        sys.stdout.write(as_json(found) + "\n")
    elif once or not console.is_terminal:
        console.print(render(found, {}, console.width))
    else:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is another q
            _run_in_terminal(pid, console, found, verdicts)


def _run_in_terminal(
    of: int | None, console: Console, found: list[Job], verdicts: Verdicts
) -> None:
    stacks: dict[int, tuple[str, ...]] = {}
    window = Window()
    shown = window.show(render(found, stacks, console.width), console)
    with _single_keys(), Live(shown, console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(window.show(render(found, stacks, console.width), console), refresh=True)
            keys = _keys(_PERIOD_S)
            if "q" in keys:
                return
            for key in keys:
                window.move(key)
            if not keys:
                found = jobs(of, verdicts)
            if "s" in keys:
                pids = [] if stacks else sorted({pid for job in found for pid in job.pids})
                stacks = {pid: whereabouts(pid).stack for pid in pids}


def _why_not(pid: int) -> str:
    """Why no job is shown for a process."""
    if state_of(pid).has_ended:
        return f"there is no process {pid}"
    if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
        return f"process {pid} ({command_of(pid)}) is another user's"
    return (
        f"process {pid} ({command_of(pid)}) is neither a rank nor the launcher of ranks: it is in "
        "no group of unisono, nor in one of another backend that is watched. `unisono top` shows "
        "every job"
    )


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Keys come at once and are not shown."""
    if not os.isatty(0):
        yield
        return
    before = termios.tcgetattr(0)
    try:
        tty.setcbreak(0)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _keys(timeout_s: float) -> list[str]:
    """The keys that were pressed, by name or letter; none if nobody does anything for so long."""
    ready, _, _ = select.select([0], [], [], timeout_s)
    if not ready:
        return []
    pressed = os.read(0, 64).decode(errors="replace")
    if not pressed:
        return ["q"]  # nobody is there any more
    return [_NAMES.get(key, key) for key in _KEY.findall(pressed)]
