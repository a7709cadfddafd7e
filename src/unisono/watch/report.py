"""Reports: what went wrong in one sentence, then what each rank was doing."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from unisono.errors import UnisonoError, name_ranks
from unisono.watch.from_json import build

_FORMAT = "unisono report 1"


@dataclass(frozen=True)
class CallReport:
    """One of a rank's last calls, in whichever group. Times are seconds, 0 when the report was made
    and negative before; `started_s` is when all peers were there. `waits_for` are the processes
    without which it cannot go on, by their pids."""

    name: str
    group: str
    state: str
    site: str
    arrived_s: float
    started_s: float | None = None
    ended_s: float | None = None
    waits_for: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankReport:
    """One rank of the group at hand: `rank`, its `global_rank`, its `pid`, whether it has `arrived`
    at the call. Texts are empty where nothing is known.

    `place` is the line of its program ("data.py:41 in load"), `doing` what that line calls, `call`
    the call that it is in, `last` the last one that it finished, `state` what the system says,
    `stack` where it is, line by line. `source` are the lines around `place`, with a mark; `calls`
    its last ones, the oldest first; `host` is the name of its host, where a job has several.

    >>> unisono.watch.RankReport(1, 3, pid=4711, arrived=False, place="data.py:41 in load").where()
    'is in data.py:41 in load'
    """

    rank: int
    global_rank: int
    pid: int
    arrived: bool
    state: str = ""
    place: str = ""
    doing: str = ""
    call: str = ""
    last: str = ""
    stack: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    calls: tuple[CallReport, ...] = ()
    host: str = ""

    def name(self) -> str:
        """ "rank 1", or "rank 1 (global 3)" where its number in the world is another.

        >>> unisono.watch.RankReport(1, 3, pid=4711, arrived=True).name()
        'rank 1 (global 3)'
        """
        beside = f" (global {self.global_rank})" if self.global_rank != self.rank else ""
        return f"rank {self.rank}{beside}"

    def process(self) -> str:
        """ "pid 4711", or "pid 4711 on node7" where the job has several hosts.

        >>> unisono.watch.RankReport(1, 3, pid=4711, arrived=True, host="node7").process()
        'pid 4711 on node7'
        """
        return f"pid {self.pid}" + (f" on {self.host}" if self.host else "")

    def where(self) -> str:
        """Where it is, for a sentence that begins with "it".

        >>> rank = unisono.watch.RankReport(1, 1, 7, True, call="barrier #2", place="a.py:3 in f")
        >>> rank.where()
        'is in barrier #2 (a.py:3)'
        """
        if self.state:
            return self.state
        if not self.place:
            return f"is in {self.call}" if self.call else "did not say where it is"
        site = self.place.partition(" in ")[0]
        if self.call:
            return f"is in {self.call} ({site})"
        return f"is in {site}, in {self.doing}" if self.doing else f"is in {self.place}"


@dataclass(frozen=True)
class Report:
    """What is wrong with a `group` on a `backend`. `verdict` says it in one sentence, `details` say
    more. `kind` is "hang", "lost", "cycle", "mismatch", "apart", "stalled", "elsewhere" or
    "failed".

    `operation` and `call` are the call at hand, `waited_s` how long ranks have waited in it;
    `culprits` are the ranks (of the group) that the verdict names, `site` the line, `ranks` what is
    known of each rank, `made_at` when the report was made, with the time zone.

    >>> Report = unisono.watch.Report
    >>> print(Report("lost", "rank 1 has ended", "world", "unisono", "barrier", 2, culprits=(1,)))
    rank 1 has ended
    """

    kind: str
    verdict: str
    group: str
    backend: str
    operation: str
    call: int | None
    culprits: tuple[int, ...]
    site: str = ""
    waited_s: float = 0.0
    details: tuple[str, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    made_at: str = ""

    def __str__(self) -> str:
        lines = [self.verdict, *(f"  {line}" for line in self.details)]
        stalled = self.culprits if self.kind == "stalled" else ()
        waiting = [rank.rank for rank in self.ranks if rank.arrived and rank.rank not in stalled]
        if waiting and self.kind != "mismatch":
            lines.append(f"  waiting for {self.waited_s:.0f} s: {name_ranks(waiting)}")
        for rank in self.ranks:
            if (
                not rank.arrived
                and self.kind != "mismatch"
                and (rank.place or rank.state or rank.call)
            ):
                last = f"; the last call that it finished: {rank.last}" if rank.last else ""
                lines.append(f"  {rank.name()} ({rank.process()}) {rank.where()}{last}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For a notebook; `unisono doctor --html` makes a page of a saved one."""
        from unisono.pages import html_table  # not before a notebook asks for it

        rows = [
            (rank.name(), rank.pid or "", "yes" if rank.arrived else "no", rank.where(), rank.last)
            for rank in self.ranks
        ]
        blamed = [at for at, rank in enumerate(self.ranks) if rank.rank in self.culprits]
        heads = ("rank", "pid", "came", "where", "last call it finished")
        return html_table(heads, rows, self.verdict, blamed)

    def with_stacks(self) -> str:
        """The same as printing it, and the stack of every rank that is known.

        >>> Report = unisono.watch.Report
        >>> Report("lost", "rank 1 has ended", "world", "gloo", "barrier", 2, (1,)).with_stacks()
        'rank 1 has ended'
        """
        lines = [str(self)]
        for rank in self.ranks:
            if rank.stack:
                lines.append(f"{rank.name()} ({rank.process()}):")
                lines += [f"  {line}" for line in rank.stack]
        return "\n".join(lines)

    def to_text(self) -> str:
        """All of it as JSON, for `from_text`.

        >>> Report = unisono.watch.Report
        >>> text = Report("lost", "rank 1 has ended", "world", "gloo", "barrier", 2, (1,)).to_text()
        >>> import json
        >>> json.loads(text)["verdict"]
        'rank 1 has ended'
        """
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to the file `path`, for `load` and `unisono doctor`. Raises OSError if that
        cannot be done.

        >>> import tempfile
        >>> Report = unisono.watch.Report
        >>> report = Report("lost", "rank 1 has ended", "world", "gloo", "barrier", 2, (1,))
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     report.save(file.name)
        ...     unisono.watch.load(file.name) == report
        True
        """
        Path(path).write_text(self.to_text() + "\n", encoding="utf-8")


def load(path: str | os.PathLike[str]) -> Report:
    """Read the report that was saved in the file `path`. Raises UnisonoError if the file holds
    none.

    >>> unisono.watch.load("/etc/hostname")
    Traceback (most recent call last):
        ...
    unisono.errors.UnisonoError: /etc/hostname is not a report of unisono
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UnisonoError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnisonoError(f"{path} is not a report of unisono") from error
    return from_text(text, str(path))


def from_text(text: str, origin: str = "this") -> Report:
    """What `to_text` made. Raises UnisonoError if it did not; `origin` is for the message."""
    try:
        found = json.loads(text)
        written = found.pop("format")
        if written != _FORMAT and str(written).startswith(_FORMAT.rstrip("1")):
            raise UnisonoError(f"{origin} was written by another version of unisono")
        if written != _FORMAT:
            raise ValueError("of another shape")
        return build(Report, found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnisonoError(f"{origin} is not a report of unisono") from error
