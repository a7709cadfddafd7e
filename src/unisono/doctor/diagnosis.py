"""The checks of `unisono doctor`, how they are shown, and the self-test on new ranks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import cast

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from unisono import variables
from unisono.comm.shared_memory.memory_transport import SharedMemory
from unisono.doctor import known_variables, machine, software
from unisono.doctor.machine import Finding
from unisono.doctor.self_test import Check, SelfTest, self_test
from unisono.errors import RanksFailed, RanksTimedOut, TorchMissing
from unisono.launcher.functions import launch
from unisono.show.table import BARE, build_table, to_json
from unisono.world.environment import read_rank_info
from unisono.world.world import resolve

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


# -- the self-test on new processes of this machine ------------------------------------------------

CALL_S = 20.0
"""How long a call may take before the backend counts as stuck."""
LAUNCH_S = 90.0


def try_backend(backend: str, ranks: int) -> SelfTest:
    """Start ranks that run the self-test. If they fail, there is one check, "start", that says
    why."""
    problem = _unavailable(backend, ranks)
    if not problem:
        with tempfile.TemporaryDirectory(prefix="unisono-") as folder:
            try:
                results = launch(
                    _run, ranks, (backend, folder), threads=1, timeout=LAUNCH_S, capture=True
                )
            except (RanksFailed, RanksTimedOut) as error:
                problem = str(error)
            else:
                # rank 0's, unless another rank saw more than it could send through the group
                return min(results, key=lambda result: result.ok)
    return SelfTest("world", backend, 0, ranks, (Check("start", False, message=problem),))


def _unavailable(backend: str, ranks: int) -> str:
    from unisono.torch_backend.autoload import backend_problem

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
        result = self_test(show=False)
        if backend == "unisono" and info.size > 1 and result.ok:
            result = replace(result, checks=(*result.checks, _exchange_large_tensors()))
        return result
    finally:
        dist.destroy_process_group()


def _exchange_large_tensors() -> Check:
    """Whether the kernel copies large tensors from rank to rank."""
    import torch

    comm = resolve(None)
    given = torch.full((comm.size << 16,), float(comm.rank))
    out = torch.empty_like(given)
    comm.all_to_all(out, given)
    wanted = torch.arange(comm.size).repeat_interleave(1 << 16)
    is_right = torch.equal(out, wanted.float())
    if cast(SharedMemory, comm.transport).group.state()["reads"]:
        return Check("large tensors", is_right, message="copied once, by the kernel")
    is_off = variables.READ_PEERS.read_or_warn() is False
    cause = f"{variables.READ_PEERS.name}=0" if is_off else "the kernel does not allow it"
    return Check("large tensors", is_right, message=f"copied twice: {cause}")
