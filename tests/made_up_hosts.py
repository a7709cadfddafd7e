"""Simulated hosts: ranks of one machine that claim, with UNISONO_HOSTID, to be on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect
from unisono.comm.hosts.hosts_transport import HostsTransport
from unisono.comm.meeting.board import Board


def join_world(rank: int, path: str, hosts: str) -> Communicator:
    """A world with a rank for each letter; equal letters are one host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNISONO_HOSTID", hosts[rank])
        store = dist.FileStore(f"{path}-store", len(hosts))  # type: ignore[attr-defined]
        made = connect(Board(store), rank, len(hosts), timeout_s=30)
    assert isinstance(made.transport, HostsTransport)
    return made


@contextmanager
def world(rank: int, path: str, hosts: str) -> Iterator[Communicator]:
    """The same, as a context manager."""
    with join_world(rank, path, hosts) as made:
        yield made
