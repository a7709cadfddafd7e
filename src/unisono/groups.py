"""ProcessGroupManager: the groups of a program that is parallel in several ways at once."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from weakref import WeakKeyDictionary

from unisono.comm.base import Communicator
from unisono.errors import UnisonoError
from unisono.plan.mesh import Mesh
from unisono.requirements import require_torch
from unisono.world.world import get_world, resolve

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp", "pp", "ep", "cp", "tp")
"""The axes that every manager knows, slowest first: one that its mesh lacks has a single rank."""

_JOINT = (("cp", "dp"), ("pp", "dp"))

T = TypeVar("T")


class AxisGroup:
    """The group that this rank is in along one axis, or several.

    `ranks` are its members as global ranks, `rank` is ours among them, `size` their number.
    The Communicator `comm` and the torch process group `group` are made when they are first asked
    for, by the members alone.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        global_rank: int,
        make_comm: Callable[[AxisGroup], Communicator],
        make_group: Callable[[AxisGroup], ProcessGroup],
        owned: bool = True,
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(global_rank)
        self.size = len(self.ranks)
        self._make_comm, self._make_group, self._owned = make_comm, make_group, owned
        self._comm: Communicator | None = None
        self._group: ProcessGroup | None = None
        self._closed = False
        # A lock for each group: threads of different ranks may ask for groups in different orders.
        self._lock = threading.RLock()

    @property
    def comm(self) -> Communicator:
        """What moves the data of this group."""
        with self._lock:
            self._check()
            if self._comm is None:
                self._comm = self._make_comm(self)
            return self._comm

    @property
    def group(self) -> ProcessGroup:
        """The torch process group. Raises UnisonoError where torch.distributed is not started."""
        with self._lock:
            self._check()
            if self._group is None:
                self._group = self._make_group(self)
            return self._group

    def neighbour(self, step: int) -> int:
        """The global rank that is `step` ranks further, in a ring."""
        return self.ranks[(self.rank + step) % self.size]

    def close(self) -> None:
        """Give back what was made. Closing twice does nothing."""
        with self._lock:
            comm, group, self._comm, self._group = self._comm, self._group, None, None
            self._closed = True
        if not self._owned:
            return
        if group is not None:
            from unisono.comm.over_torch import process_groups

            process_groups.destroy(group)  # and with it the Communicator
        elif comm is not None:
            comm.close()

    def _check(self) -> None:
        if self._closed:
            raise UnisonoError(f"the manager of the group of ranks {self.ranks} is closed")


class _GroupAttribute(Generic[T]):
    """A name of the manager for something of one of its groups: `tp_rank`, `cp_dp_group`, ..."""

    def __init__(self, axes: Sequence[str], read: Callable[[AxisGroup], T]) -> None:
        self._axes, self._read = axes, read

    def __get__(self, manager: ProcessGroupManager | None, owner: type) -> T:
        if manager is None:
            return self  # type: ignore[return-value] # nobody but pydoc asks the class
        return self._read(manager.along(*self._axes))


def _attributes(
    *axes: str,
) -> tuple[
    _GroupAttribute[Communicator],
    _GroupAttribute[ProcessGroup],
    _GroupAttribute[int],
    _GroupAttribute[int],
    _GroupAttribute[tuple[int, ...]],
    _GroupAttribute[int],
    _GroupAttribute[int],
]:
    return (
        _GroupAttribute(axes, lambda own: own.comm),
        _GroupAttribute(axes, lambda own: own.group),
        _GroupAttribute(axes, lambda own: own.size),
        _GroupAttribute(axes, lambda own: own.rank),
        _GroupAttribute(axes, lambda own: own.ranks),
        _GroupAttribute(axes, lambda own: own.ranks[0]),
        _GroupAttribute(axes, lambda own: own.ranks[-1]),
    )


