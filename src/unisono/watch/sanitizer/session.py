"""The sanitizer of this process: what is on, what was found, and how it ends."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from unisono.watch.report import Report, add_history
from unisono.watch.sanitizer.calls import WatchedCall, WatchedCalls, harmless
from unisono.watch.sanitizer.exchange import Exchange
from unisono.watch.sanitizer.races import Races
from unisono.watch.sanitizer.reductions import FollowedDDP, Reductions
from unisono.watch.sanitizer.replicas import Replicas
from unisono.watch.sanitizer.verdicts import Judgement, finding

_END_S = 5.0
_numbers = itertools.count()
"""Of the sessions of this process; on all ranks alike."""
_torch: Any = c10d
Tell = Callable[[Report], object]


class SanitizerSession:
    """On from its construction to `finish`. `tell` is given each report, once; `store` is for the
    facts of this `rank` of `size`: by default torch's, once the default group exists."""

    def __init__(self, tell: Tell, store: Any = None, rank: int = 0, size: int = 0) -> None:
        self._tell = tell
        self._place = store, rank, size
        self._pid, self._number = os.getpid(), next(_numbers)
        self.proofs: list[Report] = []
        self._exchange: Exchange | None = None
        self._told: set[str] = set()
        self._waiting: list[tuple[str, Sequence[int], Any]] = []
        self._ddp_numbers: dict[int, int] = {}
        self._reductions = Reductions(self._look_at_batch)
        self._races = Races(self._rank, self._race, self._reductions.operator)
        self._replicas = Replicas(self._reductions, self._send, self._hint)
        self._calls = WatchedCalls(self)
        for group in list(_torch._world.pg_map):
            self._calls.follow(group)

    def follow(self, group: Any) -> None:
        """A process group of torch's was made."""
        self._calls.follow(group)

    # -- calls -----------------------------------------------------------------------------------

    @harmless
    def begin(self, call: WatchedCall) -> None:
        """A call is about to start."""
        self._reductions.before(call)
        self._races.begin(call)

    @harmless
    def submitted(self, call: WatchedCall, work: Any) -> None:
        """A call has returned."""
        self._races.submitted(call, work)
        if self._reductions.submitted(call):
            self._races.follows = True
            self._races.look()

    def _rank(self) -> int:
        _, rank, size = self._place
        if size or not dist.is_initialized():
            return rank if size else int(os.environ.get("RANK", "0"))
        return dist.get_rank()

    # -- findings --------------------------------------------------------------------------------

    def _race(self, verdict: str, detail: str, site: str) -> None:
        self._keep(finding("race", verdict, (detail,), (self._rank(),), site))

    def _hint(self, verdict: str, detail: str, site: str) -> None:
        if self._rank() == 0:
            self._keep(finding("hint", verdict, (detail,), (), site))

    def _keep(self, found: Report) -> None:
        if found.verdict in self._told:
            return
        self._told.add(found.verdict)
        report = replace(found, backend=_backend())
        if found.kind == "hint":
            report = replace(report, verdict=f"hint: {found.verdict}")
        else:
            self.proofs.append(report)
        self._tell(add_history(report, ()))

    # -- facts -----------------------------------------------------------------------------------

    def _send(self, topic: str, members: Sequence[int], fact: Any) -> None:
        self._races.follows = False
        self._races.look()
        if self._exchange is None and not self._open():
            self._waiting.append((topic, members, fact))
            return
        assert self._exchange is not None
        self._exchange.tell(topic, members, fact)

    def _open(self) -> bool:
        store, rank, size = self._place
        if store is None:
            if not dist.is_initialized():
                return False
            default = _torch._get_default_store()
            store, rank, size = (
                _torch.PrefixStore(f"unisono_sanitizer/{self._number}", default),
                dist.get_rank(),
                dist.get_world_size(),
            )
        self._exchange = Exchange(store, rank, size, Judgement(self._keep).compare)
        for waiting in self._waiting:
            self._exchange.tell(*waiting)
        self._waiting = []
        return True

    @harmless
    def _look_at_batch(self, ddp: FollowedDDP, inputs: Any) -> None:
        number = self._ddp_numbers.setdefault(id(ddp), len(self._ddp_numbers))
        self._replicas.look_at_batch(ddp, number, inputs)

    # -- the end ---------------------------------------------------------------------------------

    def finish(self, wait_s: float | None = None) -> bool:
        """Stop; returns whether any rank has a proof, once all have ended or `wait_s` is over."""
        if os.getpid() != self._pid:
            return False
        self._put_back()
        if self._exchange is None:
            self._open()
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return bool(self.proofs)
        return exchange.finish(lambda: bool(self.proofs), _END_S if wait_s is None else wait_s)

    def leave(self) -> None:
        """Stop without an outcome."""
        self._put_back()
        exchange, self._exchange = self._exchange, None
        if exchange is not None and os.getpid() == self._pid:
            exchange.abandon()

    def _put_back(self) -> None:
        """What was replaced."""
        self._races.stop()
        self._calls.stop()
        self._replicas.stop()
        self._reductions.stop()


def _backend() -> str:
    """What moves the default group's data; a replaced backend has another name in torch."""
    if not dist.is_initialized():
        return ""
    is_ours = hasattr(dist.group.WORLD, "comm")
    return "unisono" if is_ours else str(dist.get_backend())
