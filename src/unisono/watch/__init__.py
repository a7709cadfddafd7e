"""The watch: which rank, which call and which line is to blame when communication hangs, is wrong
or slow.

`unisono.watch.start()` before the program joins its ranks (or UNISONO_WATCH=1 under `unisono run`)
starts it in this process; every rank should. Groups of unisono always keep records; groups of gloo,
nccl and mpi are watched from then on.

monitor.py                    the watching thread; settings.py: its settings
waiting.py, comparing.py      what it looks for: calls that wait too long, calls that differ
sight.py, journal.py          what this process sees of its job; the reports that it has made
exit_status.py                how this process ends
calls.py                      calls of all connected groups: who waits for whom
differences.py, hangs.py      from records to a verdict: calls that differ, ranks that wait
whereabouts.py                where a process is: from its stacks, else from the system
sanitizer/                    what makes numbers wrong without an error
alignment.py, steps.py        ranks whose calls are shifted, by their lines; within a step
absent.py                     ranks that do not come when a group is made
slow.py, garbage.py           a rank for which the others wait repeatedly; or for garbage collection
report.py, failure.py         reports: text, saving, loading, advice; the report of an exception
job_view.py                   the records of a whole job, over all hosts
stacks.py, stack_server.py    stacks, and how a process sends its stack to others
memory_files.py               anonymous files of watched processes, and rings of numbers in them
store_calls.py                the keys of torch's Store that it waits for, and has set
torch_group.py, attach.py     a torch process group that records, and how it is installed
summaries.py                  counts, times, who is late
tracing.py, traces.py         a trace: what it follows, over hosts; Chrome's and Perfetto's format
waits.py                      when this rank waits, and when its steps begin
profiles.py                   where the time of steps goes
profile_views.py              a profile as text, JSON and HTML, and what it advises
top.py                        the running jobs of this user, rank by rank
command.py                    `unisono top`: the jobs in a terminal
debug.py                      torch's and NCCL's own debug settings
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from unisono import torch_support
from unisono.comm.engine import compare_shapes, native
from unisono.comm.shared_memory import exceptions
from unisono.comm.shared_memory.record_reader import leave_reason, read_process
from unisono.errors import GroupError, UnisonoError
from unisono.variables import watch_is_wanted
from unisono.watch import exit_status, steps
from unisono.watch.comparing import tell_splits
from unisono.watch.failure import describe_own_end, report_of_error
from unisono.watch.job_view import FAREWELL, RECORDS, SPLITS, Answers, look_at_job, open_links
from unisono.watch.journal import discard_unless_failed
from unisono.watch.monitor import Monitor
from unisono.watch.report import RankReport, Report, load
from unisono.watch.settings import WatchSettings, settings_of
from unisono.watch.summaries import Summary, summarise
from unisono.watch.traces import Trace
from unisono.watch.tracing import TOPIC, inbox
from unisono.watch.whereabouts import Whereabouts

__all__ = [
    "RankReport",
    "Report",
    "Summary",
    "is_on",
    "load",
    "profile",
    "reports",
    "sanitize",
    "start",
    "step",
    "stop",
    "summary",
    "trace",
]

if TYPE_CHECKING:
    from unisono.watch.profiles import Profile
    from unisono.watch.sanitizer.session import SanitizerSession
    from unisono.watch.waits import WaitNotes

Answer = TypeVar("Answer")
_session: SanitizerSession | None = None
_waits: WaitNotes | None = None
_monitor: Monitor | None = None
_logger = logging.getLogger("unisono")


def start(*, hang_s: float | None = None, check: bool | None = None) -> None:
    """Watch this process's communication from now on. Starting twice changes the settings.

    A call that has waited for `hang_s` (30 s, or UNISONO_WATCH_HANG_S) is reported once, as a
    warning of the logger "unisono". `check` compares calls of other backends with the peers' before
    data moves, as unisono always does: all ranks then meet in each call, which takes time and
    synchronises more than the program itself. Reports are saved in the folder that
    UNISONO_WATCH_FOLDER names.

    Raises ValueError if `hang_s` is not positive, UnisonoError if one of these variables is
    invalid. See also `stop`, `reports`.

    >>> unisono.watch.start(hang_s=60)
    >>> unisono.watch.is_on()
    True
    >>> unisono.watch.stop()
    """
    _start(settings_of(hang_s, check))


def start_if_asked() -> None:
    """Start if the environment says so. An invalid value is only a warning here."""
    if watch_is_wanted():
        _start(settings_of(forgiving=True))


def _start(settings: WatchSettings) -> None:
    global _monitor
    was_on = _session is not None
    stop()
    settings = replace(settings, sanitize=settings.sanitize or was_on)
    _monitor = Monitor(settings)
    exceptions.diagnose = _report_of_failure
    torch_support.listener = _watch_torch
    compare_shapes(by_default=True)
    native.keep_sites(True)
    exit_status.note_exits()
    atexit.unregister(discard_unless_failed)
    atexit.register(discard_unless_failed)
    atexit.register(_at_exit)  # before that one
    if "torch" in sys.modules:
        _watch_torch()
    if settings.profile:
        _note_waits()
    _answer_other_hosts(
        {
            RECORDS: Answers().tell,
            SPLITS: tell_splits,
            FAREWELL: _monitor.accept_farewell,
            TOPIC: inbox.accept,
        }
    )


def stop() -> None:
    """Stop watching this process; watched groups of other backends stay watched. Does nothing if
    the watch is off. See also `start`.

    >>> unisono.watch.stop()
    >>> unisono.watch.is_on()
    False
    """
    global _monitor
    monitor, _monitor = _monitor, None
    exceptions.diagnose = torch_support.listener = None
    compare_shapes(by_default=False)
    native.keep_sites(False)
    steps.stop_counting()
    _stop_noting()
    _leave_sanitizer()
    atexit.unregister(_at_exit)
    if monitor is not None:
        if "unisono.watch.attach" in sys.modules:
            sys.modules["unisono.watch.attach"].detach()
        monitor.stop()
        _answer_other_hosts({})


def _answer_other_hosts(answers: dict[str, Callable[[Any], Any]]) -> None:
    """Answer other hosts' questions on these topics, and on no others; tell them of our end."""
    from unisono.comm.hosts import questions  # only while the watch is on

    for topic in (RECORDS, SPLITS, FAREWELL, TOPIC):
        questions.answers.pop(topic, None)
    questions.answers.update(answers)
    questions.last_words[:] = [_last_words] if answers else []