class ProcessGroupManager:
    """Every rank's groups along tp, cp, pp, dp (and ep), jointly along cp and dp, pp and dp.

    Ranks are laid out as `Mesh` says, tp fastest, then cp, ep, pp, dp. For each axis `x` there are

    - `x`, the Communicator, and `x_group`, the torch process group (for `dist.*` and DDP);
    - `x_world_size` and `x_rank`, the size of this rank's group and its rank in it;
    - `x_ranks`, `x_first_rank`, `x_last_rank`: the members, as global ranks.

    `along("ep", "dp")` has the same for any axes together. Groups are made when they are first
    asked for, by their members alone; a group of one is made without talking to anybody, and
    axes with the same members share one group. Nothing is global: any number of managers may
    live at once, provided that their ranks make them in the same order.

    `group` is what the ranks are taken from: a Communicator, a torch process group, or None for
    the world. Raises ValueError if the sizes do not multiply to its size.
    """

    tp, tp_group, tp_world_size, tp_rank, tp_ranks, tp_first_rank, tp_last_rank = _attributes("tp")
    cp, cp_group, cp_world_size, cp_rank, cp_ranks, cp_first_rank, cp_last_rank = _attributes("cp")
    ep, ep_group, ep_world_size, ep_rank, ep_ranks, ep_first_rank, ep_last_rank = _attributes("ep")
    pp, pp_group, pp_world_size, pp_rank, pp_ranks, pp_first_rank, pp_last_rank = _attributes("pp")
    dp, dp_group, dp_world_size, dp_rank, dp_ranks, dp_first_rank, dp_last_rank = _attributes("dp")
    (
        cp_dp,
        cp_dp_group,
        cp_dp_world_size,
        cp_dp_rank,
        cp_dp_ranks,
        cp_dp_first_rank,
        cp_dp_last_rank,
    ) = _attributes("cp", "dp")
    (
        pp_dp,
        pp_dp_group,
        pp_dp_world_size,
        pp_dp_rank,
        pp_dp_ranks,
        pp_dp_first_rank,
        pp_dp_last_rank,
    ) = _attributes("pp", "dp")

    def __init__(
        self,
        tp_size: int = 1,
        cp_size: int = 1,
        pp_size: int = 1,
        dp_size: int = 1,
        ep_size: int = 1,
        group: Any = None,
    ) -> None:
        sizes = {"dp": dp_size, "pp": pp_size, "ep": ep_size, "cp": cp_size, "tp": tp_size}
        if ep_size == 1:
            del sizes["ep"]
        mesh, parent = Mesh(sizes), _parent(group)
        mesh.check_world(parent.size)
        self._begin(mesh, parent, range(parent.size))

    def _begin(self, mesh: Mesh, parent: _Parent, parent_ranks: Sequence[int]) -> None:
        self.mesh = mesh
        self.global_rank = parent.global_ranks[parent.rank]
        self.world_size = mesh.size
        self._parent = parent
        self._parent_ranks = list(parent_ranks)  # a rank of the mesh -> a rank of the parent
        self._rank = self._parent_ranks.index(parent.rank)
        self._suffix = parent.next_suffix(self._parent_ranks)
        self._groups: dict[tuple[str, ...], AxisGroup] = {}
        self._lock = threading.Lock()
        self._closed = False

    # -- groups ----------------------------------------------------------------------------------

    def along(self, *axes: str) -> AxisGroup:
        """This rank's group along one axis or several. Nothing is made before its `comm` or
        `group` is asked for. Raises ValueError for an axis that does not exist."""
        key = self._axes_of_several(axes)
        with self._lock:
            if key not in self._groups:
                self._groups[key] = self._axis_group(key)
                if self._closed:
                    self._groups[key].close()
            return self._groups[key]

    def _axes_of_several(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those with more than one rank, fastest first: groups with the same ones are the same."""
        known = [axis for axis in axes if axis in self.mesh.axes or axis not in AXES]
        if known or not axes:
            self.mesh.members(self._rank, *known)  # raises what is wrong with them
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
        return self.pp_rank == 0

    @property
    def pp_is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_world_size - 1

    @property
    def cp_send_rank(self) -> int:
        """The global rank that this one sends to in the ring along cp."""
        return self.along("cp").neighbour(1)

    @property
    def cp_recv_rank(self) -> int:
        """The global rank that this one receives from in the ring along cp."""
        return self.along("cp").neighbour(-1)

    # -- torch's meshes --------------------------------------------------------------------------

    def to_device_mesh(self, device_type: str = "cpu") -> DeviceMesh:
        """The same layout as torch's DeviceMesh, over the groups of this manager; a dimension for
        each axis. Every rank calls it, for all groups along one axis are made.

        Raises UnisonoError where torch.distributed is not started.
        """
        require_torch("to_device_mesh")
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        groups = [self.along(axis).group for axis in self.mesh.axes]
        ranks = [self._parent.global_ranks[rank] for rank in self._parent_ranks]
        return DeviceMesh.from_group(
            groups,
            device_type,
            mesh=torch.tensor(ranks).reshape(self.mesh.shape),
            mesh_dim_names=self.mesh.axes,
        )

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Self:
        """A manager of the groups of torch's DeviceMesh, which stay the mesh's own: `close` leaves
        them alone. Its dimensions are the axes, by their names; `along` takes those that are not
        tp, cp, ep, pp or dp. Raises ValueError for dimensions without names, or a mesh that this
        process is not in."""
        from unisono.comm.over_torch import process_groups

        names = device_mesh.mesh_dim_names
        if not names:
            raise ValueError("the DeviceMesh has no mesh_dim_names: axes need names")
        if device_mesh.get_coordinate() is None:
            raise ValueError("this process is not in the DeviceMesh")
        manager = cls.__new__(cls)
        mesh = Mesh(dict(zip(names, device_mesh.mesh.shape, strict=True)))
        parent = _parent(process_groups.world())
        manager._begin(mesh, parent, device_mesh.mesh.flatten().tolist())
        for axis in names:
            if mesh[axis] > 1:
                ranks = [manager._parent_ranks[rank] for rank in mesh.members(manager._rank, axis)]
                manager._groups[axis,] = AxisGroup(
                    ranks,
                    manager.global_rank,
                    lambda own: resolve(own.group),
                    _always(device_mesh.get_group(axis)),
                    owned=False,
                )
        return manager

    # -- life ------------------------------------------------------------------------------------

    def describe(self, ranks_per_node: int = 8) -> str:
        """The mesh as a table: see `Mesh.describe`."""
        joint = [axes for axes in _JOINT if set(axes) <= set(self.mesh.axes)]
        return self.mesh.describe(ranks_per_node, joint)

    def close(self) -> None:
        """Give every group back that this manager has made. Closing twice does nothing."""
        with self._lock:
            self._closed = True
            groups = list(self._groups.values())
        for group in groups:
            group.close()

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


def _always(group: ProcessGroup) -> Callable[[AxisGroup], ProcessGroup]:
    return lambda own: group


# -- where groups come from ------------------------------------------------------------------------

_managers: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()  # of each parent, by layout
_managers_lock = threading.Lock()


class _Parent:
    """What a manager's ranks are taken from: a Communicator, which splits."""

    def __init__(self, source: Any, rank: int, global_ranks: Sequence[int]) -> None:
        self.source = source
        self.rank = rank
        self.global_ranks = global_ranks
        self.size = len(global_ranks)

    def next_suffix(self, members: Sequence[int]) -> str:
        """What tells the groups of a new manager of these members from those of all others. They
        agree on it without a message, for each of them has made the same ones before."""
        layout = ""
        if list(members) != list(range(self.size)):
            layout = "@" + hashlib.sha256(repr(list(members)).encode()).hexdigest()[:8]
        with _managers_lock:
            made = _managers.setdefault(self.source, Counter())
            made[layout] += 1
            number = made[layout]
        return layout + (f"#{number}" if number > 1 else "")

    def axis_group(self, members: Sequence[int], label: str) -> AxisGroup:
        def split(own: AxisGroup) -> Communicator:
            comm: Communicator = self.source.split(members, label)
            return comm

        def group_over(own: AxisGroup) -> ProcessGroup:
            from unisono.torch_backend import groups as torch_groups

            torch_groups.check_started()
            group: ProcessGroup = torch_groups.group_over(own.comm)
            return group

        return self._axis_group(members, split, group_over)

    def _axis_group(
        self,
        members: Sequence[int],
        make_comm: Callable[[AxisGroup], Communicator],
        make_group: Callable[[AxisGroup], ProcessGroup],
    ) -> AxisGroup:
        ranks = [self.global_ranks[member] for member in members]
        return AxisGroup(ranks, self.global_ranks[self.rank], make_comm, make_group)


class _TorchParent(_Parent):
    """A torch process group of another backend: torch makes the groups, and we wrap them."""

    def axis_group(self, members: Sequence[int], label: str) -> AxisGroup:
        ranks = [self.global_ranks[member] for member in members]
        # Groups with one label have no member in common: the first one tells them apart.
        name = f"{self.source.group_name}.{label}[{ranks[0]}..{ranks[-1]}]"

        def new_group(own: AxisGroup) -> ProcessGroup:
            from unisono.comm.over_torch import process_groups

            group: ProcessGroup = process_groups.new_group(self.source, ranks, name)
            return group

        return self._axis_group(members, lambda own: resolve(own.group), new_group)


def _parent(group: Any) -> _Parent:
    if group is None:
        group = _our_world()
    if "torch" in sys.modules:
        import torch.distributed as dist

        from unisono.comm.over_torch import process_groups
        from unisono.torch_backend import groups as torch_groups

        if group is None:
            group = process_groups.world()
        wrapped = getattr(group, "process_group", group)
        if torch_groups.moves_data_elsewhere(wrapped):
            return _TorchParent(wrapped, wrapped.rank(), dist.get_process_group_ranks(wrapped))
    comm = resolve(group)
    return _Parent(comm, comm.rank, comm.global_ranks or range(comm.size))


def _our_world() -> Communicator | None:
    try:
        return get_world()
    except UnisonoError:
        return None
