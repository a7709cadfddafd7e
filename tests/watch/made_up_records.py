"""Invented records, for tests of the conclusions drawn from them."""

from __future__ import annotations

from unisono.comm.shared_memory.records import GroupRecords, RankRecords, Record


def record(number: int, state: str = "finished", **more: object) -> Record:
    """A call, with the given fields changed."""
    fields: dict[str, object] = {
        "number": number,
        "operation": "all_reduce",
        "dtype": "float32",
        "bytes": 16,
        "call": number,
        "tag": None,
        "peer": None,
        "root": None,
        "reduction": "sum",
        "state": state,
        "status": "OK",
        "arrived_s": float(number),
        "started_s": None,
        "ended_s": number + 0.5 if state == "finished" else None,
        "site": f"train.py:{number} in step",
    }
    return Record(**(fields | more))  # type: ignore[arg-type]


def group(*ranks: list[Record], name: str = "dp", segment: int = 1) -> GroupRecords:
    """A group whose ranks have made these calls."""
    members = tuple(
        RankRecords(rank, rank, 100 + rank, tuple(records)) for rank, records in enumerate(ranks)
    )
    return GroupRecords(name, len(ranks), members, "gloo", (0, segment))
