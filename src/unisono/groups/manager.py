"""ProcessGroupManager: the groups of a program that is parallel in several ways at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from unisono.comm.communicator import Group
from unisono.errors import name_ranks
from unisono.groups.parents import AxisGroup, Parent, parent_of
from unisono.plan.mesh import Mesh
from unisono.torch_support import require_torch
from unisono.world.environment import read_local_rank, read_rank_info
from unisono.world.world import resolve

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp", "pp", "cp", "ep", "tp")
"""The axes of every manager, slowest first, in the order of ScaleTorch's grid. An axis that the
mesh lacks has one rank."""

_JOINT = (("cp", "dp"), ("pp", "dp"))

T = TypeVar("T")


class _GroupAttribute(Generic[T]):
    """An attribute of the manager that belongs to one of its groups: `tp_rank`, `cp_dp_group`,
    ..."""

    def __init__(self, axes: Sequence[str], read: Callable[[AxisGroup], T]) -> None:
        self._axes, self._read = axes, read

    def __get__(self, manager: ProcessGroupManager | None, owner: type) -> T:
        if manager is None:
            return self  # type: ignore[return-value] # nobody but pydoc asks the class
        return self._read(manager.along(*self._axes))


def _of_each(read: Callable[[AxisGroup], T]) -> list[_GroupAttribute[T]]:
    """Of tp, cp, ep, pp and dp, and of cp and dp, pp and dp together."""
    groups = (("tp",), ("cp",), ("ep",), ("pp",), ("dp",), *_JOINT)
    return [_GroupAttribute(axes, read) for axes in groups]


class ProcessGroupManager:
    """Every rank's groups along tp, cp, pp, dp (and ep), and along cp with dp and pp with dp:
    `tp_size`, `cp_size`, `pp_size`, `dp_size` and `ep_size` are the numbers of ranks along each
    axis.

    Ranks are laid out as `Mesh` says, tp fastest, then ep, cp, pp, dp. For each axis `x` there are

    - `x`, the Communicator, and `x_group`, the torch process group (for `dist.*` and DDP);
    - `x_world_size` and `x_rank`, the size of this rank's group and its rank in it;
    - `x_ranks`, `x_first_rank`, `x_last_rank`: the members, as global ranks; `x_group_ids` is
      `x_ranks` as a list.

    `global_rank` and `local_rank` are this process's own: among all, and on its machine as its
    launcher says (the global rank if unknown).

    `along("ep", "dp")` has the same for any combination of axes. Groups are made on first use, by
    their members only. Any number of managers may exist at once if all ranks make them in the same
    order.

    `group` is where the ranks come from: a Communicator, a torch process group, or None for the
    world. Raises ValueError if the sizes do not multiply to its size.

    >>> with unisono.ProcessGroupManager(pp_size=2) as manager:
    ...     manager.pp.barrier()
    ...     print(manager.pp_ranks, manager.tp_group_ids == [comm.rank])
    (0, 1) True
    >>> manager.pp_is_first_stage == (comm.rank == 0), manager.pp_is_last_stage == (comm.rank == 1)
    (True, True)
    >>> (manager.pp_prev_rank, manager.pp_next_rank) == ((None, 1) if comm.rank == 0 else (0, None))
    True
    >>> manager.cp_send_rank == manager.cp_recv_rank == comm.rank  # alone along cp
    True
    >>> manager.is_closed
    True
    """

    # fmt: off
    tp, cp, ep, pp, dp, cp_dp, pp_dp = _of_each(lambda own: own.comm)
    (tp_group, cp_group, ep_group, pp_group, dp_group,
     cp_dp_group, pp_dp_group) = _of_each(lambda own: own.group)
    (tp_world_size, cp_world_size, ep_world_size, pp_world_size, dp_world_size,
     cp_dp_world_size, pp_dp_world_size) = _of_each(lambda own: own.size)
    (tp_rank, cp_rank, ep_rank, pp_rank, dp_rank,
     cp_dp_rank, pp_dp_rank) = _of_each(lambda own: own.rank)
    (tp_ranks, cp_ranks, ep_ranks, pp_ranks, dp_ranks,
     cp_dp_ranks, pp_dp_ranks) = _of_each(lambda own: own.ranks)
    (tp_group_ids, cp_group_ids, ep_group_ids, pp_group_ids, dp_group_ids,
     cp_dp_group_ids, pp_dp_group_ids) = _of_each(lambda own: list(own.ranks))
    (tp_first_rank, cp_first_rank, ep_first_rank, pp_first_rank, dp_first_rank,
     cp_dp_first_rank, pp_dp_first_rank) = _of_each(lambda own: own.ranks[0])
    (tp_last_rank, cp_last_rank, ep_last_rank, pp_last_rank, dp_last_rank,
     cp_dp_last_rank, pp_dp_last_rank) = _of_each(lambda own: own.ranks[-1])
    # fmt: on

    def __init__(
        self,
        tp_size: int = 1,
        cp_size: int = 1,
        pp_size: int = 1,
        dp_size: int = 1,
        ep_size: int = 1,
        group: Group = None,
    ) -> None:
        sizes = {"dp": dp_size, "pp": pp_size, "cp": cp_size, "ep": ep_size, "tp": tp_size}
        if ep_size == 1:
            del sizes["ep"]
        mesh, parent = Mesh(sizes), parent_of(group)
        mesh.check_world(parent.size)
        self._begin(mesh, parent, range(parent.size))

    def _begin(self, mesh: Mesh, parent: Parent, parent_ranks: Sequence[int]) -> None:
        self.mesh = mesh
        self.global_rank = parent.global_ranks[parent.rank]
        self.world_size = mesh.size
        is_known = read_rank_info() is not None or "LOCAL_RANK" in os.environ
        self.local_rank = read_local_rank() if is_known else self.global_rank
        self._parent = parent
        self._parent_ranks = list(parent_ranks)  # a rank of the mesh -> a rank of the parent
        self._rank = self._parent_ranks.index(parent.rank)
        self._suffix = parent.next_suffix(self._parent_ranks)
        self._groups: dict[tuple[str, ...], AxisGroup] = {}
        self._lock = threading.Lock()
        self._closed = False

    # -- groups ----------------------------------------------------------------------------------

    def along(self, *axes: str) -> AxisGroup:
        """This rank's group along one or several `axes`. Nothing is made before its `comm` or
        `group` is used. Raises ValueError for an unknown axis.

        >>> with unisono.ProcessGroupManager(dp_size=2) as manager:
        ...     own = manager.along("ep", "dp")
        ...     print(own.ranks, own.comm.size)
        (0, 1) 2
        """
        key = self._axes_of_several(axes)
        with self._lock:
            if key not in self._groups:
                self._groups[key] = self._axis_group(key)
                if self._closed:
                    self._groups[key].close()
            return self._groups[key]

    def _axes_of_several(self, axes: Sequence[str]) -> tuple[str, ...]:
        """The axes with more than one rank, fastest first. They identify a group."""
        known = [axis for axis in axes if axis in self.mesh.axes or axis not in AXES]
        if known or not axes:
            self.mesh.members(self._rank, *known)  # raises if one is wrong
        order = reversed(self.mesh.axes)
        return tuple(axis for axis in order if axis in known and self.mesh[axis] > 1)

    def _axis_group(self, axes: tuple[str, ...]) -> AxisGroup:
        members = self.mesh.members(self._rank, *axes) if axes else [self._rank]
        parent_ranks = [self._parent_ranks[member] for member in members]
        return self._parent.axis_group(parent_ranks, "_".join(axes or ("own",)) + self._suffix)

    @property
    def pp_next_rank(self) -> int | None:
        """The global rank of the next pipeline stage, None at the last one."""
        return None if self.pp_is_last_stage else self.along("pp").neighbour(1)

    @property
    def pp_prev_rank(self) -> int | None:
        """The global rank of the previous pipeline stage, None at the first one."""
        return None if self.pp_is_first_stage else self.along("pp").neighbour(-1)

    @property
    def pp_is_first_stage(self) -> bool:
        """Whether this rank is in the first pipeline stage."""
        return self.pp_rank == 0

    @property
    def pp_is_last_stage(self) -> bool:
        """Whether this rank is in the last pipeline stage."""
        return self.pp_rank == self.pp_world_size - 1

    @property
    def cp_send_rank(self) -> int:
        """The global rank that this one sends to in the ring along cp."""
        return self.along("cp").neighbour(1)

    @property
    def cp_recv_rank(self) -> int:
        """The global rank that this one receives from in the ring along cp."""
        return self.along("cp").neighbour(-1)

    @property
    def grid(self) -> torch.Tensor:
        """The global ranks as a tensor of five dimensions: dp, pp, cp, ep, tp. A manager of a
        DeviceMesh with other axes, or in another order, has the mesh's own dimensions.

        >>> unisono.ProcessGroupManager(pp_size=2).grid
        tensor([[[[[0]]], [[[1]]]]])
        """
        require_torch("the manager's grid")
        import torch

        mesh = self.mesh
        shape = mesh.shape
        if mesh.axes == tuple(axis for axis in AXES if axis in mesh.axes):
            shape = tuple(mesh[axis] if axis in mesh.axes else 1 for axis in AXES)
        return torch.tensor(self._global_ranks).reshape(shape)

    @property
    def _global_ranks(self) -> list[int]:
        return [self._parent.global_ranks[rank] for rank in self._parent_ranks]

    @property
    def world_group(self) -> ProcessGroup:
        """torch's process group of all ranks of this manager. Raises UnisonoError if
        torch.distributed is not initialised.

        >>> import torch.distributed as dist  # initialised
        >>> unisono.ProcessGroupManager(pp_size=2).world_group is dist.group.WORLD
        True
        """
        parent = self._parent
        is_whole = self._parent_ranks == list(range(parent.size))
        if is_whole and parent.process_group is not None:
            group: ProcessGroup = parent.process_group
            return group
        return self.along(*self.mesh.axes).group

    # -- torch's meshes --------------------------------------------------------------------------

    def to_device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """The same layout as torch's DeviceMesh for a `device_type`, over the groups of this
        manager; a dimension for each axis. Every rank must call it because it makes all groups
        along one axis.

        Raises UnisonoError if torch.distributed is not initialised.

        >>> import torch.distributed as dist  # initialised
        >>> manager = unisono.ProcessGroupManager(tp_size=2)
        >>> manager.to_device_mesh().mesh_dim_names
        ('dp', 'pp', 'cp', 'tp')
        """
        require_torch("to_device_mesh")
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        groups = [self.along(axis).group for axis in self.mesh.axes]
        return DeviceMesh.from_group(
            groups,
            device_type,
            mesh=torch.tensor(self._global_ranks).reshape(self.mesh.shape),
            mesh_dim_names=self.mesh.axes,
        )

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Self:
        """A manager of the groups of torch's `device_mesh`, which still owns them: `close` does not
        close them. Its dimensions are the axes, by their names; `along` takes those that are not
        tp, cp, ep, pp or dp. Raises ValueError for dimensions without names, or a mesh that this
        process is not in.

        >>> import torch.distributed as dist  # initialised
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        >>> unisono.ProcessGroupManager.from_device_mesh(mesh).tp_ranks
        (0, 1)
        """
        from unisono.comm.over_torch import process_groups

        names = device_mesh.mesh_dim_names
        if not names:
            raise ValueError("the DeviceMesh has no mesh_dim_names: pass names for its axes")
        if device_mesh.get_coordinate() is None:
            raise ValueError("this process is not in the DeviceMesh")
        manager = cls.__new__(cls)
        mesh = Mesh(dict(zip(names, device_mesh.mesh.shape, strict=True)))
        parent = parent_of(process_groups.world())
        manager._begin(mesh, parent, device_mesh.mesh.flatten().tolist())
        for axis in names:
            if mesh[axis] > 1:
                ranks = [manager._parent_ranks[rank] for rank in mesh.members(manager._rank, axis)]
                made = device_mesh.get_group(axis)
                manager._groups[axis,] = AxisGroup(
                    ranks,
                    manager.global_rank,
                    lambda own: resolve(own.group),
                    lambda own, made=made: made,  # type: ignore[misc]
                    owned=False,
                )
        return manager

    # -- life ------------------------------------------------------------------------------------

    def get_info(self) -> str:
        """This rank's place in a few lines: its coordinates, the members of its groups, its
        neighbours in the pipeline.

        >>> print(unisono.ProcessGroupManager(tp_size=2).get_info())
        rank ... of 2, local rank ...
        grid position: dp 0, pp 0, cp 0, tp ...
        tp: rank ... of 2: global ranks 0 and 1
        ...
        """
        where = self.mesh.coordinates(self._rank)
        lines = [
            f"rank {self.global_rank} of {self.world_size}, local rank {self.local_rank}",
            "grid position: " + ", ".join(f"{axis} {at}" for axis, at in where.items()),
        ]
        for axis in reversed(self.mesh.axes):
            own = self.along(axis)
            lines.append(f"{axis}: rank {own.rank} of {own.size}: global {name_ranks(own.ranks)}")
        if "pp" in self.mesh.axes:
            neighbours = {"previous": self.pp_prev_rank, "next": self.pp_next_rank}
            lines.append(
                f"pipeline: stage {self.pp_rank} of {self.pp_world_size}"
                + "".join(
                    f", {name} rank {rank}" for name, rank in neighbours.items() if rank is not None
                )
            )
        return "\n".join(lines)

    @property
    def is_closed(self) -> bool:
        """Whether it, or the group that its ranks come from, is closed."""
        return self._closed or self._parent.is_closed()

    def close(self) -> None:
        """Close every group that this manager has made. Closing twice does nothing. `cleanup` is
        ScaleTorch's name for it.

        >>> manager = unisono.ProcessGroupManager(tp_size=2)
        >>> manager.tp.barrier()
        >>> manager.close()
        """
        with self._lock:
            self._closed = True
            groups = list(self._groups.values())
        for group in groups:
            group.close()

    cleanup = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = self.mesh.coordinates(self._rank)
        coordinates = (
            f"{axis} {where[axis]}/{self.mesh[axis]}" for axis in reversed(self.mesh.axes)
        )
        return f"<{type(self).__name__} rank {self.global_rank}: {', '.join(coordinates)}>"


# -- the one manager that a program may set up for all of its modules ---------------------------

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
    `group`, which `get_process_group_manager` then returns on this rank. Raises what
    ProcessGroupManager raises.
    See also `get_process_group_manager`, `Mesh`.

    >>> manager = unisono.setup_process_group_manager(dp_size=2)
    >>> unisono.get_process_group_manager() is manager  # in any module of the program
    True
    >>> manager.cleanup()
    """
    global _default
    _default = ProcessGroupManager(tp_size, cp_size, pp_size, dp_size, ep_size, group)
    return _default


def get_process_group_manager() -> ProcessGroupManager | None:
    """The manager that `setup_process_group_manager` made; None if there is none, or if it or its
    world is closed.
    See also `setup_process_group_manager`.

    >>> with unisono.setup_process_group_manager(dp_size=2):
    ...     unisono.get_process_group_manager().dp_ranks
    (0, 1)
    >>> unisono.get_process_group_manager() is None
    True
    """
    return None if _default is None or _default.is_closed else _default