def _running() -> Monitor:
    """The watch of this process, which starts if it is off."""
    if _monitor is None:
        start()
    assert _monitor is not None
    return _monitor


def _watch_torch() -> None:
    """Once torch is imported: watch its groups, and count the steps of its optimizers."""
    if _monitor is not None:
        from unisono.watch.attach import attach

        settings = _monitor.settings
        steps.count_training_steps()
        attach(settings.check, _explain, _before_leaving, _follow_group)
        if _waits is not None:
            _waits.watch_torch()
        if settings.sanitize:
            _sanitize()


def _follow_group(group: Any) -> None:
    if _session is not None:
        _session.follow(group)
    if _waits is not None:
        _waits.follow(group)


def is_on() -> bool:
    """Whether this process is watched. See also `start`.

    >>> unisono.watch.start()
    >>> unisono.watch.is_on()
    True
    >>> unisono.watch.stop()
    """
    return _monitor is not None


def reports() -> list[Report]:
    """The reports about calls of this rank, the newest last; empty if nothing went wrong, or if the
    watch is off. See also `Report`, `start`.

    >>> unisono.watch.reports()
    []
    """
    return list(_monitor.journal.reports) if _monitor is not None else []


def summary(pid: int | None = None) -> Summary:
    """What the groups of this process (or of another one of this user, by its `pid`) called, over
    all their ranks: how often, how long, how fast, and which rank was late. It covers the last
    thousand calls of each rank. Any rank may call it alone.

    Raises UnisonoError if there is no such process, or its records cannot be read. See also
    `Summary`, `trace`.

    >>> pair = comm.split([0, 1], "example")
    >>> for _ in range(3):
    ...     pair.all_reduce(torch.ones(1000))
    >>> comm.barrier()  # so that the calls of both ranks are complete
    >>> [call.count for call in unisono.watch.summary().calls if call.group == pair.name]
    [3]
    """
    if pid is None and open_links():
        return summarise(look_at_job(lambda _: Whereabouts(), None, wants_stacks=False).groups)
    return summarise(read_process(os.getpid() if pid is None else pid))


