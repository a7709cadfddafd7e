"""A fast checksum of tensors: does what arrived equal what was sent?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy
import torch

from unisono.collectives.ragged import flat_bytes

_ROW_INTEGERS = 512


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """A 63-bit number for the bytes of these tensors, in order, whatever their strides.

    The 64-bit integers of each 4 KiB are added up, at the speed of memory, and the sums are
    hashed: one changed integer is always noticed, and so are rows that changed places, but not
    integers that changed places within a row. It guards against accidents, not against an attacker.
    On a GPU the sums are added up once more, each times an odd number of its own, so that little
    crosses the bus: a number to be compared with that of other tensors on a GPU.
    """
    digest = hashlib.blake2b(digest_size=8)
    given = list(tensors)
    if given and all(tensor.is_cuda for tensor in given):
        sums = torch.cat([_sums_on_gpu(tensor) for tensor in given])
        digest.update(sums.cpu().numpy().data)
        given = []
    for tensor in given:
        data = flat_bytes(tensor).cpu().numpy()
        whole_rows = len(data) // (8 * _ROW_INTEGERS)
        cut = whole_rows * 8 * _ROW_INTEGERS
        integers = data[:cut].view(numpy.int64).reshape(whole_rows, _ROW_INTEGERS)
        digest.update(integers.sum(axis=1).data)
        digest.update(data[cut:].data)
    return int.from_bytes(digest.digest(), "little") >> 1


def _sums_on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """A few integers for the bytes of a tensor on a GPU."""
    data = flat_bytes(tensor)
    if data.storage_offset() % 8:
        data = data.clone()
    cut = data.numel() // (8 * _ROW_INTEGERS) * (8 * _ROW_INTEGERS)
    rows = data[:cut].view(torch.int64).view(-1, _ROW_INTEGERS).sum(dim=1)
    rest = data.new_zeros(8 * _ROW_INTEGERS)
    rest[: data.numel() - cut] = data[cut:]
    sums = torch.cat([rows, rest.view(torch.int64)])
    sums = torch.nn.functional.pad(sums, (0, -sums.numel() % _ROW_INTEGERS))
    odd = 2 * torch.arange(_ROW_INTEGERS, device=data.device) + 1
    return (sums.view(-1, _ROW_INTEGERS) * odd).sum(dim=1)
