"""The one manager that a program may set up for all of its modules."""

from __future__ import annotations

from unisono.comm.communicator import Group
from unisono.groups.manager import ProcessGroupManager

_default: ProcessGroupManager | None = None


def setup_process_group_manager(
    tp_size: int = 1,
    cp_size: int = 1,
    pp_size: int = 1,
    dp_size: int = 1,
    ep_size: int = 1,
    group: Group = None,
) -> ProcessGroupManager:
    """Make a ProcessGroupManager of `tp_size`, `cp_size`, `pp_size`, `dp_size`, `ep_size` and
    `group`, and let `get_process_group_manager` return it from now on, on this rank. Raises what
    ProcessGroupManager raises.

    >>> manager = unisono.setup_process_group_manager(dp_size=2)
    >>> unisono.get_process_group_manager() is manager  # in any module of the program
    True
    >>> manager.cleanup()
    """
    global _default
    _default = ProcessGroupManager(tp_size, cp_size, pp_size, dp_size, ep_size, group)
    return _default


def get_process_group_manager() -> ProcessGroupManager | None:
    """The manager that `setup_process_group_manager` has made; None where none was, or where it
    is closed or the world that it was made in has ended.

    >>> with unisono.setup_process_group_manager(dp_size=2):
    ...     unisono.get_process_group_manager().dp_ranks
    (0, 1)
    >>> unisono.get_process_group_manager() is None
    True
    """
    return None if _default is None or _default.is_closed else _default