def step() -> None:
    """Mark the beginning (or the end) of an iteration, in the thread that makes the calls, at the
    same place on every rank. Ranks that make different numbers of calls between two marks are then
    reported with the step, within a second. Without marks the steps of torch's optimizers count.
    See also `profile`.

    >>> for number in range(2):
    ...     unisono.watch.step()
    ...     print(number, unisono.all_reduce(torch.ones(1)))
    0 tensor([2.])
    1 tensor([2.])
    """
    steps.mark()


def sanitize() -> None:
    """Look for what makes numbers wrong without an error, from now on, on every rank: replicas and
    hyperparameters that differ, gradients that were not reduced or twice, tensors that are used
    before a call has finished, samplers that do not fit together. Starts the watch if it is off.
    Each finding is a report; a program that ends well although there is a proof ends with status 3.

    Call it before the program makes its models, optimizers and samplers. Raises TorchMissing if
    torch is not installed. See also `start`, `step`.

    >>> unisono.watch.sanitize()
    >>> unisono.watch.is_on()
    True
    >>> unisono.watch.stop()
    """
    torch_support.require_torch("unisono.watch.sanitize")
    _sanitize()


def _sanitize(*place: Any) -> None:
    """`place` is a store for the facts, this rank and the number of ranks; by default torch's."""
    global _session
    if _session is None:
        _running()
    if _session is None:  # `start` may have done it
        from unisono.watch.sanitizer.session import SanitizerSession

        _session = SanitizerSession(_tell_finding, *place)


@contextlib.contextmanager
def sanitized(store: Any, rank: int, size: int) -> Iterator[list[Report]]:
    """Sanitize a block that all ranks enter, with a store of its own; after it the list has this
    process's proofs."""
    was_on = _monitor is not None
    _leave_sanitizer()
    _sanitize(store, rank, size)
    assert _session is not None
    proofs, session = _session.proofs, _session
    wait_s: float | None = 0.0
    try:
        yield proofs
        wait_s = None
    finally:
        _finish_sanitizer(wait_s)
        if not was_on and session is not _session:
            stop()


def _tell_finding(report: Report) -> None:
    if _monitor is not None:
        _monitor.journal.tell(report)


def _leave_sanitizer() -> None:
    """Stop it without an outcome."""
    global _session
    session, _session = _session, None
    if session is not None:
        session.leave()


def _finish_sanitizer(wait_s: float | None = None) -> bool:
    """Whether any rank has a proof."""
    global _session
    session, _session = _session, None
    return session is not None and session.finish(wait_s)


