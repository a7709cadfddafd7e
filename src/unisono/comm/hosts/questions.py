"""Questions between processes on different hosts, over their control lines."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import queue
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from unisono.comm.engine import where_is_program

_log = logging.getLogger("unisono")

answers: dict[str, Callable[[Any], Any]] = {}
"""How this process answers questions, by topic: from a subject to an answer, both JSON values.
Each runs in its own thread, and may take long."""

last_words: list[Callable[[], str]] = []
"""How this process ends, for ranks of other hosts: completes "rank 3 ..."; at most one."""

_AT_ONCE: dict[str, Callable[[Any], Any]] = {
    "where": lambda _: where_is_program(),
    "clock": lambda _: time.monotonic(),
}
_CLOCK_READINGS = 16
_CLOCK_S = 1.0
_SLICE_S = 0.02
_GONE = object()


class Questions:
    """Those of one process; `send(peer, message)` sends a message, if there is a line. `at_once`
    has answers that must not wait, by topic."""

    def __init__(
        self,
        send: Callable[[int, dict[str, Any]], bool],
        at_once: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
    ) -> None:
        self._send = send
        self._at_once = {**_AT_ONCE, **at_once}
        self._asked: dict[str, queue.SimpleQueue[tuple[int, Any]]] = {}

    def ask(
        self,
        peers: Iterable[int],
        topic: str,
        about: Any,
        timeout_s: float,
        meanwhile: Callable[[], object] | None = None,
        host_of: Mapping[int, int] = MappingProxyType({}),
    ) -> dict[int, Any]:
        """The answers of these global ranks that arrive in time; `meanwhile` is called
        periodically until then. With `host_of` one rank of each host is enough."""
        number = secrets.token_hex(8)
        box = self._asked[number] = queue.SimpleQueue()
        waiting: set[int] = set()
        found: dict[int, Any] = {}
        end = time.monotonic() + timeout_s
        try:
            message = {"question": number, "topic": topic, "about": _pack(about)}
            waiting |= {peer for peer in peers if self._send(peer, message)}
            while waiting and time.monotonic() < end:
                left_s = end - time.monotonic()
                with contextlib.suppress(queue.Empty):
                    peer, answer = box.get(timeout=min(left_s, _SLICE_S) if meanwhile else left_s)
                    waiting.discard(peer)
                    if answer is not _GONE:
                        found[peer] = answer
                        waiting -= {other for other in host_of if host_of[other] == host_of[peer]}
                if meanwhile is not None:
                    meanwhile()
        finally:
            del self._asked[number]
        return found

    def give_up(self, peer: int) -> None:
        """A global rank will not answer any more."""
        for box in list(self._asked.values()):
            box.put((peer, _GONE))

    def read_clock(self, peer: int) -> tuple[float, float] | None:
        """How far the clock of a global rank's host is ahead of ours (time.monotonic, in seconds),
        and the error bound; None if it does not answer.

        The other clock is read between two readings of ours: of several such pairs the closest
        counts, and its midpoint (as in NTP)."""
        best: tuple[float, float] | None = None
        for _ in range(_CLOCK_READINGS):
            before = time.monotonic()
            read = self.ask([peer], "clock", None, _CLOCK_S)
            after = time.monotonic()
            if peer not in read:
                break
            error = (after - before) / 2
            if best is None or error < best[1]:
                best = float(read[peer]) - (before + after) / 2, error
        return best

    def on_message(self, peer: int, message: dict[str, Any]) -> None:
        """Handle a question or an answer; in the lines' thread."""
        number = message["question"]
        if "answer" in message:
            box = self._asked.get(str(number))
            if box is not None:
                box.put((peer, _unpack(message["answer"])))
            return
        topic, about = str(message["topic"]), message["about"]
        if topic in self._at_once:
            self._reply(peer, number, self._at_once[topic](_unpack(about)))
            return
        threading.Thread(
            target=self._answer,
            args=(peer, number, topic, about),
            name=f"unisono answers rank {peer}",
            daemon=True,
        ).start()

    def _answer(self, peer: int, number: Any, topic: str, about: Any) -> None:
        answer = None
        try:
            if topic in answers:
                answer = answers[topic](_unpack(about))
        except Exception:
            _log.debug("unisono: no answer to rank %d about %s", peer, topic, exc_info=True)
        self._reply(peer, number, answer)

    def _reply(self, peer: int, number: Any, answer: Any) -> None:
        try:
            self._send(peer, {"question": number, "answer": _pack(answer)})
        except ValueError:  # too long for a line
            self._send(peer, {"question": number, "answer": None})


def _pack(value: Any) -> Any:
    """Long values in fewer bytes."""
    text = json.dumps(value)
    if len(text) < 4096:
        return value
    return {"packed": base64.b85encode(zlib.compress(text.encode(), 3)).decode()}


def _unpack(value: Any) -> Any:
    if isinstance(value, dict) and "packed" in value:
        return json.loads(zlib.decompress(base64.b85decode(value["packed"])))
    return value
