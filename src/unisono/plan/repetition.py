"""A step that is taken many times: what repeats need not be simulated.

When a rank is ready after some steps depends, in each of them, on itself and on the rank that
sends to it. Times only ever add up and wait for each other, so that whatever is later by the same
time everywhere stays so. A rank is *settled* where, over the last period, everything that it
depends on over a period has become later by the same time: the next period does the same again.

Where all ranks are settled, as in a ring over equal nodes, the rest is one multiplication. Where
one node is smaller, or one rank late, a front travels around the ring, and only the ranks about it
are simulated.
"""

from __future__ import annotations

import numpy as np

from unisono.plan.stages import Indices, Messages, Seconds

_LONG = 96
"""About how many steps are taken between two looks at what is settled."""

_ALIKE = 1e-9


def take_repeatedly(
    messages: Messages, ready: Seconds, free: Seconds, times: int, period: int
) -> tuple[Seconds, Seconds]:
    """A step, `times` times: when each rank is ready, and when each part is free, afterwards.

    `period` is after how many steps the same may happen again: the ranks of a node.
    """
    fronts = None
    left = times
    if times == 1:
        messages.pass_on(ready, free)
        return ready, free
    while left:
        before_ready, before_free = ready.copy(), free.copy()
        for _ in range(min(period, left)):
            messages.pass_on(ready, free)
        left -= min(period, left)
        rounds = left // period
        later = ready - before_ready
        used = free > before_free
        shifts = np.concatenate([later, (free - before_free)[used]])
        if not rounds:
            continue
        if np.ptp(shifts) <= _ALIKE * shifts.max():
            ready = ready + later[0] * rounds
            free[used] += later[0] * rounds
            left -= rounds * period
        elif period >= _LONG and messages.alone:
            fronts = fronts or _Fronts(messages, len(ready), len(free), period)
            ready, free, periods = fronts.follow(
                np.concatenate([ready, free]),
                np.concatenate([later, free - before_free]),
                rounds,
            )
            left -= periods * period
        elif messages.alone:
            period *= -(-_LONG // period)
    return ready, free


class _Fronts:
    """Ranks that are not settled, and what they depend on; no part serves two messages.

    The state is one row: when each rank is ready, then when each part is free. To each rank belong
    its own time, its sending port, and the other parts that the message to it passes.
    """

    def __init__(self, messages: Messages, ranks: int, parts: int, period: int) -> None:
        self._messages, self._ranks, self._period = messages, ranks, period
        rank = np.arange(ranks)
        self._own = np.tile(rank[:, None], 6)  # what a rank lacks stands for itself
        to = messages.destination
        for column, (owner, stage) in enumerate(
            (
                (messages.source, messages.sending),
                (to, messages.receiving),
                (to[messages.crossing], messages.leaving),
                (to[messages.crossing], messages.entering),
                (to[messages.adding], messages.reducing),
            ),
            1,
        ):
            self._own[owner, column] = ranks + stage.part
        sender = rank.copy()
        sender[to] = messages.source
        self._senders = [sender]  # one, two, four, ... messages back
        while 1 << len(self._senders) <= period:
            self._senders.append(self._senders[-1][self._senders[-1]])

    def follow(self, state: Seconds, later: Seconds, periods: int) -> tuple[Seconds, Seconds, int]:
        """Up to so many periods further, from a state and how much later than a period before it
        is; when ranks are ready, parts are free, and how many periods that took."""
        own = later[self._own]
        least, most = own.min(axis=1), own.max(axis=1)
        done = 0
        while done < periods:
            moving = self._unsettled(least, most)
            if not len(moving):
                break
            near = self._depended_on(moving)
            if 4 * len(near) > self._ranks:
                break
            theirs = self._own[moving]
            before = state[theirs]
            after = state + later
            self._simulate(near, state)
            after[theirs] = state[theirs]
            later[theirs] = change = after[theirs] - before
            least[moving], most[moving] = change.min(axis=1), change.max(axis=1)
            state = after
            done += 1
        return state[: self._ranks].copy(), state[self._ranks :].copy(), done

    def _unsettled(self, least: Seconds, most: Seconds) -> Indices:
        """Ranks that are moved otherwise than their sender, and all whom they reach in a period."""
        limit = _ALIKE / self._period * most
        moving = (most - least > limit) | (np.abs(least - least[self._senders[0]]) > limit)
        for sender in self._senders:
            moving |= moving[sender]
        return np.flatnonzero(moving)

    def _depended_on(self, ranks: Indices) -> Indices:
        """These ranks and all whose messages reach them within a period."""
        near = np.zeros(self._ranks, bool)
        near[ranks] = True
        for sender in self._senders:
            near[sender[near]] = True
        return np.flatnonzero(near)

    def _simulate(self, near: Indices, state: Seconds) -> None:
        """A period of these ranks, in place. Ranks at the edge, which miss what others send, come
        out wrong: nobody who is settled is taken from here."""
        chosen = np.zeros(self._ranks, bool)
        chosen[near] = True
        which = np.flatnonzero(chosen[self._messages.source] | chosen[self._messages.destination])
        few = self._messages.some(which)
        ready, free = state[: self._ranks], state[self._ranks :]
        for _ in range(self._period):
            few.pass_on(ready, free)
