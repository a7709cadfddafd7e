"""What `unisono doctor` looks at, the self-test on new ranks, and how both are shown."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from unisono.doctor import known_variables, machine, software
from unisono.doctor.machine import Finding
from unisono.doctor.self_test import Check, SelfTest, debug_communication
from unisono.errors import RanksFailed, RanksTimedOut, TorchMissing
from unisono.launcher.functions import launch
from unisono.torch_backend.autoload import backend_problem
from unisono.world.environment import read_rank_info

CALL_S = 20.0
"""How long a call may take before the backend counts as stuck."""
LAUNCH_S = 90.0
_MARKS = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "fail": "[bold red]FAIL[/]"}


def run_doctor(ranks: int, backends: Sequence[str], console: Console) -> bool:
    """Look at everything, print it as it is found, and say whether nothing failed."""
    console.print("[bold]this machine[/]")
    found, tested = [], []
    for finding in _look(ranks):
        found.append(finding)
        advice = f"\n[bold]{escape(finding.advice)}[/]" if finding.advice else ""
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, min_width=13)
        grid.add_column(overflow="fold")
        grid.add_row(_MARKS[finding.level], escape(finding.topic), escape(finding.text) + advice)
        console.print(grid)
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
    """Print everything as JSON; whether nothing failed."""
    tested = [try_backend(backend, ranks) for backend in backends]
    found = list(_look(ranks))
    document = {
        "ok": _is_well(found, tested),
        "findings": [asdict(finding) for finding in found],
        "variables": known_variables.set_here(os.environ),
        "backends": [test.as_dict() for test in tested],
    }
    print(json.dumps(document, indent=2))
    return _is_well(found, tested)


def print_variables(console: Console, every: bool = False) -> None:
    """A table of variables: name, value here, meaning."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("name", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("meaning", ratio=1)
    for name, meaning in known_variables.to_show(os.environ, every):
        value = os.environ.get(name)
        text = "[dim]-[/]" if value is None else f"[bold]{escape(value)}[/]"
        table.add_row(name, text, escape(meaning))
    console.print(table)


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
        return f"[bold red]not well[/]: {escape(', '.join(failed))}"
    if doubtful:
        return f"[yellow]it works[/]; worth a look: {escape(', '.join(doubtful))}"
    return "[green]all is well[/]"


# -- the self-test on new ranks --------------------------------------------------------------------


def try_backend(backend: str, ranks: int) -> SelfTest:
    """Start ranks that run the self-test on this backend of torch.distributed. If that fails, the
    only check is "start", which says why."""
    problem = _unavailable(backend, ranks)
    if not problem:
        with tempfile.TemporaryDirectory(prefix="unisono-") as folder:
            given = (backend, folder)
            try:
                results = launch(_run, ranks, given, threads=1, timeout=LAUNCH_S, capture=True)
            except (RanksFailed, RanksTimedOut) as error:
                problem = str(error)
            else:
                # rank 0's, unless another rank saw more than it could tell through the group
                return min(results, key=lambda result: result.ok)
    return SelfTest("world", backend, 0, ranks, (Check("start", False, message=problem),))


def _unavailable(backend: str, ranks: int) -> str:
    try:
        problem = backend_problem(backend)
    except TorchMissing as error:
        return str(error)
    if problem or backend != "nccl":
        return problem
    import torch

    gpus = torch.cuda.device_count()
    return "" if gpus >= ranks else f"nccl needs a GPU for each of {ranks} ranks; there are {gpus}"


def _run(backend: str, folder: str) -> SelfTest:
    """Run by every rank."""
    import torch
    import torch.distributed as dist

    info = read_rank_info()
    assert info is not None
    if backend == "nccl":
        torch.cuda.set_device(info.rank)
    store = dist.FileStore(os.path.join(folder, backend), info.size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=CALL_S)
    dist.init_process_group(
        backend, store=store, rank=info.rank, world_size=info.size, timeout=limit
    )
    try:
        return debug_communication(show=False)
    finally:
        dist.destroy_process_group()
