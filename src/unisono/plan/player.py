"""Animated schedules. The page holds the schedule in its compact form, the simulated time of every
message and the position of every rank; assets/player.js works out the rest."""

import base64
import json
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import name_number
from unisono.plan.arrangement import arrange
from unisono.plan.proof import holds_after, holds_before
from unisono.plan.schedule import Schedule
from unisono.plan.simulate import Indices, Seconds, Timeline, simulate
from unisono.plan.sizes import format_bytes
from unisono.plan.topology import PRESETS, Topology
from unisono.show.pages import build_page, data, element, in_frame

TOPOLOGY, TOTAL_BYTES = "h100", 64 << 20
MOST_MOVES = 2_000_000
MOST_BUFFERS = 20_000_000


def schedule_page(
    schedules: Schedule | Sequence[Schedule],
    topology: Topology = PRESETS[TOPOLOGY],
    total_bytes: int = TOTAL_BYTES,
) -> str:
    """The text of an HTML file that animates one schedule, or two on one clock, on `topology` with
    a tensor of `total_bytes`. Raises ValueError for a schedule that is too large."""
    chosen = [schedules] if isinstance(schedules, Schedule) else list(schedules)
    if not 1 <= len(chosen) <= 2:
        raise ValueError(f"a page has room for one or two schedules, not {len(chosen)}")
    recordings = [_Recording(schedule, topology, total_bytes) for schedule in chosen]
    title = " and ".join(dict.fromkeys(schedule.algorithm for schedule in chosen))
    heading = f"{chosen[0].collective} by {title}"
    kicker = element("p", "unisono plan", class_="kicker")
    setting = element("p", _setting(chosen[0], topology, total_bytes), class_="soft")
    body = (
        element("header", kicker, element("h1", heading), setting),
        element("main", id="player"),
        data("schedules", [recording.as_data() for recording in recordings]),
        element("noscript", element("p", "This page needs JavaScript, which is off.")),
    )
    assets = ("player.css", "model.js", "drawing.js", "stage.js", "player.js")
    return build_page(heading, body, assets)


def schedule_frame(schedule: Schedule) -> str:
    """The page in a frame, for a notebook; a schedule that is too large is described in a line."""
    try:
        page = schedule_page(schedule)
    except ValueError as error:
        return element("p", f"{schedule.title()} ({error})")
    return in_frame(page, 860, schedule.title())


class _Recording:
    def __init__(self, schedule: Schedule, topology: Topology, total_bytes: int) -> None:
        moves = sum(int(phase.step.count.sum()) * phase.times for phase in schedule.phases)
        buffers = schedule.ranks * schedule.chunks
        if moves > MOST_MOVES or buffers > MOST_BUFFERS:
            raise ValueError(
                f"{schedule.title()}: too large for a page, which has room for "
                f"{MOST_MOVES:,} moves of a chunk (this has {moves:,}) and "
                f"{MOST_BUFFERS:,} buffers (this has {buffers:,})"
            )
        self.schedule, self.topology = schedule, topology
        self._times: list[NDArray[np.float32]] = []
        self.timeline: Timeline = simulate(schedule, topology, total_bytes, on_step=self._note_step)

    def _note_step(
        self, source: Indices, to: Indices, sending_s: Seconds, ready_s: Seconds, done_s: Seconds
    ) -> None:
        """Record when each message of a step leaves and when it is in its buffer. A port sends its
        messages one after the other, in the order listed."""
        order = np.argsort(source, kind="stable")
        busy = sending_s[order]
        before = np.cumsum(busy) - busy
        first = np.concatenate([[True], source[order][1:] != source[order][:-1]])
        before -= np.maximum.accumulate(np.where(first, before, -np.inf))
        begin = np.empty_like(sending_s)
        begin[order] = ready_s[source[order]] + before
        # A message that arrives early is buffered once its receiver reaches this step.
        kept = np.maximum(done_s, ready_s[to])
        self._times.append(np.stack([begin, kept], axis=1).astype("<f4"))

    def as_data(self) -> dict[str, Any]:
        """The recording as JSON values; the times of messages, in order of steps, are packed."""
        schedule, topology = self.schedule, self.topology
        times = np.concatenate(self._times) if self._times else np.zeros((0, 2), "<f4")
        # Equal columns become neighbours and compress to almost nothing.
        packed = zlib.compress(np.ascontiguousarray(times.T).tobytes(), 9)
        reduces = schedule.primitive.reduces or schedule.primitive.is_empty
        return {
            "schedule": json.loads(schedule.to_json()),
            "title": schedule.title(),
            "wanted": schedule.ranks if reduces else 1,
            "before": [_ranges(holds_before(schedule, rank)) for rank in range(schedule.ranks)],
            "after": [_ranges(holds_after(schedule, rank)) for rank in range(schedule.ranks)],
            "times": base64.b64encode(packed).decode(),
            "messages": len(times),
            "time_s": self.timeline.time_s,
            "layout": arrange(schedule, topology.node_size).as_data(),
        }


def _ranges(numbers: range | list[int]) -> list[list[int]]:
    """Runs of consecutive numbers, each as [first, how many]."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][0] + found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found


def _setting(schedule: Schedule, topology: Topology, total_bytes: int) -> str:
    nodes = topology.nodes(schedule.ranks)
    where = f" on {name_number(nodes, 'host')}" if nodes > 1 else ""
    size = "" if schedule.collective == "barrier" else f", {format_bytes(total_bytes)}"
    root = f", root {schedule.root}" if schedule.root else ""
    return (
        f"{name_number(schedule.ranks, 'rank')}{where}{size}{root}; "
        f"times simulated for {topology.name}"
    )
