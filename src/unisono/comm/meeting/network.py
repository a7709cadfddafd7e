"""The interface by which hosts reach each other."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from unisono.errors import RendezvousError

Addresses = dict[str, str]
"""A rank's own addresses by family: "4" and "6"."""

_SIOCGIFADDR = 0x8915
MORE_NEIGHBOURS = "run `sysctl -w net.ipv4.neigh.default.gc_thresh3=16384`"
"""The kernel's table of neighbours is too small: connecting fails with "No route to host"."""
INSTEAD = "set GLOO_SOCKET_IFNAME on each host to the interface by which it reaches the others"


def find_addresses(store_host: str) -> Addresses:
    """Where this process can be reached: on the interface that GLOO_SOCKET_IFNAME names, else on
    the one by which it reaches the store, which may be outside its world, or MASTER_ADDR, or the
    address of its own host name.

    Raises RendezvousError if that interface does not exist or has no address.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0].strip()
    if chosen:
        return _addresses_of(chosen)
    target = store_host or os.environ.get("MASTER_ADDR") or socket.gethostname()
    return _sources_towards(target)


def choose_address(
    everyone: Sequence[Addresses],
    rank: int,
    name_rank: Callable[[int], str],
    may_be_loopback: bool = False,
) -> str:
    """The address of this rank, of a family that all ranks have.

    A host that reaches itself by the loopback interface, because MASTER_ADDR is its own name, uses
    the interface by which it reaches the others. Raises RendezvousError if the ranks have no family
    in common or only loopback interfaces.
    """
    shared = [family for family in ("4", "6") if all(family in theirs for theirs in everyone)]
    if not shared:
        texts = [f"{name_rank(r)}: {_describe(theirs)}" for r, theirs in enumerate(everyone)]
        raise RendezvousError(
            f"the hosts have no address family in common: {INSTEAD}\n" + "\n".join(texts)
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
        f"{name_rank(rank)} has only the loopback address {own}, which other hosts cannot reach: "
        f"set MASTER_ADDR to an address that all hosts reach, or {INSTEAD}"
    )


def is_loopback(address: str) -> bool:
    """Whether an address reaches only its own host."""
    return ipaddress.ip_address(address).is_loopback


def socket_family(address: str) -> socket.AddressFamily:
    """The socket family of an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


# -- addresses -----------------------------------------------------------------------------------


def find_interface(address: str) -> str:
    """The name of this host's interface with this address; "" if there is none."""
    for _, name in socket.if_nameindex():
        with contextlib.suppress(RendezvousError):
            if address in _addresses_of(name).values():
                return name
    return ""


def _sources_towards(target: str) -> Addresses:
    """This process's addresses on the route to a host, one for each family; nothing is sent."""
    found: Addresses = {}
    with contextlib.suppress(OSError):  # an unknown name
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
            f"GLOO_SOCKET_IFNAME is {interface}, but {socket.gethostname()} has no such interface: "
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
    """Unless there is one already, or it would mean a different host on each host."""
    if not ipaddress.ip_address(address.partition("%")[0]).is_link_local:
        found.setdefault(family, address)


def _describe(addresses: Addresses) -> str:
    return " and ".join(addresses.values()) or "none"
