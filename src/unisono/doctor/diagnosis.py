"""The checks of `unisono doctor`, and how they are shown."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from unisono.doctor import known_variables, machine, software
from unisono.doctor.machine import Finding
from unisono.doctor.ranks import try_backend
from unisono.doctor.self_test import SelfTest
from unisono.show.table import BARE, build_table, to_json

_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}
_GRID = {**BARE, "show_header": False, "padding": (0, 2, 0, 0)}


def run_doctor(ranks: int, backends: Sequence[str], console: Console) -> bool:
    """Run all checks, print each result at once, and return whether nothing failed."""
    console.print("[bold]this machine[/]")
    found, tested = [], []
    for finding in _look(ranks):
        found.append(finding)
        advice = (f"\n{finding.advice}" if finding.advice else "", "bold")
        told = Text.assemble(finding.text, advice)
        row = (Text(*_MARKS[finding.level]), finding.topic.ljust(13), told)
        console.print(build_table(("<", "<", ""), [row], **_GRID))
    console.print("\n[bold]variables[/] that are set, or help to debug (--variables: all)")
    print_variables(console)
    for backend in backends:
        console.print(f"\n[bold]self-test[/]: every primitive on {ranks} ranks of {backend}")
        test = try_backend(backend, ranks)
        tested.append(test)
        console.print(Text(str(test), "" if test.ok else "red"), soft_wrap=True)
    console.print(f"\n{_sentence(found, tested)}")
    return _is_well(found, tested)


def print_json(ranks: int, backends: Sequence[str]) -> bool:
    """Print everything as JSON; returns whether nothing failed."""
    tested = [try_backend(backend, ranks) for backend in backends]
    found = list(_look(ranks))
    document = {
        "ok": _is_well(found, tested),
        "findings": found,
        "variables": known_variables.set_here(os.environ),
        "backends": [test.as_dict() for test in tested],
    }
    print(to_json(document))
    return _is_well(found, tested)


def print_variables(console: Console, every: bool = False) -> None:
    rows = []
    for name, meaning in known_variables.to_show(os.environ, every):
        value = os.environ.get(name)
        shown = ("-", "dim") if value is None else (known_variables.show(name, value), "bold")
        rows.append((name, Text(*shown), meaning))
    console.print(build_table(("<name", "value", "meaning"), rows, **BARE))


def _look(ranks: int) -> Iterator[Finding]:
    yield from software.findings()
    yield from machine.findings(ranks)
    yield from known_variables.findings(os.environ, software.has_gpu())


def _is_well(found: Sequence[Finding], tested: Sequence[SelfTest]) -> bool:
    return all(finding.level != "fail" for finding in found) and all(test.ok for test in tested)


def _sentence(found: Sequence[Finding], tested: Sequence[SelfTest]) -> str:
    failed = [finding.topic for finding in found if finding.level == "fail"]
    failed += [f"self-test of {test.backend}" for test in tested if not test.ok]
    doubtful = [finding.topic for finding in found if finding.level == "warn"]
    if failed:
        return f"[bold red]failed[/]: {escape(', '.join(failed))}"
    if doubtful:
        return f"[yellow]it works[/]; worth a look: {escape(', '.join(doubtful))}"
    return "[green]all is well[/]"
