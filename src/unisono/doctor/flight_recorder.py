"""Dumps of torch's Flight Recorder: one verdict from the files of all ranks.

Each file has the last calls of one rank, and its name ends with the rank, as in torch's own tools.
The calls become the records of the watch, and the watch's diagnosis reads those.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.comm.shared_memory.records import GroupRecords, Process, RankRecords, Record
from unisono.errors import UnisonoError
from unisono.watch.calls import waits
from unisono.watch.diagnose import Whereabouts, hang, mismatch, shifted_by_lines
from unisono.watch.report import Report

_MEETING = ("barrier", "all_reduce", "reduce_scatter", "all_gather", "all_to_all")
"""Calls that finish on no rank before all ranks have reached them."""
_OPERATIONS = (*_MEETING, "broadcast", "gather", "scatter", "reduce")
"""By the first that is part of torch's name: "nccl:all_reduce_barrier", "gloo:_all_gather_base"."""
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_MESSAGE = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")
_LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3|^<|\.(cpp|h)$|^\?\?$")
Dump = dict[str, Any]


class _Plain(pickle.Unpickler):
    """Reads numbers, texts and containers; a file that asks for anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants {module}.{name}")


def read_dump(path: Path) -> tuple[int, Dump] | None:
    """The rank of a dump, and its contents; None if the file is not one. Raises UnisonoError if its
    name does not end with a rank."""
    try:
        found = _Plain(io.BytesIO(path.read_bytes())).load()
        is_dump = isinstance(found["entries"], list) and bool(found["version"])
    except Exception:  # whatever a damaged file leads to
        return None
    named = re.search(r"(\d+)$", path.stem)
    if is_dump and named is None:
        raise UnisonoError(f"the name of {path}, a dump of torch, does not end with a rank")
    return (int(named[1]), found) if is_dump and named is not None else None


def verdict_of(dumps: Mapping[int, Dump]) -> Report | None:
    """What is wrong, by the dumps of a job's ranks; None if no call waits or differs."""
    groups = _groups_of(dumps)

    def where(process: Process) -> Whereabouts:
        """A dump does not say where its process was, only what it called."""
        if process[1] - 1 not in dumps:
            return Whereabouts(state="left no dump", is_described=False)
        return Whereabouts(state="" if waits(groups, process) else "made no call")

    found = mismatch(groups)
    for wait in waits(groups):
        found = found or hang(groups, wait, where)
    for group in groups:
        found = found or shifted_by_lines(group)
    if found is None:
        return None
    left_dumps = all(rank.state != "left no dump" for rank in found.ranks)
    return replace(
        found,
        kind="hang" if found.kind == "lost" and left_dumps else found.kind,
        ranks=tuple(replace(rank, pid=0) for rank in found.ranks),
    )


def _groups_of(dumps: Mapping[int, Dump]) -> list[GroupRecords]:
    """The groups, as they were when the first call ran into its timeout."""
    members: dict[str, Sequence[int]] = {}
    calls: dict[str, dict[int, list[Dump]]] = {}
    for rank, dump in sorted(dumps.items()):
        for name, config in dump.get("pg_config", {}).items():
            members.setdefault(name, json.loads(config["ranks"]))
        for entry in dump["entries"]:
            calls.setdefault(entry["process_group"][0], {}).setdefault(rank, []).append(entry)
    for name, by_rank in calls.items():
        is_world = next(iter(by_rank.values()))[0]["process_group"][1] == "default_pg"
        everybody = range(max(dumps) + 1) if is_world else sorted(by_rank)
        members.setdefault(name, everybody)  # gloo does not say who is in a group
        _reopen(by_rank, len(members[name]))
    entries = [entry for dump in dumps.values() for entry in dump["entries"]]
    ends_s = [_since_s(one) + one["timeout_ms"] / 1e3 for one in entries if not _is_over(one)]
    end_s = min(ends_s, default=math.inf)
    ahead_s = min(end_s, max(map(_since_s, entries), default=0.0)) - time.monotonic()
    groups = []
    for number, (name, by_rank) in enumerate(sorted(calls.items())):
        first = next(iter(by_rank.values()))[0]
        described = {"default_pg": "world", "undefined": "", "": ""}
        ranks = [
            RankRecords(
                place,
                rank,
                rank + 1,  # in place of its pid
                _records([one for one in by_rank.get(rank, ()) if _since_s(one) <= end_s], ahead_s),
            )
            for place, rank in enumerate(members[name])
        ]
        title = described.get(first["process_group"][1], first["process_group"][1]) or name
        backend = first["profiling_name"].partition(":")[0]
        groups.append(GroupRecords(title, len(ranks), tuple(ranks), backend, (0, number)))
    return groups


