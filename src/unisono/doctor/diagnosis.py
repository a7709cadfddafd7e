"""What `unisono doctor` looks at and prints."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from unisono.doctor import gpus, machine, software, variables
from unisono.doctor.findings import Finding, Level
from unisono.doctor.ranks import BackendTest, try_backend

MARKS = {
    Level.OK: "[green]ok  [/]",
    Level.WARN: "[yellow]warn[/]",
    Level.FAIL: "[bold red]FAIL[/]",
}


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found."""

    findings: tuple[Finding, ...]
    backends: tuple[BackendTest, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is red."""
        return all(finding.level is not Level.FAIL for finding in self.findings) and all(
            test.ok for test in self.backends
        )

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON; a time that was not taken is null."""
        backends = [
            {
                "backend": test.backend,
                "ok": test.ok,
                "tested": test.result is not None,
                "problem": test.problem,
                "checks": [
                    asdict(check)
                    | ({"microseconds": None} if math.isnan(check.microseconds) else {})
                    for check in (test.result.checks if test.result else ())
                ],
            }
            for test in self.backends
        ]
        set_here = {
            variable.name: value for variable, value in variables.relevant(os.environ) if value
        }
        return {
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "variables": set_here,
            "backends": backends,
        }


def run_doctor(ranks: int, backends: Sequence[str], console: Console) -> bool:
    """Look at everything, print it as it is found, and say whether nothing is red."""
    console.print("[bold]this machine[/]")
    found = []
    for finding in _look(ranks):
        found.append(finding)
        _print_finding(finding, console)
    console.print("\n[bold]variables[/] that are set or worth knowing (--variables: all)")
    print_variables(console)
    tested = []
    for backend in backends:
        console.print(f"\n[bold]self-test[/]: every primitive on {ranks} ranks of {backend}")
        tested.append(try_backend(backend, ranks))
        _print_tested(tested[-1], console)
    diagnosis = Diagnosis(tuple(found), tuple(tested))
    console.print(f"\n{_sentence(diagnosis)}")
    return diagnosis.ok


def print_json(ranks: int, backends: Sequence[str]) -> bool:
    """Print everything as JSON; whether nothing is red."""
    tested = tuple(try_backend(backend, ranks) for backend in backends)
    diagnosis = Diagnosis(tuple(_look(ranks)), tested)
    print(json.dumps(diagnosis.as_dict(), indent=2))
    return diagnosis.ok


def print_variables(console: Console, every: bool = False) -> None:
    """A table of variables: name, value here, meaning."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("name", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("meaning", ratio=1)
    for variable, value in variables.relevant(os.environ, every, every or gpus.has_gpu()):
        text = "[dim]-[/]" if value is None else f"[bold]{escape(value)}[/]"
        table.add_row(variable.name, text, escape(variable.meaning))
    console.print(table)


def _look(ranks: int) -> chain[Finding]:
    return chain(
        software.findings(),
        machine.findings(ranks),
        variables.findings(os.environ, gpus.has_gpu()),
    )


def _print_finding(finding: Finding, console: Console) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, min_width=13)
    table.add_column(overflow="fold")
    advice = f"\n[bold]{escape(finding.advice)}[/]" if finding.advice else ""
    table.add_row(MARKS[finding.level], escape(finding.topic), escape(finding.text) + advice)
    console.print(table)


def _print_tested(tested: BackendTest, console: Console) -> None:
    if tested.result is None:
        mark = MARKS[Level.WARN if tested.untestable else Level.FAIL]
        console.print(f"{mark}  {escape(tested.problem)}")
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "left", "right", "left"):
        table.add_column(justify=justify, overflow="fold")
    for check in tested.result.checks:
        took = "" if math.isnan(check.microseconds) else f"{check.microseconds:.1f} us"
        mark = MARKS[Level.OK if check.ok else Level.FAIL]
        table.add_row(mark, escape(check.primitive), took, escape(check.message))
    console.print(table)


def _sentence(diagnosis: Diagnosis) -> str:
    red = [finding.topic for finding in diagnosis.findings if finding.level is Level.FAIL]
    red += [f"self-test of {test.backend}" for test in diagnosis.backends if not test.ok]
    yellow = [finding.topic for finding in diagnosis.findings if finding.level is Level.WARN]
    yellow += [f"{test.backend} was not tested" for test in diagnosis.backends if test.untestable]
    if red:
        return f"[bold red]not well[/]: {escape(', '.join(red))}"
    if yellow:
        return f"[yellow]it works[/]; worth a look: {escape(', '.join(yellow))}"
    return "[green]all is well[/]"
