"""Visitors in a lobby who know more than noise, and what they leave with its owner."""

from __future__ import annotations

import json
import socket
import struct
import time
from pathlib import Path

import pytest

from ranks import RankPool, attempt, connect
from resources import held_resources
from unisono.comm.rendezvous import discovery
from unisono.comm.rendezvous.announcements import FileAnnouncements


def address_of_rank_0(path: str) -> bytes:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if (announcement := FileAnnouncements(path).look_up(0)) is not None:
            return b"\0" + str(announcement["address"]).encode()
        time.sleep(0.005)
    raise AssertionError("rank 0 has not announced itself")


def hello(key: str, rank: int) -> bytes:
    message = discovery.about_me("unisono-" + "0" * 32) | {"key": key, "rank": rank, "size": 2}
    data = json.dumps(message).encode()
    return struct.pack("<I", len(data)) + data


UNWANTED = {
    "a guess at the group's name": (1, hello("wor1d", 1), 1),
    "a hundred guesses": (100, hello("world/0,1/1", 1), 0),
    "garbage with descriptors": (20, b"\xff" * 100, 8),
    "half a message with descriptors": (20, hello("world", 1)[:30], 8),
    "a message of four gigabytes": (5, struct.pack("<I", 0xFFFFFFFF) + b"x" * 4096, 2),
}


@pytest.mark.parametrize("who", UNWANTED)
def test_unwanted_visitors_leave_nothing_with_the_owner(fresh_pool: RankPool, who: str) -> None:
    fresh_pool.run(an_unwanted_visitor_comes, 3, who, connected=False, deadline_s=20)


def hung_up(connection: socket.socket) -> bool:
    """Whether the owner hangs up without a word, at the latest when its world ends."""
    connection.settimeout(15)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def an_unwanted_visitor_comes(rank: int, size: int, path: str, who: str) -> None:
    """Ranks 0 and 1 meet once the third, which is no member, has said all it has to say."""
    before = held_resources()
    said = Path(f"{path}-said")
    if rank == 2:
        times, message, descriptors = UNWANTED[who]
        connections = []
        for _ in range(times):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(address_of_rank_0(path))
            attempt(socket.send_fds, connection, [message], [0] * descriptors)
            connections.append(connection)
        said.touch()
        for connection in connections:
            with connection:
                assert hung_up(connection)
        return
    if rank == 1:
        end = time.monotonic() + 10
        while not said.exists() and time.monotonic() < end:
            time.sleep(0.005)
    with connect(path, rank, 2) as comm:
        comm.barrier()
    assert held_resources() == before
    assert said.exists()
