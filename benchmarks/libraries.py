"""The libraries that are measured: how each is connected, and what it calls each collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from mpi4py import MPI


def round_trip(
    send: Callable[[], Any], recv: Callable[[], Any], wait: str, rank: int, neighbour: int | None
) -> Calls:
    """There and back: the even rank begins."""

    def there_and_back() -> None:
        if neighbour is None:
            return
        for start in (recv, send) if rank % 2 else (send, recv):
            getattr(start(), wait)()

    return [there_and_back]


Calls = Sequence[Callable[[], object]]
"""What a library does for one row: one call, or a few that take turns (a root each)."""


class Libraries:
    """The libraries on this rank, all of them connected, and the calls they offer."""

    def __init__(
        self, names: Sequence[str], world: MPI.Intracomm, folder: Path, fixed_root: bool
    ) -> None:
        import torch.distributed as dist

        self.names = names
        self.world, self.rank, self.size = world, world.rank, world.size
        self.roots = [0] if fixed_root else list(range(self.size))
        self.neighbour = self.rank ^ 1 if self.rank ^ 1 < self.size else None
        # unisono comes first, since it would adopt a default group that it finds.
        if "unisono" in names:
            import unisono

            self.native = unisono.init(
                rank=self.rank, size=self.size, rendezvous=str(folder / "unisono")
            )
        if "gloo" in names and dist.is_initialized():
            self.gloo = dist.new_group(backend="gloo")
        elif "gloo" in names:
            store = dist.FileStore(str(folder / "gloo"), self.size)
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)
            self.gloo = dist.group.WORLD

    def close(self) -> None:
        import torch.distributed as dist

        if "unisono" in self.names:
            self.native.close()
        if "gloo" in self.names:
            dist.destroy_process_group()

    def calls(
        self, library: str, collective: str, output: torch.Tensor, input: torch.Tensor
    ) -> Calls:
        """The calls that move `input` to `output`, which are one tensor where it works in place."""
        makers = {"unisono": self._unisono, "mpi": self._mpi, "gloo": self._gloo}
        return makers[library](output, input)[collective]

    def _unisono(self, output: torch.Tensor, input: torch.Tensor) -> dict[str, Calls]:
        native = self.native
        return {
            "all_reduce": [partial(native.all_reduce, output)],
            "all_gather": [partial(native.all_gather, output, input)],
            "reduce_scatter": [partial(native.reduce_scatter, output, input)],
            "broadcast": [partial(native.broadcast, output, root) for root in self.roots],
            "all_to_all": [partial(native.all_to_all, output, input)],
            "barrier": [native.barrier],
            "async all_reduce": [lambda: native.all_reduce(output, async_op=True).wait()],
            "round trip": round_trip(
                partial(native.isend, input, self.neighbour),
                partial(native.irecv, output, self.neighbour),
                "wait",
                self.rank,
                self.neighbour,
            ),
        }

    def _mpi(self, output: torch.Tensor, input: torch.Tensor) -> dict[str, Calls]:
        from mpi4py import MPI

        world, to, of = self.world, output.numpy(), input.numpy()
        return {
            "all_reduce": [partial(world.Allreduce, MPI.IN_PLACE, to)],
            "all_gather": [partial(world.Allgather, of, to)],
            "reduce_scatter": [partial(world.Reduce_scatter_block, of, to)],
            "broadcast": [partial(world.Bcast, to, root) for root in self.roots],
            "all_to_all": [partial(world.Alltoall, of, to)],
            "barrier": [world.Barrier],
            "async all_reduce": [lambda: world.Iallreduce(MPI.IN_PLACE, to).Wait()],
            "round trip": round_trip(
                partial(world.Isend, of, self.neighbour),
                partial(world.Irecv, to, self.neighbour),
                "Wait",
                self.rank,
                self.neighbour,
            ),
        }

    def _gloo(self, output: torch.Tensor, input: torch.Tensor) -> dict[str, Calls]:
        import torch.distributed as dist

        # torch 2.13 renamed these two and warns about the old names.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        group = self.gloo
        return {
            "all_reduce": [partial(dist.all_reduce, output, group=group)],
            "all_gather": [partial(gather, output, input, group=group)],
            "reduce_scatter": [partial(scatter, output, input, group=group)],
            "broadcast": [partial(dist.broadcast, output, root, group) for root in self.roots],
            "all_to_all": [partial(dist.all_to_all_single, output, input, group=group)],
            "barrier": [partial(dist.barrier, group)],
            "async all_reduce": [
                lambda: dist.all_reduce(output, group=group, async_op=True).wait()
            ],
            "round trip": round_trip(
                partial(dist.isend, input, self.neighbour, group),
                partial(dist.irecv, output, self.neighbour, group),
                "wait",
                self.rank,
                self.neighbour,
            ),
        }
