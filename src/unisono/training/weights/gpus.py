"""GPUs as torch has them: all that weights need of one, and tests replace where there is none."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_cuda: Any = torch.cuda  # torch has no types for it


def gpu_of(tensors: Iterable[torch.Tensor]) -> str:
    """The GPU on which all of these lie, by a name that no other has; "" where there is none."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return ""
    return str(_cuda.get_device_properties(devices.pop()).uuid)


def find_gpu(name: str) -> torch.device:
    """The GPU of a name, in this process. Raises ValueError where it does not see it."""
    for index in range(_cuda.device_count()):
        if str(_cuda.get_device_properties(index).uuid) == name:
            return torch.device("cuda", index)
    raise ValueError(
        f"the trainer's weights lie on GPU {name}, which this process does not see: is it among "
        "CUDA_VISIBLE_DEVICES?"
    )


@contextlib.contextmanager
def on_gpu(device: torch.device) -> Iterator[None]:
    """Around calls of the driver for a GPU: this thread has a context there."""
    with _cuda.device(device):
        _cuda.current_stream().query()
        yield


def await_stream(device: torch.device) -> None:
    """Return once the current stream of a GPU has done what it was given."""
    _cuda.current_stream(device).synchronize()


def bytes_at(
    address: int, size: int, device: torch.device, let_go: Callable[[], None]
) -> torch.UntypedStorage:
    """Memory that is not torch's own. `let_go` is called once no tensor lies there any more and
    the GPU has done what it was given for those that did."""
    memory = _Memory(address, size)

    def close() -> None:
        if _cuda.is_current_stream_capturing():
            return  # no GPU can be waited for now: the memory stays open as long as this process
        with contextlib.suppress(RuntimeError), on_gpu(device):  # the GPU may have failed
            _cuda.synchronize(device)
            let_go()

    weakref.finalize(memory, close).atexit = False
    whole: Any = torch.as_tensor(memory, device=device)
    storage: torch.UntypedStorage = whole.untyped_storage()
    return storage


class _Memory:
    """What torch makes a tensor of, without a copy, and keeps for as long as that."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }
