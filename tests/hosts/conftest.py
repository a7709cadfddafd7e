"""Hosts as network namespaces, for tests that need more than one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import MakeNetwork, Network, network, why_not

IN_EVERY_RUN = (
    "test_contacts.py",
    "test_frames.py",
    "test_identity.py",
    "test_ucx.py",
    "test_ucx_layout.py",
    "test_over_hosts.py::test_every_collective[uneven]",
    "test_over_hosts.py::test_the_link_carries_no_more_than_it_must[block]",
    "test_host_faults.py::test_a_killed_rank_is_told_on_every_host",
    "test_host_faults.py::test_a_mismatch_is_found_on_every_host",
    "test_host_faults.py::test_a_cut_cable_is_a_loss_within_5_s",
)
"""The tests of this folder that `make test` runs; `make test-hosts` runs the rest, too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most tests of this folder to `make test-hosts`."""
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and not any(name in item.nodeid for name in IN_EVERY_RUN):
            item.add_marker(pytest.mark.hosts)


@pytest.fixture
def make_network() -> MakeNetwork:
    """Creates hosts: `with make_network(3) as made: made.hosts`. Skips if that needs root."""
    if why_not():
        pytest.skip(why_not())
    return network


@pytest.fixture
def two_hosts(make_network: MakeNetwork) -> Iterator[Network]:
    """Two hosts that reach each other by IPv4 and IPv6."""
    with make_network(2) as made:
        yield made
