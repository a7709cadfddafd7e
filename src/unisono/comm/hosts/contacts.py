"""How each rank of a world over hosts is reached: by its UCX worker, and by its control line.

Every rank finds a UCX library, creates its worker, and tells the others through the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.comm.engine import native
from unisono.comm.hosts import ucx
from unisono.comm.meeting.board import Board
from unisono.comm.meeting.identity import Hosts
from unisono.comm.meeting.network import find_interface
from unisono.comm.meeting.roster import gather
from unisono.errors import RendezvousError, UnisonoError


class Contact(NamedTuple):
    """The address, port and interface of a rank's control line; and the address of its UCX
    worker, as hexadecimal digits, with the version and the path of its UCX. A `problem` says why
    it cannot be reached."""

    address: str
    port: int
    interface: str
    worker: str = ""
    version: tuple[int, ...] = ()
    path: str = ""
    problem: str = ""

    @property
    def where(self) -> tuple[str, int]:
        """The address of its control line."""
        return self.address, self.port


def exchange_contacts(
    board: Board, hosts: Hosts, rank: int, mine: Contact, group: str
) -> list[Contact]:
    """Every rank's contact; all ranks call it, each with its own.

    Raises RendezvousError on all of them if one has no UCX, or their versions differ.
    """
    told = gather(board, "contacts", rank, len(hosts.pids), {"contact": mine._asdict()}, group)
    contacts = [Contact(**theirs["contact"]) for theirs in told]
    for other, contact in enumerate(contacts):
        if contact.problem:
            raise RendezvousError(f"{hosts.name_rank(other)}: {contact.problem}")
    compare_versions(contacts, hosts)
    return contacts


def compare_versions(contacts: Sequence[Contact], hosts: Hosts) -> None:
    """Raise RendezvousError, with the version on each host, unless all ranks have one version of
    UCX; the last of its numbers may differ."""
    if len({tuple(contact.version[:2]) for contact in contacts}) == 1:
        return
    why = (
        f"the hosts have different versions of UCX: install one on all of them ({ucx.INSTALL}), or "
        "set UNISONO_UCX on each to a library of one version"
    )
    for rank, contact in enumerate(contacts):
        name, version = hosts.names[hosts.host_of(rank)], ".".join(map(str, contact.version))
        line = f"\n  {name}: {version} ({contact.path})"
        why += line if line not in why else ""
    raise RendezvousError(why)


def own_contact(address: str, port: int, has_data: bool) -> Contact:
    """This rank's contact, with its control line at `port`, and a UCX worker if it `has_data`."""
    interface = find_interface(address)
    if not has_data:
        return Contact(address, port, interface)
    try:
        found = ucx.find()
        version = ucx.load(found)
        worker = native.open_network(ucx.settings(found, address)).hex()
    except UnisonoError as error:  # passed on to all ranks
        return Contact(address, port, interface, problem=str(error))
    except OSError as error:
        return Contact(address, port, interface, problem=f"UCX cannot be started: {error}")
    return Contact(address, port, interface, worker, version, str(found.path))
