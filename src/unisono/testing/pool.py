"""Warm ranks: processes that are started once and kept between tests."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from unisono.testing.process import Nursery, PooledRank, let_write
from unisono.testing.protocol import Collected, Exit, Ran, RunTest, Unable

START_S = 120.0
"""Time limit to start a rank and collect a file, with the imports of the tests."""

GRACE_S = 5.0
"""How long the other ranks may run after one has failed or died."""

STOP_S = 10.0
"""How long ranks may take to tear down their session's fixtures."""

Ending = Ran | Unable
"""How a test ended on one rank."""


class Pool:
    """The ranks of one pytest session; the pool grows to the largest number needed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._ranks: dict[int, PooledRank] = {}
        self._nursery: Nursery | None = None
        factory = getattr(config, "_tmp_path_factory", None)
        self._own_folder = factory is None  # -p no:tmpdir
        folder = tempfile.mkdtemp(prefix="unisono-") if factory is None else factory.mktemp("ranks")
        self.folder = Path(folder)

    def close(self, *, gently: bool) -> None:
        """End every rank, after it has torn down the fixtures of its session."""
        if gently:
            for rank in self._ranks.values():
                rank.send(None)
            end = time.monotonic() + STOP_S
            for rank in self._ranks.values():
                rank.join(max(0.0, end - time.monotonic()))
        for number in list(self._ranks):
            self._end(number)
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, number: int) -> None:
        self._ranks.pop(number).end()

    def _lost(self, number: int, answer: object, late: str) -> Unable:
        """Give up a rank that did not answer properly, and say why."""
        gone = answer if isinstance(answer, Unable) else self._ranks[number].describe_end(late)
        self._end(number)
        return gone

    # -- preparing ---------------------------------------------------------------------------

    def prepare(self, path: str, later: Sequence[str | None]) -> list[Unable | None]:
        """Prepare a rank for each entry of `later`: start it and collect the file `path`, and the
        file of its next test. Returns, for each rank, why it cannot run tests of `path`."""
        try:
            for number in range(len(later)):
                self._start(number)
        except OSError as error:  # out of memory or descriptors
            return [Unable("could not be started", str(error)) for _ in later]
        missing = [
            sorted({path, then or path} - self._ranks[number].files.keys())
            for number, then in enumerate(later)
        ]
        for number, files in enumerate(missing):
            for file in files:
                self._ranks[number].send(file)
        return [self._await_files(number, path, files) for number, files in enumerate(missing)]

    def _start(self, number: int) -> None:
        rank = self._ranks.get(number)
        if rank is not None and rank.is_alive():
            return
        if rank is not None:
            self._end(number)
        if self._nursery is not None and not self._nursery.is_alive():
            self._nursery.close()
            self._nursery = None
        if self._nursery is None:
            self._nursery = Nursery(self.folder)
        self._ranks[number] = PooledRank(number, self._config, self.folder, self._nursery)

    def _await_files(self, number: int, path: str, missing: list[str]) -> Unable | None:
        rank = self._ranks[number]
        for file in missing:
            answer = rank.answer(START_S)
            if not isinstance(answer, Collected):
                late = f"starting it and collecting {file} took longer than {START_S:g} s"
                return self._lost(number, answer, late)
            rank.files[file] = answer.error
        error = rank.files[path]
        return None if error is None else Unable("the file could not be collected", error)

    # -- running ---------------------------------------------------------------------------------

    def run(self, runs: Sequence[RunTest], timeout_s: float) -> list[Ending]:
        """Run one test on ranks 0, 1, ...; returns when each has answered, died or been killed."""
        waiting = {number: self._ranks[number] for number in range(len(runs))}
        for number, run in enumerate(runs):
            waiting[number].send(run)
        endings: dict[int, Ending] = {}
        end, why = time.monotonic() + timeout_s, f"the test's deadline of {timeout_s:g} s"
        while waiting:
            watched = [end for rank in waiting.values() for end in (rank.channel, rank.sentinel)]
            ready = wait(watched, max(0.0, end - time.monotonic()))
            answered = [
                number
                for number, rank in waiting.items()
                if rank.channel in ready or rank.sentinel in ready
            ]
            if not answered and time.monotonic() >= end:
                endings.update(self._give_up(list(waiting.values()), why))
                break
            for number in answered:
                del waiting[number]
                endings[number] = self._ending(number)
                if _is_bad(endings[number]) and end > time.monotonic() + GRACE_S:
                    end = time.monotonic() + GRACE_S
                    why = f"{GRACE_S:g} s after rank {number} failed"
        return [endings[number] for number in range(len(runs))]

    def _ending(self, number: int) -> Ending:
        answer = self._ranks[number].answer(0.0)
        if isinstance(answer, Exit):
            self.close(gently=False)
            pytest.exit(answer.reason, answer.returncode)
        if isinstance(answer, Unable) and answer.broken:
            self._end(number)
        if isinstance(answer, Ran | Unable):
            return answer
        return self._lost(number, answer, "no answer")

    def _give_up(self, ranks: list[PooledRank], why: str) -> dict[int, Unable]:
        for rank in ranks:
            rank.ask_for_stacks()
        let_write(ranks)
        silence = "It did not write its stacks. Has it been stopped?"
        gone = {
            rank.number: Unable(f"not done by {why}", rank.stacks() or silence) for rank in ranks
        }
        for number in gone:
            self._end(number)
        return gone


def _is_bad(ending: Ending) -> bool:
    """Whether the other ranks may now wait for a rank that never comes."""
    if not isinstance(ending, Ran):
        return True
    return any(
        report["outcome"] == "failed" or (report["outcome"] == "skipped" and "wasxfail" in report)
        for report in ending.reports
    )
