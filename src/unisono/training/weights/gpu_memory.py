"""A trainer's weights on a GPU that engines serve in place (`alias=True`).

An engine opens each allocation once and keeps it open as long as it has a tensor there, even if the
trainer ends. With every update the trainer says where its weights are and in which allocations, by
number: memory that was freed and allocated again at the same address has a new number.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from unisono.torch_autograd import outlasting_inference_mode
from unisono.training.weights.shards import Lengths

if TYPE_CHECKING:
    from unisono.comm.cuda.driver import Driver
    from unisono.training.weights.plan import Unit

# Modules for the driver are imported with the first such weights: most programs have none.

_cuda: Any = torch.cuda  # torch has no types for it
_Places = dict[str, tuple[int, int, Lengths]]  # address, bytes and strides by name


@dataclass(frozen=True)
class ToldMemory:
    """What a trainer rank says about its memory: `owner` is this process; `allocations` are handle,
    base and size by number; `places` are number, address and strides of its tensors by name."""

    owner: str
    allocations: dict[str, tuple[str, int, int]]
    places: dict[str, tuple[int, int, Lengths]]


class ExportedWeights:
    """A trainer's side. Memory that engines serve is kept from being freed, and so reused, until an
    update after which they serve other memory."""

    def __init__(self) -> None:
        self._told: tuple[_Places, str] = {}, ""
        """Where the weights were in the last update, and what was said about it."""
        self._served: tuple[_Places, str] | None = None
        """The same for what engines serve, which is kept."""
        self._kept: list[torch.Tensor] = []

    def describe(self, weights: Mapping[str, torch.Tensor]) -> str:
        """Where these are, as the text of a `ToldMemory`, after the GPU has finished writing.
        Raises ValueError if the driver lets no other process open them."""
        from unisono.comm.cuda.driver import DriverError, DriverMissing, load_driver

        for device in {tensor.device for tensor in weights.values()}:
            await_stream(device)
        places = {
            name: (each.data_ptr(), _span(each.shape, each.stride(), each.dtype), each.stride())
            for name, each in weights.items()
        }
        if self._served is not None and places == self._served[0]:
            self._told = self._served  # memory that is kept has not moved
            return self._told[1]
        try:
            with on_gpu(next(iter(weights.values())).device):
                self._told = places, _export(load_driver(), places)
        except (DriverError, DriverMissing) as error:
            raise ValueError(
                f"alias=True: engines cannot open the trainer's memory ({error}). MIG and "
                "sandboxes are known reasons: docs/cuda.md"
            ) from error
        return self._told[1]

    def lie_still(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether the last description still holds, after the GPU has finished writing."""
        before = self._told[1]
        return self.describe(weights) == before

    def keep(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Engines serve these now."""
        if self._served != self._told:
            self._kept = [tensor.detach() for tensor in weights.values()]
            self._served = self._told

    def close(self) -> None:
        """Release what engines serve: it belongs to the trainer alone again."""
        self._kept, self._served = [], None


def _export(driver: Driver, places: _Places) -> str:
    """What engines need to open the allocations of these tensors."""
    from unisono.comm.cuda.passing import export_memory
    from unisono.comm.cuda.routing import process_token

    allocations: dict[int, tuple[str, int, int]] = {}
    told: dict[str, tuple[int, int, Lengths]] = {}
    for name, (address, size, strides) in places.items():
        found = driver.allocation_of(address, size)
        if found.number not in allocations:
            handle = export_memory(driver, found).hex()
            allocations[found.number] = handle, found.base, found.size
        told[name] = found.number, address, strides
    return json.dumps([process_token(), allocations, told])


def _span(shape: Lengths, strides: Lengths, dtype: torch.dtype) -> int:
    """The bytes from a tensor's first element to its last."""
    steps = zip(shape, strides, strict=True)
    return (1 + sum((length - 1) * stride for length, stride in steps)) * dtype.itemsize


@functools.lru_cache(maxsize=16)  # most updates change nothing
def read_told(text: str) -> ToldMemory:
    """What a trainer has said about its memory."""
    return ToldMemory(*json.loads(text))


def open_unit(unit: Unit, told: ToldMemory, own: torch.Tensor | None) -> torch.Tensor:
    """A part of a trainer's tensor, in this process; `own` is what the engine serves, and may
    already be there. Raises ValueError if this process cannot open it."""
    from unisono.comm.cuda.conducting import mappings_of_this_process
    from unisono.comm.cuda.driver import DriverError, DriverMissing
    from unisono.comm.cuda.regions import Region

    number, address, listed = told.places[unit.name]
    handle, base, extent = told.allocations[str(number)]
    strides = tuple(listed)
    steps = zip(unit.box.offset, unit.held.offset, strides, strict=True)
    address += sum((begin - held) * stride for begin, held, stride in steps) * unit.dtype.itemsize
    size = _span(unit.box.shape, strides, unit.dtype)
    region = Region(bytes.fromhex(handle), number, base, extent, address, size)
    device = find_gpu(unit.gpu) if own is None else own.device
    try:
        with on_gpu(device):
            mappings = mappings_of_this_process()
            already = mappings.find(told.owner, region)
            if own is not None and own.stride() == strides and own.data_ptr() == already:
                return own.detach()
            where = mappings.hold(told.owner, region)
    except (DriverError, DriverMissing) as error:
        raise ValueError(
            f"alias=True: the memory of {unit.name!r} cannot be opened by this process ({error})"
        ) from error
    with outlasting_inference_mode():
        storage = bytes_at(where, size, device, partial(mappings.let_go, told.owner, number))
        view = torch.empty(0, dtype=unit.dtype, device=device)
        view.set_(storage, 0, unit.box.shape, strides)
    return view


# -- torch's GPUs: tests replace these functions on machines without one ---------------------------


def gpu_of(tensors: Iterable[torch.Tensor]) -> str:
    """The unique name of the GPU on which all of these are; "" if there is none."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return ""
    return str(_cuda.get_device_properties(devices.pop()).uuid)


def find_gpu(name: str) -> torch.device:
    """The GPU with this name, in this process. Raises ValueError if it is not visible."""
    for index in range(_cuda.device_count()):
        if str(_cuda.get_device_properties(index).uuid) == name:
            return torch.device("cuda", index)
    raise ValueError(
        f"the trainer's weights are on GPU {name}, which is not visible to this process: is it in "
        "CUDA_VISIBLE_DEVICES?"
    )


@contextlib.contextmanager
def on_gpu(device: torch.device) -> Iterator[None]:
    """For driver calls on a GPU: gives this thread a context there."""
    with _cuda.device(device):
        _cuda.current_stream().query()
        yield


def await_stream(device: torch.device) -> None:
    """Wait for the current stream of a GPU."""
    _cuda.current_stream(device).synchronize()


def bytes_at(
    address: int, size: int, device: torch.device, let_go: Callable[[], None]
) -> torch.UntypedStorage:
    """Memory that torch does not own. `let_go` is called once no tensor uses it and the GPU has
    finished its work on it."""
    memory = _Memory(address, size)

    def close() -> None:
        if _cuda.is_current_stream_capturing():
            return  # a GPU cannot be synchronised now: the memory stays open
        with contextlib.suppress(RuntimeError), on_gpu(device):  # the GPU may have failed
            _cuda.synchronize(device)
            let_go()

    weakref.finalize(memory, close).atexit = False
    whole: Any = torch.as_tensor(memory, device=device)
    storage: torch.UntypedStorage = whole.untyped_storage()
    return storage


class _Memory:
    """What torch makes a tensor from, without a copy, and keeps alive with it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }
