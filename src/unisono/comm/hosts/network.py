"""The interface by which hosts talk to each other."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unisono.comm.rendezvous.bounded_store import StoreGone, answer_within
from unisono.errors import RendezvousError

Addresses = dict[str, str]
"""A rank's own addresses by family: "4" and "6"."""

_SIOCGIFADDR = 0x8915
INSTEAD = "set GLOO_SOCKET_IFNAME on each host to the interface by which it reaches the others"


def find_addresses(store: Any) -> Addresses:
    """Where this process may be reached: on the interface that GLOO_SOCKET_IFNAME names, else on
    the one by which it reaches the store, which may lie outside its world, or MASTER_ADDR, or the
    address of its own host's name.

    Raises RendezvousError if that interface does not exist or has no address.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if chosen:
        return _addresses_of(chosen)
    target = _host_of(store) or os.environ.get("MASTER_ADDR") or socket.gethostname()
    return _sources_towards(target)


def choose_address(
    everyone: Sequence[Addresses],
    rank: int,
    name_rank: Callable[[int], str],
    may_be_loopback: bool = False,
) -> str:
    """The address by which this rank is reached, of a family that all ranks have.

    A host that reaches itself by the loopback interface, because MASTER_ADDR means its own name
    there, takes the interface by which it reaches the others. Raises RendezvousError where the
    ranks have no family in common or nothing but loopback interfaces.
    """
    shared = [family for family in ("4", "6") if all(family in theirs for theirs in everyone)]
    if not shared:
        texts = [f"{name_rank(r)}: {_describe(theirs)}" for r, theirs in enumerate(everyone)]
        raise RendezvousError(
            f"the hosts have no kind of address in common: {INSTEAD}\n" + "\n".join(texts)
        )
    for family in shared:
        outward = [theirs[family] for theirs in everyone if not is_loopback(theirs[family])]
        if not outward:
            continue
        own = everyone[rank][family]
        if is_loopback(own):
            own = _sources_towards(outward[0]).get(family, own)
        if not is_loopback(own):
            return own
    own = everyone[rank][shared[0]]
    if may_be_loopback:
        return own
    raise RendezvousError(
        f"{name_rank(rank)} would be reached at {own}, which is the loopback interface, and no "
        f"other host gets there: set MASTER_ADDR to an address that all hosts reach, or {INSTEAD}"
    )


def is_loopback(address: str) -> bool:
    """Whether an address leads nowhere but to its own host."""
    return ipaddress.ip_address(address).is_loopback


def is_networked(store: Any) -> bool:
    """Whether other hosts reach this torch Store, too."""
    return bool(store is not None and _host_of(store))


def socket_family(address: str) -> socket.AddressFamily:
    """The family of sockets that an address is for."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


# -- addresses -----------------------------------------------------------------------------------


def find_interface(address: str) -> str:
    """The name of this host's interface that has an address; "" if there is none."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(RendezvousError):
            if address in _addresses_of(name).values():
                return name
    return ""


def _sources_towards(target: str) -> Addresses:
    """This process's addresses on the way to a host, one for each family; nothing is sent."""
    found: Addresses = {}
    with contextlib.suppress(OSError):  # a name that means nothing here
        for family, _, _, _, where in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            key = "6" if family == socket.AF_INET6 else "4"
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(where)
                _keep(found, key, str(probe.getsockname()[0]))
    return found


def _addresses_of(interface: str) -> Addresses:
    """The addresses of an interface."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise RendezvousError(
            f"GLOO_SOCKET_IFNAME is {interface}, and {socket.gethostname()} has no such interface: "
            f"it has {', '.join(names)}"
        )
    found: Addresses = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        _keep(found, "4", socket.inet_ntop(socket.AF_INET, answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, _, _, name = line.split()
            if name == interface:
                _keep(found, "6", str(ipaddress.ip_address(bytes.fromhex(digits))))
    if not found:
        raise RendezvousError(
            f"GLOO_SOCKET_IFNAME is {interface}, which has no address on {socket.gethostname()}"
        )
    return found


def _keep(found: Addresses, family: str, address: str) -> None:
    """Unless there is one already, or it would mean something else on each host."""
    if not ipaddress.ip_address(address.partition("%")[0]).is_link_local:
        found.setdefault(family, address)


def open_store(store: Any, timeout_s: float) -> Any:
    """A connection of one's own to a store: it answers one at a time. Raises StoreGone if there is
    none in time, and at once if its host has ended, whom torch would call again and again."""
    host, port = _host_of(store), getattr(_lowest(store), "port", 0)

    def call() -> Any:
        if host and port:
            socket.create_connection((host, port), timeout_s).close()
        return store.clone()

    try:
        return answer_within(timeout_s, call)
    except OSError as error:
        raise StoreGone(
            f"the torch Store by which the ranks met, at {host}:{port}, has ended or cannot be "
            f"reached ({error.strerror or error})"
        ) from error


def _host_of(store: Any) -> str:
    """Where a TCPStore is hosted, also below prefixes; "" for others."""
    return str(getattr(_lowest(store), "host", ""))


def _lowest(store: Any) -> Any:
    """The store below all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _describe(addresses: Addresses) -> str:
    return " and ".join(addresses.values()) or "none"
