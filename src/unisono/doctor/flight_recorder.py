"""Dumps of torch's Flight Recorder: one verdict from the files of all ranks.

Each file has the last calls of one rank, and its name ends with the rank, as for torch's own tools.
The calls become records of the watch, which its diagnosis reads.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.cases.primitives import PRIMITIVES, primitive_of
from unisono.comm.shared_memory.records import GroupRecords, Process, RankRecords, Record
from unisono.errors import UnisonoError
from unisono.watch.calls import line_of, newest_calls, waits
from unisono.watch.differences import mismatch, shifted_by_lines
from unisono.watch.hangs import hang
from unisono.watch.report import Report
from unisono.watch.stacks import is_users, short_path
from unisono.watch.whereabouts import Whereabouts

_OPERATIONS = sorted(PRIMITIVES, key=lambda name: (name != "barrier", PRIMITIVES[name].is_rooted))
"""By the first that is in torch's name: "nccl:all_reduce_barrier", "nccl:_all_gather_base"."""
_MESSAGE = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")
_RANK = re.compile(r"(?<!\d)\d{1,6}$")
"""More digits are a date, or a pid."""
_MOST_RANKS = 10**6
_ABSENT = "left no dump"
Dump = dict[str, Any]
Entry = dict[str, Any]


class _Plain(pickle.Unpickler):
    """Reads numbers, texts and containers, and refuses a file with anything else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def read_dump(path: Path) -> tuple[int, Dump] | None:
    """The rank of a dump, and its contents; None if the file is not one. Raises UnisonoError if its
    name does not end with a rank."""
    rank = _RANK.search(path.stem)
    try:
        dump = _Plain(io.BytesIO(path.read_bytes())).load()
        _groups_of({int(rank[0]) if rank else 0: dump})
    except Exception:  # a file may contain anything
        return None
    if rank is None:
        raise UnisonoError(f"the name of {path}, a dump of torch, does not end with a rank")
    return int(rank[0]), dump


def verdict_of(dumps: Mapping[int, Dump]) -> Report | None:
    """What is wrong, by the dumps of a job's ranks; None if no call waits or differs."""
    groups = _groups_of(dumps)

    def where(process: Process) -> Whereabouts:
        """A dump does not say where its process was, only what it called."""
        if process[1] - 1 not in dumps:
            return Whereabouts(state=_ABSENT, is_described=False)
        state = "made no call" if not waits(groups, process) else ""
        for last in sorted(newest_calls(groups, process), key=lambda call: call.record.arrived_s):
            state = state and f"made no call after {last} ({line_of(last.record.site)})"
        return Whereabouts(state=state, is_described=False)

    found = mismatch(groups)
    for wait in waits(groups):
        found = found or hang(groups, wait, where)
    for group in groups:
        found = found or shifted_by_lines(group)
    if found is None:
        return None
    is_hang = found.kind == "lost" and all(rank.state != _ABSENT for rank in found.ranks)
    ranks = tuple(replace(rank, pid=0) for rank in found.ranks)
    return replace(found, kind="hang" if is_hang else found.kind, ranks=ranks, waited_s=0.0)


