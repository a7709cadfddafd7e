"""A trainer's weights on a GPU that engines serve where they lie (`alias=True`), by CUDA IPC.

Each allocation is exported once by the trainer and opened once by an engine, in which it stays open
for as long as a tensor lies there, whatever becomes of the trainer. With every update the trainer
tells anew where its weights lie, and asks the driver for the number of each allocation: memory that
was freed and came back at the same address has another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unisono.training.weights import gpus
from unisono.training.weights.shards import Box, Lengths

if TYPE_CHECKING:
    from unisono.comm.cuda.driver import Allocation, Driver

# What reaches the driver is imported with the first such weights: most programs have none.


@dataclass(frozen=True)
class GpuPart:
    """The elements of a `box` of a tensor, which rank `sender` holds on `gpu` as the box `held`."""

    sender: int
    gpu: str
    held: Box
    box: Box
    dtype: torch.dtype


@dataclass(frozen=True)
class _Place:
    """Where a trainer's tensor lies: at `address`, in the allocation `number`."""

    number: int
    address: int
    strides: Lengths


@dataclass(frozen=True)
class ToldMemory:
    """What a trainer rank tells of its memory: `owner` is this process; `allocations` are handle,
    base and size by number; `places` those of its tensors by name."""

    owner: str
    allocations: dict[int, tuple[bytes, int, int]]
    places: dict[str, _Place]

    def plain(self) -> list[Any]:
        """As plain data, for the way to the others."""
        places = [
            [name, place.number, place.address, place.strides]
            for name, place in self.places.items()
        ]
        return [self.owner, self.allocations, places]

    @classmethod
    def from_plain(cls, data: Sequence[Any]) -> ToldMemory:
        """The other way."""
        owner, allocations, lines = data
        places = {
            name: _Place(number, address, tuple(strides))
            for name, number, address, strides in lines
        }
        return cls(owner, {number: tuple(told) for number, told in allocations.items()}, places)


class ExportedWeights:
    """A trainer's side. What engines serve is kept from being freed, and so from becoming something
    else, until the update after which they serve something else."""

    def __init__(self) -> None:
        self._allocations: dict[int, Allocation] = {}  # by a tensor's address
        self._handles: dict[int, bytes] = {}
        self._served: list[torch.Tensor] = []

    def describe(self, weights: Mapping[str, torch.Tensor]) -> ToldMemory:
        """Where these lie, once the GPU has written what it was told to. Raises ValueError where
        the driver lets no other process open them."""
        from unisono.comm.cuda.driver import DriverError, DriverMissing, load_driver
        from unisono.comm.cuda.routing import process_token

        found: dict[int, Allocation] = {}
        handles: dict[int, bytes] = {}
        places: dict[str, _Place] = {}
        try:
            driver = load_driver()
            for device in {tensor.device for tensor in weights.values()}:
                gpus.await_stream(device)
                with gpus.on_gpu(device):
                    for name, tensor in weights.items():
                        if tensor.device != device:
                            continue
                        address = tensor.data_ptr()
                        allocation = self._find(driver, address, handles)
                        number = allocation.number
                        if number not in handles:
                            known = self._handles.get(number)
                            handles[number] = known or driver.export_memory(allocation.base)
                        found[address] = allocation
                        places[name] = _Place(number, address, tuple(tensor.stride()))
        except (DriverError, DriverMissing) as error:
            raise ValueError(
                f"alias=True: engines cannot open the trainer's memory ({error}). Expandable "
                "segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True) and MIG are known "
                "reasons: docs/cuda.md"
            ) from error
        self._allocations, self._handles = found, handles
        told = {
            allocation.number: (handles[allocation.number], allocation.base, allocation.size)
            for allocation in found.values()
        }
        return ToldMemory(process_token(), told, places)

    def _find(self, driver: Driver, address: int, looked_at: Mapping[int, bytes]) -> Allocation:
        """The allocation of an address. The driver is asked once for each, whether it is still the
        one that it was."""
        known = self._allocations.get(address)
        if known is not None and (
            known.number in looked_at or driver.number_of(address) == known.number
        ):
            return known
        return driver.allocation_of(address)

    def keep(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Engines serve these now."""
        self._served = [tensor.detach() for tensor in weights.values()]

    def close(self) -> None:
        """Let go of what engines serve: it is the trainer's alone again."""
        self._served = []


def open_part(part: GpuPart, name: str, told: ToldMemory, own: torch.Tensor | None) -> torch.Tensor:
    """A part of the trainer's tensor `name`, in this process; `own` is what the engine serves, and
    may lie there already. Raises ValueError where this process cannot have it."""
    from unisono.comm.cuda.conducting import mappings_of_this_process
    from unisono.comm.cuda.driver import DriverError, DriverMissing
    from unisono.comm.cuda.regions import Region

    place = told.places[name]
    handle, base, extent = told.allocations[place.number]
    steps = zip(part.box.offset, part.held.offset, place.strides, strict=True)
    first = sum((begin - held) * stride for begin, held, stride in steps)
    address = place.address + first * part.dtype.itemsize
    pairs = zip(part.box.shape, place.strides, strict=True)
    size = (1 + sum((length - 1) * stride for length, stride in pairs)) * part.dtype.itemsize
    region = Region(handle, place.number, base, extent, address, size)
    device = gpus.find_gpu(part.gpu) if own is None else own.device
    try:
        with gpus.on_gpu(device):
            mappings = mappings_of_this_process()
            already = mappings.find(told.owner, region)
            if own is not None and own.stride() == place.strides and own.data_ptr() == already:
                return own.detach()
            where = mappings.hold(told.owner, region)
    except (DriverError, DriverMissing) as error:
        raise ValueError(
            f"alias=True: the memory of {name!r} cannot be opened by this process ({error})"
        ) from error
    let_go = partial(mappings.let_go, told.owner, place.number)
    with torch.inference_mode(False):
        storage = gpus.bytes_at(where, size, device, let_go)
        view = torch.empty(0, dtype=part.dtype, device=device)
        view.set_(storage, 0, part.box.shape, place.strides)
    return view
