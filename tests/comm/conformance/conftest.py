"""What every transport of the Communicator guarantees, at every group size.

One set of tests; the fixture `comm` runs each on all transports. A test runs on every rank and
compares with what it computes from all ranks' inputs: bit for bit, except for the order in which
another library adds the floats of three or more ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist

import expected
from implementations import EVERY, PLACEMENTS, SHARING, implementation
from on_shared_tensors import OnSharedTensors
from unisono.comm.communicator import Communicator
from unisono.comm.factory import connect as connect_hosts
from unisono.comm.hosts.hosts_transport import HostsTransport
from unisono.comm.meeting.board import Board
from unisono.comm.over_torch.torch_transport import OverTorch
from unisono.testing import assignment
from unisono.world.world import resolve


@pytest.fixture(params=[implementation(*chosen) for chosen in EVERY])
def comm(request: pytest.FixtureRequest, shared_tmp_path: Path) -> Iterator[Communicator]:
    """The plugin's Communicator, one over the plugin's gloo group, and the one under a process
    group of our backend."""
    if request.param == "torch":
        with resolve(request.getfixturevalue("process_group")) as made:
            assert isinstance(made.transport, OverTorch)
            yield made
    elif request.param in PLACEMENTS:
        yield request.getfixturevalue("hosts_world")
    elif request.param in SHARING:
        world = request.getfixturevalue("world_of_ours")
        yield cast(Communicator, OnSharedTensors(world, SHARING[request.param]))
    elif request.param == "resolved":
        yield resolve(request.getfixturevalue("process_group"))
    else:
        yield request.getfixturevalue("world_of_ours")


@pytest.fixture
def world_of_ours(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    with assignment.world(request.config.stash[assignment.ASSIGNMENT]) as made:
        yield made


@pytest.fixture
def hosts_world(
    request: pytest.FixtureRequest, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Communicator]:
    """A world over simulated hosts: all ranks are on this machine."""
    hosts = PLACEMENTS[request.node.callspec.params["comm"]]
    rank = int(os.environ["UNISONO_RANK"])
    monkeypatch.setenv("UNISONO_HOSTID", hosts[rank])
    monkeypatch.setattr(expected, "placement", hosts)
    store = dist.FileStore(str(shared_tmp_path / "store"), len(hosts))
    made = connect_hosts(Board(store), rank, len(hosts), timeout_s=60)
    assert isinstance(made.transport, HostsTransport)
    with made:
        yield made
