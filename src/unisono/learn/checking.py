"""Runs the reader's functions, on ranks where they need some, and says what is wrong with them."""

import functools
import os
import re
import runpy
import signal
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from unisono.errors import RanksFailed, RanksTimedOut
from unisono.launcher.functions import launch
from unisono.learn.chapters import Chapter
from unisono.learn.checks import CHECKS, FunctionCheck
from unisono.learn.checks.requirements import Missing, Wrong
from unisono.world.world import init

NOT_YET = "not written yet"
_LAUNCH_S, _CALL_S = 120.0, 10.0


class Verdict(NamedTuple):
    """What a check says of a function: "" if it is right; a hint only if its result is wrong."""

    function: str
    problem: str
    hint: str = ""


def verdicts(chapter: Chapter, file: Path) -> Iterator[Verdict]:
    """Run the checks of a chapter on the reader's file."""
    for check in CHECKS[chapter.number - 1]:
        yield _verdict(chapter, check, file)


def _verdict(chapter: Chapter, check: FunctionCheck, file: Path) -> Verdict:
    slower = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
    try:
        for ranks in check.sizes or (1,):  # never in this process: what they wrote may end it
            args = (check, file, chapter.exercise, slower * _CALL_S)
            launch(_check_on_rank, ranks, args=args, threads=1, timeout=slower * _LAUNCH_S)
    except RanksTimedOut as error:
        return Verdict(check.function, str(error).partition("\n")[0])
    except RanksFailed as error:
        ending = error.endings[error.first]
        if not ending.traceback:
            return Verdict(check.function, str(error).partition("\n")[0])
        if (frame := f'{file.name}", line') not in ending.traceback:  # it had left the program
            ending = next((each for each in error.endings if frame in each.traceback), ending)
        where = f"rank {ending.rank} of {len(error.endings)}: " if check.sizes else ""
        return _explain(check, where, ending.traceback, file)
    return Verdict(check.function, "")


def _check_on_rank(check: FunctionCheck, file: Path, handed_out: str, call_s: float) -> None:
    ranks = [init(timeout_s=call_s)] if check.sizes else []
    with _ended_after(3 * call_s if ranks else call_s):
        check.run(_Functions(file, handed_out), *ranks)


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """What the reader wrote may never end: TimeoutError is then raised where it is."""

    def end(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s; this is where it was")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _explain(check: FunctionCheck, where: str, story: str, file: Path) -> Verdict:
    """From a traceback to a sentence: which rank, what, and the last line of the reader's."""
    last = story.rpartition("Traceback (most recent call last):\n")[2]
    raised = re.findall(r"^\S.*\Z", last, re.M | re.S) or story.splitlines()[-1:]  # below frames
    kind, _, said = raised[0].rstrip().partition(": ")
    name = kind.rpartition(".")[2]
    if name == "NotImplementedError":
        return Verdict(check.function, NOT_YET)
    is_ours = name in (Wrong.__name__, Missing.__name__)
    lines = re.findall(rf'{re.escape(file.name)}", line (\d+)', story)
    line = f" ({file.name}, line {lines[-1]})" if lines and not is_ours else ""
    problem = f"{where}{said}" if is_ours else f"{where}{name}: {said}".rstrip(": ")
    first, _, rest = problem.partition("\n")
    problem = first + line + (f"\n{rest}" if rest else "")
    return Verdict(check.function, problem, check.hint if name == Wrong.__name__ else "")


class _Functions:
    """The functions that the reader's file defines. What they return must be of the type that the
    exercise names."""

    def __init__(self, file: Path, handed_out: str) -> None:
        promised: dict[str, Any] = {}
        exec(compile(handed_out, "exercise", "exec", dont_inherit=True), promised)
        self._promised, self._file = promised, file
        self._written = runpy.run_path(str(file))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        written = self._written.get(name)
        if not callable(written):
            raise Missing(f"{self._file.name} does not define the function {name}")
        wanted = self._promised[name].__annotations__["return"]

        @functools.wraps(written)
        def call(*args: Any, **more: Any) -> Any:
            result = written(*args, **more)
            kind = typing.get_origin(wanted) or wanted
            if kind is not None and result is None:
                raise Missing(f"{name} returned None: is a `return` missing?")
            kinds = (float, int) if kind is float else kind
            if kind is not None and not isinstance(result, kinds):
                is_not = f"{type(result).__name__}, not a {kind.__name__}"
                raise Missing(f"{name} returned a {is_not}: {result!r}")
            return result

        return call