@contextlib.contextmanager
def trace(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write the calls inside the `with` block to a file, `path`, for chrome://tracing and
    ui.perfetto.dev: all ranks on one clock, a row for each rank and group, with bytes and how late
    each rank was. All ranks enter it; the lowest that was not killed writes.
    A file that cannot be written is a warning.

    Raises UnisonoError if the file's folder does not exist. See also `profile`, `summary`.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.gettempdir(), f"trace-{os.getppid()}.json")
    >>> with unisono.watch.trace(path):
    ...     comm.all_reduce(torch.ones(1000))
    >>> unisono.watch.stop()
    >>> if comm.rank == 0:
    ...     assert "all_reduce" in open(path).read()
    ...     os.remove(path)
    """
    with _running().tracing.during(Trace(path)):
        yield


@contextlib.contextmanager
def profile(path: str | os.PathLike[str] | None = None) -> Iterator[list[Profile]]:
    """Find out where the time of the steps inside the `with` block goes: computation,
    communication that was hidden and exposed, waits for slow ranks. All ranks enter it. After the
    block the list has a Profile on the lowest rank, and is empty on the others; `path` is a file
    for it (.json, .html, or text). A file that cannot be written is a warning. It ends a trace.

    Steps begin at `unisono.watch.step()`, else with the forward passes of DDP or the steps of
    optimizers, else they are found from the period of the calls.

    Raises UnisonoError if the file's folder does not exist.

    >>> with unisono.watch.profile() as profiles:
    ...     for _ in range(5):
    ...         unisono.watch.step()
    ...         comm.all_reduce(torch.ones(1000))
    >>> if comm.rank == 0:
    ...     assert str(profiles[0]).startswith("medians of")
    >>> unisono.watch.stop()
    """
    from unisono.watch.profiles import ProfileTrace

    found: list[Profile] = []
    monitor = _running()
    trace = ProfileTrace(path, {}, found.append)
    waits = _note_waits()
    try:
        with monitor.tracing.during(trace):
            yield found
    finally:
        waits.users -= 1
        if waits is _waits and not waits.users:
            _stop_noting()


def _note_waits() -> WaitNotes:
    global _waits
    if _waits is None:
        from unisono.watch.waits import WaitNotes

        _waits = WaitNotes()
    _waits.users += 1
    return _waits


def _stop_noting() -> None:
    global _waits
    waits, _waits = _waits, None
    if waits is not None:
        waits.close()


def _ask(question: Callable[[Monitor], Answer]) -> Answer | None:
    """What the monitor answers; None if the watch is off. Whatever fails in it, the program goes on
    as it would without the watch, and gets its own exception."""
    if _monitor is None:
        return None
    try:
        return question(_monitor)
    except Exception:
        _logger.debug("unisono.watch: a look at the records failed", exc_info=True)
        return None


def _report_of_failure(error: GroupError) -> Report | None:
    """The report that an exception carries. A mismatch is logged at once: the exception may be
    shown much later."""
    report = _ask(lambda monitor: report_of_error(error, monitor.sight.where))
    if report is not None and _monitor is not None:
        _monitor.journal.save(report, "raised")
        here = [call is not None for call in getattr(error, "calls", ())]
        if True in here and error.rank == here.index(True):
            _monitor.journal.log(report)
    return report


def _explain(group: Any) -> Report | None:
    """Why a call of a watched group failed, from the records."""
    return _ask(lambda monitor: monitor.explain(group))


def _before_leaving() -> None:
    """A watched group is about to be destroyed, or all are."""
    _ask(Monitor.look_for_differences)


def _last_words() -> str:
    """Look once more while other hosts can be asked; returns how this process ends."""
    _before_leaving()
    _ask(lambda monitor: monitor.tell_failures(getattr(sys, "last_value", None)))
    return describe_own_end()


def _at_exit() -> None:
    """Log why this process ends, and calls that failed without an exception."""
    if _monitor is not None:
        with contextlib.suppress(UnisonoError, OSError):
            leave_reason(describe_own_end())
        _last_words()
        has_proof = _finish_sanitizer()
        stop()
        if has_proof and not exit_status.has_failed():
            exit_status.end_with(exit_status.STATUS)


def _forget() -> None:
    """A forked child is not watched: the thread and the groups belong to the parent. The stack
    server is dropped, so that the child's own is found if it calls `start`."""
    global _monitor
    monitor, _monitor = _monitor, None
    exceptions.diagnose = torch_support.listener = None
    _leave_sanitizer()
    if monitor is not None:
        monitor.leave_to_parent()
    _stop_noting()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
