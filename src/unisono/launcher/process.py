"""One rank's process: starting it on this machine, reading its output, signalling and ending it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import selectors
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from unisono.errors import UnisonoError
from unisono.launcher.protocol import Instructions, nameless_file, write_instructions
from unisono.processes import ask_for_stack, start_python

Taker = Callable[[bytes], object]

_KILLED_S = 10.0
_PIECE_BYTES = 1 << 16
_PIPE_BYTES = 1 << 20  # the maximum size of a pipe by default


class RankProcess(ABC):
    """A rank's process, for the crew: four streams, and its end.

    `readers` are the pipes of stdout, stderr, the results and the stacks; `end_fd` becomes readable
    when it has ended. `host` is the name of its host, "" if there is only this one; `group` its
    process group, None on another host; `lost` says why its exit status is unknown.
    """

    lost = ""

    def __init__(
        self, readers: Sequence[int], end_fd: int, host: str = "", group: int | None = None
    ) -> None:
        self.host = host
        self.group = group
        self._readers = list(readers)
        self._end_fd = end_fd
        self._selector: selectors.BaseSelector | None = None

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Send a signal to the process and its process group. Does nothing once it has ended."""

    @abstractmethod
    def ask_for_stack(self) -> bool:
        """Have the process write its stacks. False if its program has removed the handler."""

    @abstractmethod
    def _exit_code(self) -> int:
        """Its exit code as in subprocess: negative for a signal."""

    def listen(
        self,
        selector: selectors.BaseSelector,
        takers: Sequence[Taker],
        on_end: Callable[[int], None],
    ) -> None:
        """Register with the selector keys whose `data` is called when they are ready. They pass the
        data of the four streams to `takers`, and then the exit code to `on_end`."""
        self._selector = selector
        for reader, take in zip(self._readers, takers, strict=True):
            os.set_blocking(reader, False)
            pass_on = functools.partial(self._pass_on, reader, take)
            selector.register(reader, selectors.EVENT_READ, pass_on)

        def end() -> None:
            for reader in list(self._readers):
                self._drain(selector.get_key(reader).data)
            on_end(self._exit_code())

        selector.register(self._end_fd, selectors.EVENT_READ, end)

    def forget(self) -> None:
        """Stop listening: it has ended, and its pid may be reused."""
        for descriptor in (*self._readers, self._end_fd):
            self._close(descriptor)
        self._readers.clear()

    def _pass_on(self, reader: int, take: Taker) -> bool:
        """Pass on what there is to read; returns whether there was something."""
        if reader not in self._readers:
            return False  # closed in this round
        try:
            data = os.read(reader, _PIECE_BYTES)
        except BlockingIOError:
            return False
        if data:
            take(data)
        else:
            self._readers.remove(reader)
            self._close(reader)
        return bool(data)

    @staticmethod
    def _drain(pass_on: Callable[[], bool]) -> None:
        """Read what is left. Not to the end of the file: its children may hold it open."""
        for _ in range(_PIPE_BYTES // _PIECE_BYTES + 1):
            if not pass_on():
                break

    def _close(self, descriptor: int) -> None:
        if self._selector is not None:
            self._selector.unregister(descriptor)
        os.close(descriptor)


class LocalProcess(RankProcess):
    """On this machine: the leader of a process group. Its pid stays its own until it is reaped."""

    group: int

    def __init__(self, process: subprocess.Popen[bytes], readers: Sequence[int]) -> None:
        super().__init__(readers, _open_end(process.pid), group=process.pid)
        self._process = process

    def send_signal(self, number: int) -> None:
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                os.killpg(self.group, number)
            except ProcessLookupError:  # it has left its group
                os.kill(self.group, number)

    def ask_for_stack(self) -> bool:
        return self._process.returncode is None and ask_for_stack(self.group)

    def _exit_code(self) -> int:
        ended = os.waitid(os.P_PID, self.group, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def forget(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED_S)  # a killed process may need a moment
        super().forget()


def _open_end(pid: int) -> int:
    """A descriptor that becomes readable when a child ends."""
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    reader, writer = os.pipe()  # an old kernel, or a sandbox

    def wait() -> None:
        with contextlib.suppress(ChildProcessError), open(writer, "wb"):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=wait, name=f"unisono waits for {pid}", daemon=True).start()
    return reader


@contextlib.contextmanager
def ranks_here(
    instructions: Instructions,
    ranks: int,
    variables: Mapping[str, str],
    *,
    job: bytes = b"",
    inherited: Sequence[int] = (),
) -> Iterator[Iterator[LocalProcess]]:
    """Ranks on this machine, each started when the iterator yields it, with these variables in
    addition to our own, and these descriptors."""
    with nameless_file() as store, nameless_file() as meeting:
        if not instructions.program:
            instructions = dataclasses.replace(instructions, store_fd=store.fileno())
        environment = {
            **os.environ,
            **variables,
            "UNISONO_SIZE": str(ranks),
            "UNISONO_RENDEZVOUS": f"fd:{meeting.fileno()}",
        }
        shared = [meeting.fileno(), store.fileno(), *inherited]
        with write_instructions(instructions, job) as file:
            del job

            def start(rank: int) -> LocalProcess:
                own = rank_variables(rank, ranks) | {"UNISONO_RANK": str(rank)}
                return start_process(rank, environment | own, file.fileno(), shared)

            yield map(start, range(ranks))


def check_not_nested() -> None:
    """Raise if this process is a rank: ranks cannot start ranks."""
    if "UNISONO_RANK" in os.environ:
        raise UnisonoError(
            f"this process is rank {os.environ['UNISONO_RANK']} of a launch: ranks cannot launch "
            "ranks"
        )


def rank_variables(
    rank: int, size: int, local: tuple[int, int] | None = None, node: tuple[int, int] = (0, 1)
) -> dict[str, str]:
    """The variables of torchrun; `local` is the rank's number on its node and how many there are,
    `node` the node's."""
    local_rank, local_size = local or (rank, size)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node[0],
        "GROUP_WORLD_SIZE": node[1],
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
    }
    return {name: str(number) for name, number in numbers.items()} | {"ROLE_NAME": "default"}


def start_process(
    number: int, environment: Mapping[str, str], instructions_fd: int, inherit: Sequence[int] = ()
) -> LocalProcess:
    """Start the process of a rank; it reads its instructions and inherits these descriptors."""
    pipes: list[tuple[int, int]] = []
    try:
        pipes.extend(os.pipe() for _ in range(4))
        readers, (out, err, results, stacks) = zip(*pipes, strict=True)
        numbers = (number, os.getpid(), instructions_fd, results, stacks)
        process = start_python(
            *main_of("unisono.launcher.child"),
            *numbers,
            environment=environment,
            inherit=(instructions_fd, results, stacks, *(fd for fd in inherit if fd >= 0)),
            stdout=out,
            stderr=err,
        )
    except OSError as error:
        for reader, _ in pipes:
            os.close(reader)
        raise UnisonoError(f"rank {number} could not be started: {error.strerror}") from error
    finally:
        for _, writer in pipes:
            os.close(writer)
    return LocalProcess(process, readers)


def main_of(module: str) -> tuple[str, str]:
    """The arguments with which Python calls the main function of one of our modules."""
    folder = str(Path(__file__).parents[2])
    return "-c", f"import sys; sys.path.append({folder!r}); from {module} import main; main()"
