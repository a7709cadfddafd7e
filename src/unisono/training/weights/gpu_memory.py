"""A trainer's weights on a GPU that engines serve where they lie (`alias=True`), by CUDA IPC.

Each allocation is exported once by the trainer and opened once by an engine, in which it stays open
for as long as a tensor lies there, whatever becomes of the trainer. With every update the trainer
tells anew where its weights lie, and asks the driver for the number of each allocation: memory that
was freed and came back at the same address has another one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from unisono.torch_autograd import outlasting_inference_mode
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

    def text(self) -> str:
        """For the way to the others."""
        allocations = [
            [number, handle.hex(), base, size]
            for number, (handle, base, size) in self.allocations.items()
        ]
        places = [
            [name, place.number, place.address, place.strides]
            for name, place in self.places.items()
        ]
        return json.dumps([self.owner, allocations, places])

    @classmethod
    def from_text(cls, text: str) -> ToldMemory:
        """The other way."""
        owner, allocations, places = json.loads(text)
        return cls(
            owner,
            {number: (bytes.fromhex(handle), *rest) for number, handle, *rest in allocations},
            {
                name: _Place(number, address, tuple(strides))
                for name, number, address, strides in places
            },
        )


class ExportedWeights:
    """A trainer's side. What engines serve is kept from being freed, and so from becoming something
    else, until the update after which they serve something else."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, Lengths]] = {}
        self._text = ""
        """What was told last of these places, in these allocations, which have these handles."""
        self._allocations: list[Allocation] = []
        self._handles: dict[int, bytes] = {}
        self._served: list[torch.Tensor] = []
        self._served_places: dict[str, tuple[int, Lengths]] | None = None

    def describe(self, weights: Mapping[str, torch.Tensor]) -> str:
        """Where these lie, as `ToldMemory` has it in a text, once the GPU has written what it was
        told to. Raises ValueError where the driver lets no other process open them."""
        from unisono.comm.cuda.driver import DriverError, DriverMissing, load_driver

        for device in {tensor.device for tensor in weights.values()}:
            gpus.await_stream(device)
        places = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in weights.items()}
        if places == self._places == self._served_places:
            return self._text  # what is kept from being freed is where it was
        try:
            driver = load_driver()
            with gpus.on_gpu(next(iter(weights.values())).device):
                if places != self._places or not self._is_as_it_was(driver):
                    self._text = self._export(driver, places)
                    self._places = places
        except (DriverError, DriverMissing) as error:
            raise ValueError(
                f"alias=True: engines cannot open the trainer's memory ({error}). Expandable "
                "segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True) and MIG are known "
                "reasons: docs/cuda.md"
            ) from error
        return self._text

    def _is_as_it_was(self, driver: Driver) -> bool:
        """Whether the addresses that were told of last lie in the same allocations."""
        from unisono.comm.cuda.driver import DriverError

        try:
            return all(driver.number_of(known.base) == known.number for known in self._allocations)
        except DriverError:  # there is none any more
            return False

    def _export(self, driver: Driver, places: Mapping[str, tuple[int, Lengths]]) -> str:
        from unisono.comm.cuda.routing import process_token

        handles: dict[int, bytes] = {}
        found: dict[int, Allocation] = {}
        told: dict[str, _Place] = {}
        for name, (address, strides) in places.items():
            allocation = driver.allocation_of(address)
            number = allocation.number
            if number not in found:
                known = self._handles.get(number)
                handles[number] = known or driver.export_memory(allocation.base)
                found[number] = allocation
            told[name] = _Place(number, address, strides)
        self._handles, self._allocations = handles, list(found.values())
        allocations = {
            number: (handles[number], allocation.base, allocation.size)
            for number, allocation in found.items()
        }
        return ToldMemory(process_token(), allocations, told).text()

    def keep(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Engines serve these now."""
        if self._served_places != self._places:
            self._served = [tensor.detach() for tensor in weights.values()]
            self._served_places = self._places

    def close(self) -> None:
        """Let go of what engines serve: it is the trainer's alone again."""
        self._served, self._served_places = [], None


@functools.lru_cache(maxsize=16)  # with most updates nothing has changed
def read_told(text: str) -> ToldMemory:
    """What a trainer has told of its memory."""
    return ToldMemory.from_text(text)


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
    with outlasting_inference_mode():
        storage = gpus.bytes_at(where, size, device, let_go)
        view = torch.empty(0, dtype=part.dtype, device=device)
        view.set_(storage, 0, part.box.shape, place.strides)
    return view
