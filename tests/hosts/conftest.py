"""Hosts as network namespaces, for tests that need more than one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from namespaces import MakeNetwork, Network, network, why_not


@pytest.fixture
def make_network() -> MakeNetwork:
    """Makes hosts: `with make_network(3) as made: made.hosts`. Skips where that needs root."""
    if why_not():
        pytest.skip(why_not())
    return network


@pytest.fixture
def two_hosts(make_network: MakeNetwork) -> Iterator[Network]:
    """Two hosts that reach each other by IPv4 and IPv6."""
    with make_network(2) as made:
        yield made