def _groups_of(dumps: Mapping[int, Dump]) -> list[GroupRecords]:
    members: dict[str, list[int]] = {}
    calls: dict[tuple[str, str], dict[int, list[Entry]]] = {}
    latest_s = 0.0
    for rank, dump in sorted(dumps.items()):
        members |= {name: json.loads(about["ranks"]) for name, about in dump["pg_config"].items()}
        for entry in dump["entries"]:
            latest_s = max(latest_s, _since_s(entry))
            calls.setdefault(tuple(entry["process_group"]), {}).setdefault(rank, []).append(entry)
    everybody = range(1 + max(*dumps, *itertools.chain.from_iterable(members.values()), 0))
    if len(everybody) > _MOST_RANKS:
        raise ValueError(f"rank {everybody[-1]}")
    groups: list[GroupRecords] = []
    for (name, title), by_rank in calls.items():
        is_world = title == "default_pg"
        # gloo does not say who is in a group
        who = members.get(name) or (everybody if is_world else sorted(by_rank))
        end_s = _ends_of_patience(by_rank)
        in_time = {rank: _in_time(by_rank.get(rank, ()), end_s) for rank in who}
        newest = [max(map(_number, in_time[rank]), default=0) for rank in who if rank in dumps]
        common = min(newest, default=0) - (len(newest) < len(who))
        ranks = []
        for place, rank in enumerate(who):
            records = _records(in_time[rank], common, latest_s - time.monotonic())
            ranks.append(RankRecords(place, rank, rank + 1, records))  # the pid is unknown
        shown = "world" if is_world else name if title in ("", "undefined") else title
        backend = next(iter(by_rank.values()))[0]["profiling_name"].partition(":")[0]
        groups.append(GroupRecords(shown, len(who), tuple(ranks), backend, (0, len(groups))))
    return groups


def _ends_of_patience(by_rank: Mapping[int, Sequence[Entry]]) -> dict[int, float]:
    """When the first rank gave up on each call, by the call's number."""
    end_s: dict[int, float] = {}
    for entry in itertools.chain.from_iterable(by_rank.values()):
        limit_s = _since_s(entry) + entry["timeout_ms"] / 1e3
        end_s[_number(entry)] = min(limit_s, end_s.get(_number(entry), math.inf))
    return end_s


def _in_time(entries: Sequence[Entry], end_s: Mapping[int, float]) -> list[Entry]:
    """The calls of a rank, without those that it reached after another rank's had timed out."""
    return [call for call in entries if call["is_p2p"] or _since_s(call) <= end_s[_number(call)]]


def _records(entries: Sequence[Entry], common: int, ahead_s: float) -> tuple[Record, ...]:
    """The calls of one rank. All ranks have reached those up to number `common`; a later one that
    gloo has retired has failed."""
    over = {  # coalesced calls are over when the entry for all of them is
        (entry["is_p2p"], entry["p2p_seq_id"], entry["collective_seq_id"])
        for entry in entries
        if entry["state"] == "completed"
        or (
            entry["retired"]
            and (_number(entry) <= common or not primitive_of(_name(entry)).is_meeting)
        )
    }
    found = []
    for entry in entries:
        message = _MESSAGE.search(entry["profiling_name"])
        operation = message[1] if message else _name(entry)
        if not operation:
            continue
        dtype = "".join(entry["input_dtypes"][:1]).lower() if operation != "barrier" else ""
        count = sum(map(math.prod, entry["input_sizes"])) if dtype else 0
        size_bytes = count * int(re.sub(r"\D", "", dtype) or 8) // 8
        call, tag, peer = (None, 0, int(message[2])) if message else (_number(entry), None, None)
        about = entry["record_id"], operation, dtype, size_bytes, call, tag, peer
        is_over = (entry["is_p2p"], entry["p2p_seq_id"], entry["collective_seq_id"]) in over
        end_s = (entry["time_discovered_completed_ns"] or entry["time_created_ns"]) / 1e9 - ahead_s
        state, ended_s = ("finished", end_s) if is_over else ("waiting", None)
        frames = [frame for frame in entry.get("frames", ()) if is_users(frame["filename"])]
        sites = [f"{short_path(f['filename'])}:{f['line']} in {f['name']}" for f in frames]
        site = next(iter(sites), None)
        since_s = _since_s(entry) - ahead_s
        found.append(Record(*about, None, None, state, "", since_s, None, ended_s, site))
    return tuple(found)


def _name(entry: Entry) -> str:
    """ "all_gather"; empty for a message, and for the entry of coalesced calls."""
    text = entry["profiling_name"].lower()
    text = text.replace("allreduce", "all_reduce").replace("allgather", "all_gather")
    return next((name for name in _OPERATIONS if name in text), "")


def _since_s(entry: Entry) -> float:
    return float(entry["time_created_ns"]) / 1e9


def _number(entry: Entry) -> int:
    return int(entry["collective_seq_id"])
