"""A pool's ranks as ranks on hosts: each moves into its host's namespaces and joins the world."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from namespaces import Host, Network

from unisono.torch_backend import autoload
from user_programs import eventually

PORT = 29400
SOON_S = 3.5
"""Within which a death must be known on a busy machine: before a link's patience of 4 s ends, since
silence would show it then. benchmarks/faults.py measures the 150 ms that are guaranteed."""


@dataclass(frozen=True)
class Places:
    """The host of every rank, and the address family that hosts use."""

    hosts: tuple[Host, ...]
    of_rank: tuple[int, ...]
    family: str = "ipv4"

    @property
    def size(self) -> int:
        return len(self.of_rank)

    def host(self, rank: int) -> Host:
        return self.hosts[self.of_rank[rank]]

    def beside(self, rank: int) -> list[int]:
        """The ranks of the same host."""
        here = self.of_rank[rank]
        return [other for other, host in enumerate(self.of_rank) if host == here]


def places(made: Network, of_rank: Sequence[int], family: str = "ipv4") -> Places:
    return Places(made.hosts, tuple(of_rank), family)


@contextlib.contextmanager
def world(
    rank: int,
    where: Places,
    timeout_s: float = 60.0,
    serial: int = 0,
    join_timeout_s: float = 60.0,
) -> Iterator[Any]:
    """torch's default group over unisono, on this rank's host; returns what moves its data.
    Successive worlds have a serial number each, because rank 0 may still host the store of the one
    before."""
    where.host(rank).enter()
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(where.size),
        "LOCAL_RANK": str(where.beside(rank).index(rank)),
        "LOCAL_WORLD_SIZE": str(len(where.beside(rank))),
        "MASTER_ADDR": getattr(where.host(0), where.family),
        "MASTER_PORT": str(PORT + serial),
    }
    autoload.register()
    dist.init_process_group("unisono", timeout=timedelta(seconds=join_timeout_s))
    comm: Any = dist.group.WORLD.comm  # type: ignore[union-attr]
    comm.timeout_s = timeout_s  # of calls: ranks may take a while to arrive
    try:
        yield comm
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def set_moment(path: str, name: str) -> None:
    """Record for `moment` that something happens now."""
    draft = Path(f"{path}-{name}-{os.getpid()}")
    draft.write_text(str(time.monotonic()))
    draft.rename(f"{path}-{name}")


def moment(path: str, name: str) -> float:
    """When it happened, by the machine's clock; waits for it. Needs neither group nor store."""
    file = Path(f"{path}-{name}")
    assert eventually(file.exists)
    return float(file.read_text())


def await_all(path: str, rank: int, size: int) -> None:
    """Wait until all ranks have come here, without their group. A collective ends on one rank
    before the others have its data, which a death, an abort or a cut cable may overtake: a fault
    that must hit the next call begins after this."""
    set_moment(path, f"here-{rank}")
    for other in range(size):
        moment(path, f"here-{other}")
