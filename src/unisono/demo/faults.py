"""A barrier, and what goes wrong: two programs with a fault, each on a group of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy

from unisono.comm.base import Communicator
from unisono.errors import GroupError

BOTH_SEND = """\
other = 1 - pair.rank
pair.send(numbers, other)
pair.recv(numbers, other)
"""
ONE_TOO_MANY = """\
last = group.rank == group.size - 1
group.all_reduce(numpy.zeros(5 if last else 4))
"""


@dataclass(frozen=True)
class Moment:
    """When a rank came to the barrier and when it left, in seconds of the machine's clock."""

    came_s: float
    left_s: float


def meet(comm: Communicator) -> Moment:
    """A barrier to which the ranks come one after the other."""
    comm.barrier()
    time.sleep(0.05 * comm.rank)
    came_s = time.monotonic()
    comm.barrier()
    return Moment(came_s, time.monotonic())


def deadlock(comm: Communicator) -> GroupError | None:
    """The error of ranks 0 and 1, which both send before they receive; None on the others."""
    pair = comm.split([0, 1])
    if pair is None:
        return None
    return _error_of(BOTH_SEND, "both_send.py", pair=pair, numbers=numpy.zeros(1))


def mismatch(comm: Communicator) -> GroupError | None:
    """The error of every rank where the last passes another tensor than the others."""
    group = comm.split(range(comm.size))
    return _error_of(ONE_TOO_MANY, "one_too_many.py", group=group, numpy=numpy)


def _error_of(program: str, name: str, **values: Any) -> GroupError | None:
    """Run a program as it will be shown, so that the lines in its error can be looked up there."""
    group = values.get("pair") or values["group"]
    try:
        with group:
            exec(compile(program, name, "exec"), values)
    except GroupError as error:
        return error
    return None
