"""Run the parity matrix on gloo and on unisono, and write what happened to docs/parity.md.

gloo ends the process in some cases and overwrites its memory in others, so ranks are forked and
expendable: they write the outcome of each case to a pipe, and after a case that did not succeed on
every rank, new ranks continue with the next. No failure in one case can affect another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import signal
import tempfile
import time
from collections import Counter
from datetime import date, timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from commit import commit
from torch_parity.calls import check_call
from torch_parity.matrix import Case, cases
from torch_parity.memory import OverwrittenError, ScratchedError, WrongResultError
from torch_parity.page import MEANINGS, Outcome, page

LIMIT_S = 10.0
PEER_LIMIT_S = 0.5
"""How long the other ranks may take once one has failed."""


def outcome_of(case: Case) -> Outcome:
    """Run a case on this rank."""
    try:
        check_call(case)
    except OverwrittenError as error:
        return Outcome("overwrites", str(error))
    except ScratchedError as error:
        return Outcome("scratches", str(error))
    except WrongResultError as error:
        return Outcome("wrong" if case.has_meaning else "accepts", str(error))
    except Exception as error:
        if not case.has_meaning:
            return Outcome("right")
        return Outcome("refuses", f"{type(error).__name__}: {error}")
    return Outcome("right" if case.has_meaning else "accepts")


# -- ranks -----------------------------------------------------------------------------------------


def _be_a_rank(
    backend: str, store: str, rank: int, size: int, first: int, pipe: int, permits: int
) -> None:
    """Run the cases from `first` on and write a line about each. After a failure, wait until told
    to continue: a peer may still be in the case."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)  # gloo reports its abort there
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT_S),
    )
    os.write(pipe, b"null\n")
    for case in islice(cases(), first, None):
        outcome = outcome_of(case)
        line = json.dumps([outcome.what, outcome.text[:300]])
        os.write(pipe, f"{line}\n".encode())
        if outcome.what != "right":
            os.read(permits, 1)


class _Rank:
    """A rank as its parent sees it."""

    def __init__(self, backend: str, store: str, rank: int, size: int, first: int) -> None:
        self.pipe, theirs = os.pipe()
        permits, self._permits = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                _be_a_rank(backend, store, rank, size, first, theirs, permits)
            finally:
                os._exit(0)
        os.close(theirs)
        os.close(permits)
        self._rest = b""
        self.said: list[Outcome | None] = []
        """None once it has joined the group, then an outcome for each case."""
        self.is_over = False

    def read(self) -> None:
        data = os.read(self.pipe, 1 << 16)
        self.is_over = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.said += [Outcome(*fields) if (fields := json.loads(line)) else None for line in lines]

    def go_on(self) -> None:
        os.write(self._permits, b".")

    def outcome(self, number: int) -> Outcome | None:
        return self.said[number] if len(self.said) > number else None

    def end(self) -> str:
        """End it, if it is still running; returns the name of its signal."""
        if not self.is_over:
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pipe)
        os.close(self._permits)
        return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "exit"


def _run_from(backend: str, size: int, first: int, last: int) -> list[Outcome]:
    """The outcomes of cases from `first` on, as far as they can be trusted: a failure on ranks that
    have raised before is repeated on new ones."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [_Rank(backend, store, rank, size, first) for rank in range(size)]
        found: list[Outcome] = []
        refused: Outcome | None = None
        while first + len(found) < last:
            outcomes = _read_outcomes(ranks, len(found) + 1)
            outcome = _worst(outcomes)
            alike = outcome.what == "refuses" and outcomes == [outcome] * size
            if outcome.what != "right" and refused not in (None, outcome):
                break
            found.append(outcome)
            if outcome.what != "right" and not alike:
                break
            if alike:
                refused = outcome
                for rank in ranks:
                    rank.go_on()
        ends = [rank.end() for rank in ranks]
    if found and found[-1].what == "dies":
        found[-1] = Outcome("dies", next((how for how in ends if how != "SIGKILL"), "exit"))
    return found


def _read_outcomes(ranks: list[_Rank], number: int) -> list[Outcome]:
    """What the ranks report about a case; ranks that wait for a failed one report nothing."""
    heard_s = time.monotonic()
    while True:
        found = [outcome for rank in ranks if (outcome := rank.outcome(number)) is not None]
        if len(found) == len(ranks):
            return found
        if any(rank.is_over for rank in ranks):
            return [*found, Outcome("dies")]
        failed = any(outcome.what != "right" for outcome in found)
        left_s = heard_s + (PEER_LIMIT_S if failed else 2 * LIMIT_S) - time.monotonic()
        ready = select.select([rank.pipe for rank in ranks], [], [], max(0, left_s))[0]
        if not ready:
            return found if failed else [*found, Outcome("hangs")]
        for rank in ranks:
            if rank.pipe in ready:
                rank.read()
                heard_s = time.monotonic()


def _worst(outcomes: list[Outcome]) -> Outcome:
    return min(outcomes, key=lambda outcome: list(MEANINGS).index(outcome.what))


def run(backend: str, size: int) -> list[Outcome]:
    """The outcome of each case of the matrix."""
    last = len(list(cases()))
    found: list[Outcome] = []
    while len(found) < last:
        found += _run_from(backend, size, len(found), last)
        counts = Counter(outcome.what for outcome in found)
        print(f"\r{backend}: {len(found)} of {last} {dict(counts)}", end="", flush=True)
    print()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/parity.md"))
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    every, at = list(cases()), commit()
    results = {backend: run(backend, arguments.ranks) for backend in ("gloo", "unisono")}
    where = (
        f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} on {platform.machine()}, {arguments.ranks} ranks, {date.today()}, "
        f"commit {at}"
    )
    arguments.output.write_text(page(every, results, where))


if __name__ == "__main__":
    main()
