"""From the way the ranks ended to an exception."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.errors import RanksFailed, RanksTimedOut, name_number, name_ranks, plural
from unisono.launcher.output import Lines, Stream
from unisono.launcher.process import RankProcess
from unisono.launcher.protocol import Failure
from unisono.processes import describe_exit, signal_name
from unisono.watch.stacks import from_faulthandler, is_users

_HEAD_START_S = 0.02
"""Peers may report a death before the kernel does."""

_MOST_LINES = 20
"""Lines of captured output in a message."""

_WATCHING = re.compile(r'/unisono/watch/monitor\.py", line \d+ in _run$', re.MULTILINE)

_NOTE = re.compile(r"^((?:E +)?)unisono\.watch: .*\n(?:\1  .*\n)*", re.MULTILINE)
"""As Python prints it, or as pytest does, with an E before each line."""


@dataclass(frozen=True)
class RankEnding:
    """How one rank of a launch ended: `rank`, and whether it `failed`.

    `how` says it in a few words. `traceback` is that of an exception, `stack` where the rank was
    when it crashed or was killed, `exit_code` as a shell would have it (128 + the signal's number),
    `signal` the name of the signal that killed it, `stdout` and `stderr` the end of its output,
    `host` the name of its host, "" if all are on this machine. See also `RanksFailed`.

    >>> unisono.RankEnding(rank=1, how="was killed", failed=True, exit_code=137).how
    'was killed'
    """

    rank: int
    how: str
    failed: bool
    exit_code: int
    signal: str = ""
    traceback: str = ""
    stack: str = ""
    stdout: str = ""
    stderr: str = ""
    host: str = ""


@dataclass
class Rank:
    """One rank's process, and what is known of it."""

    number: int
    process: RankProcess
    lines: dict[Stream, Lines]
    messages: bytearray = field(default_factory=bytearray)
    stack: bytearray = field(default_factory=bytearray)
    started: bool = False
    finished: bool = False
    """Whether its program has finished and only the process remains."""
    value: bytearray | None = None
    failure: Failure | None = None
    failed_at: float | None = None
    exit_code: int | None = None
    """As subprocess has it: negative for a signal; None while the process lives."""
    ended_by_us: bool = False


def ranks_failed(ranks: Sequence[Rank], captured: bool) -> RanksFailed:
    """The exception for a launch some of whose ranks failed."""
    endings = [_ending(rank) for rank in ranks]
    first = min((rank for rank in ranks if rank.failed_at is not None), key=_moment).number
    summary = _summary(ranks[first], endings[first])
    where = f" on {endings[first].host}" if endings[first].host else ""
    failure = ranks[first].failure
    if failure is not None and not failure.is_own:  # it says which ranks are to blame
        sentence = summary.replace("this rank", f"rank {first}{where}")
    else:
        of = name_number(len(ranks), "rank")
        sentence = f"rank {first}{where} failed first, of {of}: {summary}"
    return RanksFailed(_message(sentence, endings, first, captured), first=first, endings=endings)


def ranks_timed_out(ranks: Sequence[Rank], timeout_s: float, captured: bool) -> RanksTimedOut:
    """The exception for a launch that took too long."""
    endings = [_ending(rank) for rank in ranks]
    late = [ending.rank for ending in endings if ending.failed]
    sentence = (
        f"not done within {timeout_s:g} s: {name_ranks(late)} of {name_number(len(ranks), 'rank')}"
    )
    first = late[0] if late else -1
    return RanksTimedOut(_message(sentence, endings, -1, captured), first=first, endings=endings)


def ranks_given_up(
    ranks: Sequence[Rank], sentence: str, culprit: int, captured: bool
) -> RanksFailed:
    """The exception for a launch that could not end well."""
    endings = [_ending(rank) for rank in ranks]
    return RanksFailed(_message(sentence, endings, -1, captured), first=culprit, endings=endings)


def _moment(rank: Rank) -> tuple[bool, float]:
    """When a rank failed; those that failed because of another rank come last."""
    assert rank.failed_at is not None
    follows = rank.failure is not None and rank.failure.follows
    killed = rank.exit_code is not None and rank.exit_code < 0
    return follows, rank.failed_at - (_HEAD_START_S if killed else 0.0)


def _ending(rank: Rank) -> RankEnding:
    code = rank.exit_code or 0
    if rank.ended_by_us and rank.failure is not None:
        code = rank.failure.exit_code  # it had failed before
    return RankEnding(
        rank=rank.number,
        how=_how(rank, code),
        failed=rank.failed_at is not None or (rank.ended_by_us and rank.value is None),
        exit_code=128 - code if code < 0 else code,
        signal=signal_name(-code) if code < 0 and not rank.ended_by_us else "",
        traceback=rank.failure.traceback.rstrip() if rank.failure else "",
        stack=_readable(rank.stack.decode(errors="replace")),
        stdout=rank.lines["stdout"].tail,
        stderr=rank.lines["stderr"].tail,
        host=rank.process.host,
    )


def _how(rank: Rank, code: int) -> str:
    ending = describe_exit(code)
    if rank.failure is not None:
        return "raised"
    if rank.value is not None:
        return "returned" if code == 0 or rank.ended_by_us else f"returned, and then {ending}"
    if rank.ended_by_us and rank.finished:
        return "finished the program, and was terminated while exiting"
    if rank.ended_by_us:
        return (
            "was terminated while still running"
            if rank.started
            else "was terminated while starting"
        )
    if rank.process.lost:
        return rank.process.lost
    if rank.failed_at is not None and code == 0:
        return f"{ending} and returned nothing"
    return ending


def _summary(rank: Rank, ending: RankEnding) -> str:
    if rank.failure is not None:
        return rank.failure.summary
    if ending.signal == "SIGKILL":
        return f"it {ending.how}, perhaps by the kernel because memory ran out"
    return f"it {ending.how}"


def _message(sentence: str, endings: Sequence[RankEnding], first: int, captured: bool) -> str:
    """The sentence, then every ending, equal ones together, the first failure on top."""
    groups: dict[str, list[RankEnding]] = {}
    for ending in sorted(endings, key=lambda end: (end.rank != first, not end.failed, end.rank)):
        groups.setdefault(without_names(_what_it_says(ending), ending.rank), []).append(ending)
    parts = [_paragraph(group, first, captured) for group in groups.values()]
    details = _indented(sentence.partition("\n")[2]).rstrip()  # once is enough
    if details:
        parts = [f"{part}\n".replace(f"\n{details}\n", "\n").rstrip() for part in parts]
    return "\n\n".join([sentence, *parts])


def _paragraph(group: Sequence[RankEnding], first: int, captured: bool) -> str:
    speaker = max(group, key=lambda ending: (len(ending.traceback), -ending.rank))
    ranks = sorted(ending.rank for ending in group)
    names = name_ranks(ranks)
    if hosts := sorted({ending.host for ending in group if ending.host}):
        names += f" on {', '.join(hosts)}"
    if first in ranks:
        names += ", the first to fail," if len(ranks) == 1 else f" (rank {first} was the first)"
    different = len({_what_it_says(ending) for ending in group}) > 1
    words = f" (as rank {speaker.rank} put it)" if different else ""
    details = [speaker.traceback]
    if speaker.stack and not speaker.traceback:
        details.append(f"It was here:\n{speaker.stack}")
    if captured and speaker.failed:
        for name, text in (("stdout", speaker.stdout), ("stderr", speaker.stderr)):
            if lines := text.splitlines()[-_MOST_LINES:]:
                heading = f"The end of rank {speaker.rank}'s {name}:"
                details.append("\n".join([heading, *lines]))
    detail = "\n".join(part for part in details if part)
    how = speaker.how if len(ranks) == 1 else plural(speaker.how)
    return f"{names} {how}{words}" + (f":\n{_indented(detail)}" if detail else "")


def without_names(text: str, rank: int) -> str:
    """A rank's text without its own number and without addresses, to compare it with others."""
    return without_addresses(re.sub(rf"\brank {rank}\b", "rank #", text))


def without_addresses(text: str) -> str:
    """A text without addresses of objects, which differ from process to process."""
    return re.sub(r"\b0x[0-9a-f]+", "0x#", text)


def without_notes(text: str) -> str:
    """A traceback without the watch's notes, which are each rank's view of the same thing."""
    return _NOTE.sub("", f"{text}\n").strip()


def _what_it_says(ending: RankEnding) -> str:
    """Everything shown of it except how a peer ended, which is not known to every rank."""
    text = f"{ending.how}\n{without_notes(ending.traceback) or ending.stack}"
    return re.sub(r"(\(pid \d+\)) (was killed by|exited with) [\w ]+;", r"\1 has ended;", text)


def _readable(stack: str) -> str:
    """A stack from faulthandler, without the watch's thread, our frames and thread numbers."""
    threads = [thread for thread in stack.rstrip().split("\n\n") if not _WATCHING.search(thread)]
    lines = [
        re.sub(r"hread 0x[0-9a-f]+ ", "hread ", line)
        for line in "\n\n".join(threads).splitlines()
        if "unisono/launcher/child.py" not in line and 'File "<string>"' not in line
    ]
    return "\n".join(lines).strip()


def place_of(stack: str) -> str:
    """ " at data.py:41 in load": the program's innermost line in a stack; "" if there is none."""
    frames = from_faulthandler(stack.rpartition("Current thread")[2])
    return next((f" at {frame}" for frame in frames if is_users(frame.file)), "")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else line for line in text.splitlines())
