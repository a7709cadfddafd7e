"""The Ray actor of one rank: starts its process on the actor's node and looks after it there.

The rank is a process of its own, as on one machine, so that it can be asked for its stack, be
interrupted, crash and be killed with all that it started, while somebody is left to tell of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

from unisono import variables
from unisono.launcher.guardian import Guardian
from unisono.launcher.process import LocalProcess, start_process
from unisono.launcher.protocol import Instructions, write_instructions
from unisono.launcher.store import LazyStore

END = -1
"""In place of a stream's number: the process has ended, with this status."""

Event = tuple[int, bytes]
"""Which of the process's streams (0 to 3), or END, and what came."""

_PIECES = 64
"""How far a rank may be ahead of the launching process before its writes wait."""


class RankActor:
    """What the launching process calls; several calls at a time."""

    def __init__(self) -> None:
        self._events: queue.Queue[Event] = queue.Queue(_PIECES)
        self._process: LocalProcess | None = None
        self._store: LazyStore | None = None

    def find_host(self) -> str:
        """This node's name, or what UNISONO_HOSTID calls it."""
        return variables.HOSTID.read() or socket.gethostname()

    def open_store(self, address: str) -> dict[str, str]:
        """Have a torch store at this address of the node: the variables by which ranks find it."""
        self._store = LazyStore(address)
        return self._store.variables()

    def start(
        self, rank: int, given: Mapping[str, str], instructions: Instructions, job: bytes
    ) -> None:
        """Start the rank's process, with the node's environment and what is given. Modules are
        found where this actor, and so the program's other actors, find them."""
        instructions = dataclasses.replace(instructions, sys_path=tuple(sys.path))
        begun: Future[None] = Future()
        # The kernel kills what a thread has started when that thread ends: one of ours, then.
        args = (begun, rank, os.environ | dict(given), instructions, job)
        threading.Thread(target=self._look_after, args=args, daemon=True).start()
        begun.result()

    def read(self) -> list[Event]:
        """What has come since the last call; waits until there is something."""
        events = [self._events.get()]
        with contextlib.suppress(queue.Empty):
            while len(events) < _PIECES:
                events.append(self._events.get_nowait())
        return events

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank, if it lives."""
        if self._process is not None:
            self._process.send_signal(number)

    def ask_for_stack(self) -> None:
        """Have the rank write down where it is, if it lives."""
        if self._process is not None:
            self._process.ask_for_stack()

    def _look_after(
        self,
        begun: Future[None],
        rank: int,
        environment: Mapping[str, str],
        instructions: Instructions,
        job: bytes,
    ) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT, which is inherited
        try:
            with write_instructions(instructions, job) as file:
                del job
                process = start_process(rank, environment, file.fileno())
            self._process = process
        except BaseException as error:
            begun.set_exception(error)
            return
        begun.set_result(None)
        guardian = Guardian()
        guardian.guard([process.group])

        def end(status: int) -> None:
            process.send_signal(signal.SIGKILL)  # what it started: nothing stays on a cluster
            guardian.close()
            process.forget()
            self._events.put((END, str(status).encode()))

        with selectors.DefaultSelector() as selector:
            if self._store is not None:
                self._store.listen(selector)
            process.listen(selector, [partial(self._pass_on, number) for number in range(4)], end)
            # the store needs this thread, and other ranks may need the store to the last
            while self._store is not None or selector.get_map():
                for key, _ in selector.select():
                    key.data()

    def _pass_on(self, number: int, data: bytes) -> None:
        self._events.put((number, data))
