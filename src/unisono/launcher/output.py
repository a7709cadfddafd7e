"""The ranks' output, line by line, on the launching process's own streams."""

from __future__ import annotations

import codecs
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import IO, Literal, TextIO

from unisono.errors import Misuse
from unisono.output_files import open_at_once

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")
OnLine = Callable[[int, Stream, str], None]

_LONGEST_LINE = 16 << 20
"""A longer line is cut, so that an endless one cannot fill the memory."""

_PATIENCE_S = 0.2
"""After this time an unfinished line is shown on a terminal."""

_COLOURS = (36, 33, 32, 35, 34)


class Lines:
    """One stream of one rank: bytes in, lines out. `tail` is the end of its output; the file `log`
    gets all of it."""

    def __init__(
        self,
        rank: int,
        stream: Stream,
        listener: Listener,
        keep: int,
        log: IO[bytes] | None = None,
    ) -> None:
        self._rank = rank
        self._stream: Stream = stream
        self._listener = listener
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.unfinished = ""
        """The part of an unfinished line that has not been shown."""
        self._since = 0.0
        self._begun = False
        self._kept: list[str] = []
        self._kept_length = 0
        self._keep = keep
        self._log = log

    def feed(self, data: bytes, last: bool = False) -> None:
        """Take new output; with `last`, an unfinished line ends here."""
        self.log(data)
        text = self._decoder.decode(data, last)
        self._remember(text)
        if not self.unfinished:
            self._since = time.monotonic()
        *whole, self.unfinished = (self.unfinished + text).split("\n")
        if len(self.unfinished) > _LONGEST_LINE or (last and (self.unfinished or self._begun)):
            whole.append(self.unfinished)
            self.unfinished = ""
        for line in whole:
            self._listener.line(self._rank, self._stream, line.removesuffix("\r"))
        self._begun = self._begun and not whole
        self._listener.flush()

    def log(self, data: bytes) -> None:
        """Write it to the log file alone. A full disk ends the log, not the program."""
        if self._log is None or not data:
            return
        try:
            self._log.write(data)
        except OSError as error:
            where, self._log = self._log.name, None
            print(f"unisono run: cannot write {where}: {error.strerror}", file=sys.stderr)

    def tick(self) -> None:
        """Show the beginning of an unfinished line."""
        if (
            self.unfinished
            and time.monotonic() - self._since >= _PATIENCE_S
            and self._listener.beginning(self._rank, self._stream, self.unfinished)
        ):
            self.unfinished = ""
            self._begun = True
            self._listener.flush()

    @property
    def tail(self) -> str:
        return "".join(self._kept)[-self._keep :]

    def _remember(self, text: str) -> None:
        self._kept.append(text)
        self._kept_length += len(text)
        if self._kept_length > 2 * self._keep:
            self._kept = [self.tail]
            self._kept_length = len(self._kept[0])


class Terminal:
    """Writes to this process's current stdout and stderr. `hosts` names each rank's host if there
    may be several."""

    def __init__(self, prefix: bool = True, hosts: Sequence[str] = ()) -> None:
        self._prefix = prefix
        self._hosts = hosts
        self._open: tuple[int, Stream] | None = None
        self._text: dict[Stream, list[str]] = {"stdout": [], "stderr": []}

    def line(self, rank: int, stream: Stream, text: str) -> None:
        """A line, or the rest of one that `beginning` started."""
        self._write(rank, stream, text)
        self._text[stream].append("\n")
        self._open = None

    def beginning(self, rank: int, stream: Stream, text: str) -> bool:
        """The beginning of an unfinished line; False if only whole lines are wanted."""
        if not is_terminal(_stream(stream)):
            return False
        self._write(rank, stream, text)
        self._open = (rank, stream)
        return True

    def flush(self) -> None:
        """Nothing more comes for the moment."""
        for name, parts in self._text.items():
            if parts:
                text = "".join(parts)
                parts.clear()
                _write_whole(_stream(name), text)

    def _write(self, rank: int, stream: Stream, text: str) -> None:
        prefix = self._prefix_of(rank, stream)
        if prefix:
            text = text.replace("\r", "\r" + prefix)  # a progress bar rewrites its line
        if self._open != (rank, stream):
            if self._open is not None:  # another rank's line is unfinished there
                self._text[self._open[1]].append("\n")
                self.flush()
            text = prefix + text
        self._text[stream].append(text)

    def _prefix_of(self, rank: int, stream: Stream) -> str:
        if not self._prefix:
            return ""
        name = f"[rank {rank} on {self._hosts[rank]}]" if self._hosts else f"[rank {rank}]"
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"  # no-color.org
        if plain or not is_terminal(_stream(stream)):
            return f"{name} "
        return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{name}\x1b[0m "


class Callback:
    """Passes every whole line to a function of the program, if any; the output is kept in both
    cases."""

    def __init__(self, on_line: OnLine | None = None) -> None:
        self.line = on_line or (lambda rank, stream, text: None)

    def beginning(self, rank: int, stream: Stream, text: str) -> bool:
        return False

    def flush(self) -> None:
        pass


def open_logs(folder: str | None, ranks: int, stack: ExitStack) -> list[dict[Stream, IO[bytes]]]:
    """The log files of each rank, which `stack` closes; none without a folder. Raises Misuse."""
    own = [Path(folder, str(rank)) for rank in range(ranks)] if folder else []
    opening = functools.partial(FileIO, mode="w", opener=open_at_once)
    try:
        for each in own:
            each.mkdir(parents=True, exist_ok=True)
        return [
            {name: stack.enter_context(opening(each / f"{name}.log")) for name in STREAMS}
            for each in own
        ]
    except OSError as error:
        raise Misuse(f"--log-dir: cannot write {error.filename}: {error.strerror}") from error


Listener = Terminal | Callback
"""Where lines go."""


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads along."""
    return bool(getattr(stream, "isatty", lambda: False)())


def _stream(name: Stream) -> TextIO | None:
    return sys.stdout if name == "stdout" else sys.stderr  # None if the program has none


def _write_whole(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = stream.encoding or "ascii"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
