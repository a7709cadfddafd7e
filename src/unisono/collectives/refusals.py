"""Saying no to arguments in a way that the other ranks hear."""

from __future__ import annotations

from typing import Any, NoReturn

from unisono.comm.base import Communicator


def refuse_type(comm: Communicator, operation: str, why: str) -> NoReturn:
    """Raise TypeError about this rank's arguments, once its peers know."""
    try:
        comm.refuse(operation, why)
    except ValueError as error:
        raise TypeError(str(error)) from None


def check_rank(comm: Communicator, operation: str, rank: Any) -> None:
    """Refuse what is no rank of the group."""
    if not isinstance(rank, int) or not 0 <= rank < comm.size:
        comm.refuse(operation, f"rank {rank!r} is not a rank of a group of {comm.size}")
