"""Check every property of the Promela models with spin, and that a broken protocol would violate
it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = 1800  # a busy machine takes minutes for the largest
MISSING = "spin, or a C compiler, is not installed: apt-get install spin gcc"

_LAST_WAIT = "    fi;\n    member[me] = true;"

_GIVES_UP = "(members & died) || LATE -> settle(FAILED)"

_FEWER_FAULTS = {("shrink.pml", "ends"): 1}
"""Models in which two faults would take too many states."""

BREAKS: dict[str, dict[str, tuple[str, str] | list[tuple[str, str]]]] = {
    "vote.pml": {
        "alike": (":: decision == 0 ->", ":: true ->"),  # the last proposal counts
        "ends": (":: ended -> failed = true", ""),  # no rank is told of a death
    },
    "rendezvous.pml": {
        "ends": (f"    :: LATE -> goto dead\n{_LAST_WAIT}", _LAST_WAIT),  # without a deadline
        "whole": ("if :: what == opened -> i++ :: else -> goto raise fi", "i++"),
        "told": ("lost[me] = true;", "skip;"),  # a rank that raises keeps what it had opened
    },
    "grow.pml": {
        "ends": ("died || WILL_FAIL -> settle(FAILED)", "false -> settle(FAILED)"),
        "alike": ("settle(FAILED) /* or", "what = FAILED /* or"),
        "only_made": ("settle(MADE)\n", "what = MADE\n"),
        "told": ("informed == EVERYONE -> removed", "true -> removed"),  # too early for some
    },
    "shrink.pml": {
        "ends": (f"{_GIVES_UP}\n        :: LOST", "false\n        :: LOST"),
        "one_group": [
            ("silent && COUNT(present) <= COUNT(silent)", "false"),  # without a majority
            ("board = 1;", "SAID(0, me) = WITHDRAWN; board = 1;"),  # silence mistaken for a goodbye
        ],
        "only_chosen": ("opened[AT(board, attempt)] == members -> settle", "true -> settle"),
    },
    "lines.pml": {
        "leave_is_no_loss": ("put(goodbye)", "skip"),
        "one_ending": ("heard_left[me] = true; line = false;", "heard_left[me] = true;"),
        "ends_are_heard": ("line && cut && empty(to[me])", "false"),  # silence is waited out
    },
}
"""Changes of each model that violate each property."""


def is_installed() -> bool:
    """Whether models can be checked here."""
    return shutil.which("spin") is not None and shutil.which("cc") is not None


def check_models() -> bool:
    """Check them all, and print what was found; returns whether everything is as expected."""
    is_right = True
    for name, breaks in BREAKS.items():
        text = (HERE / name).read_text()
        assert set(re.findall(r"^ltl (\w+)", text, re.M)) == set(breaks), name
        for claim, changes in breaks.items():
            faults = _FEWER_FAULTS.get((name, claim), 2)
            holds, states = _check(text, claim, faults)
            breaks_it = True
            for old, new in changes if isinstance(changes, list) else [changes]:
                assert text.count(old) == 1, (name, old)
                breaks_it &= not _check(text.replace(old, new), claim, faults)[0]
            verdict = "holds" if holds else "VIOLATED"
            noticed = "violated when broken" if breaks_it else "HOLDS WHEN BROKEN"
            print(
                f"  {name:15} {claim:17} {verdict} in {states:10,.0f} states, {noticed}", flush=True
            )
            is_right &= holds and breaks_it
    return is_right


def _check(text: str, claim: str, faults: int) -> tuple[bool, float]:
    """Whether a property holds in every execution of a model, and the number of states."""
    with tempfile.TemporaryDirectory(prefix="unisono-model-") as folder:
        (Path(folder) / "model.pml").write_text(text)
        _run("spin", f"-DMOST_FAULTS={faults}", "-a", "model.pml", folder=folder)
        _run("cc", "-O2", "-w", "-DCOLLAPSE", "-o", "pan", "pan.c", folder=folder)
        waits = re.search(rf"^ltl {claim} {{[^}}]*<>", text, re.M)  # some rank must continue
        fairness = ["-f"] if waits else []
        said = _run("./pan", "-a", *fairness, "-m1000000", "-N", claim, folder=folder)
    assert "max search depth too small" not in said, said
    states = re.search(r"(\S+) states, stored", said)
    assert states, said
    return "errors: 0" in said, float(states[1])


def _run(*command: str, folder: str) -> str:
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=LIMIT_S
    ).stdout