def _reopen(by_rank: Mapping[int, Sequence[Dump]], size: int) -> None:
    """gloo's entries of calls that failed look as if they had finished: the last call of a rank has
    failed if some other rank never reached it, or too late."""
    for entries in by_rank.values():
        last = entries[-1]
        if last["state"] == "completed" or _operation(last) not in _MEETING:
            continue
        end_s = _since_s(last) + last["timeout_ms"] / 1e3
        peers = [one for others in by_rank.values() for one in others]
        came = [_since_s(one) for one in peers if _sequence(one) == _sequence(last)]
        last["retired"] = last["retired"] and len(came) >= size and max(came) <= end_s


def _since_s(entry: Dump) -> float:
    return float(entry["time_created_ns"]) / 1e9


def _is_over(entry: Dump) -> bool:
    return bool(entry["retired"]) or entry["state"] == "completed"


def _sequence(entry: Dump) -> tuple[bool, int]:
    """What the calls of one coalesced call have in common."""
    is_message = bool(entry["is_p2p"])
    return is_message, int(entry["p2p_seq_id" if is_message else "collective_seq_id"])


def _operation(entry: Dump) -> str:
    """ "all_gather"; empty for a message, and for what is coalesced."""
    text = entry["profiling_name"].partition(":")[2].lower()
    text = text.replace("allreduce", "all_reduce").replace("allgather", "all_gather")
    return next((name for name in _OPERATIONS if name in text), "")


def _records(entries: Iterable[Dump], ahead_s: float) -> tuple[Record, ...]:
    """The calls of one rank in one group."""
    over = {_sequence(entry) for entry in entries if _is_over(entry)}
    found = []
    for entry in entries:
        message = _MESSAGE.search(entry["profiling_name"])
        operation = _operation(entry)
        if message is None and (not operation or entry["is_p2p"]):
            continue  # what is coalesced has entries of its own
        is_over = _sequence(entry) in over
        is_bare = operation == "barrier"
        sizes = [] if is_bare else entry["input_sizes"] or entry["output_sizes"]
        given = [] if is_bare else entry["input_dtypes"] or entry["output_dtypes"]
        dtype = _DTYPES.get(given[0], given[0].lower()) if given else ""
        item_bits = int(re.sub(r"\D", "", dtype) or 8)
        ended_s = (entry["time_discovered_completed_ns"] or entry["time_created_ns"]) / 1e9
        found.append(
            Record(
                number=entry["record_id"],
                operation=message[1] if message else operation,
                dtype=dtype,
                bytes=sum(map(math.prod, sizes)) * item_bits // 8,
                call=None if message else entry["collective_seq_id"],
                tag=0 if message else None,
                peer=int(message[2]) if message else None,
                root=None,
                reduction=None,
                state="finished" if is_over else "waiting",
                status="",
                arrived_s=_since_s(entry) - ahead_s,
                started_s=None,
                ended_s=ended_s - ahead_s if is_over else None,
                site=_site(entry.get("frames", ())),
            )
        )
    return tuple(found)


def _site(frames: Iterable[Dump]) -> str | None:
    """The innermost line that is not of a library: "train.py:88 in step"."""
    for frame in frames:
        if not _LIBRARIES.search(frame["filename"]):
            path = os.path.relpath(frame["filename"])
            shown = frame["filename"] if path.startswith("..") else path
            return f"{shown}:{frame['line']} in {frame['name']}"
    return None
