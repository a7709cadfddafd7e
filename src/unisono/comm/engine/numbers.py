"""The engine's numbers. Written by tools/write_engine_numbers.py from csrc/unisono.h."""

from __future__ import annotations

from enum import IntEnum


class Status:
    """How a call ended. A plain class: an enumeration would slow down the start of a process."""

    OK = 0
    MISMATCH = 1
    TIMEOUT = 2
    PEER_CLOSED = 3
    ABORTED = 4
    INTERRUPTED = 5
    REFUSED = 6
    NO_MEMORY = 7
    CLOSED = 8
    FORKED = 9
    SYSTEM = 10
    REENTERED = 11
    NOT_YET = 12
    UNFIT = 13
    DEADLOCK = 14
    PEER_LOST = 15
    DAMAGED = 16
    ASK_AGAIN = 100
    ON_DEVICE = 101


class Operation(IntEnum):
    """What a call does."""

    BARRIER = 1
    ALL_REDUCE = 2
    REDUCE = 3
    BROADCAST = 4
    ALL_GATHER = 5
    REDUCE_SCATTER = 6
    GATHER = 7
    SCATTER = 8
    ALL_TO_ALL = 9
    SEND = 10
    RECV = 11
    ALLOCATE = 12
    NEW_GROUP = 13


class Form:
    """What else a reduction is, as bits above the four of its number."""

    REPRODUCIBLE = 1
    CONTRIBUTIONS = 2


class Note:
    """Texts that a rank leaves for its peers' errors."""

    SITE = 0
    SHAPE = 1
    ANSWER = 2
    REASON = 3
    COMING = 4
    CHOICE = 5
    REFUSAL = 6


REDUCTION_NUMBERS = {
    "sum": 0,
    "avg": 1,
    "product": 2,
    "min": 3,
    "max": 4,
    "band": 5,
    "bor": 6,
    "bxor": 7,
    "premul_sum": 8,
    "truncated_avg": 9,
}
