"""Compare the ranks' calls before data moves, for backends that do not: gloo ends the process
(SIGABRT) if ranks pass different sizes, and returns a wrong result if they pass different
reductions or types of one size. It costs one small all_gather."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from unisono.comm.on_rows.mismatches import Mismatch, PairwiseSizes, find_minority
from unisono.comm.tensors import count
from unisono.errors import CollectiveMismatch

_DIGEST = 16
_TEXT = 300
_SITE = 160
_ANY = -1


@dataclass(frozen=True)
class AnnouncedCall:
    """A rank's call. `text` must be the same on all ranks; `sends` and `takes` are how much it
    sends to and expects from each rank, if that differs between ranks. In a peer's call `text`
    is truncated, and `digest` stands for all of it."""

    text: str
    sends: Sequence[int] = ()
    takes: Sequence[int] = ()
    refused: bool = False
    timeout_s: float = field(default=0.0, compare=False)
    site: str = field(default="", compare=False)
    digest: bytes = b""

    @property
    def operation(self) -> str:
        return self.text.split(" ", 1)[0]


def bytes_given(call: AnnouncedCall, tensors: Sequence[Any], size: int) -> int:
    """The bytes that this rank sends, or receives if it sends none; parts count as equal."""
    if len(tensors) == 1 and not call.sends:
        return int(tensors[0].nbytes)
    total = sum(int(tensor.nbytes) for tensor in tensors)
    if call.sends:
        width = int(tensors[0].nbytes) // max(1, count(tensors[0])) if tensors else 0
        return (sum(call.sends) or sum(call.takes)) * width
    if call.operation == "all_gather":
        return total // (size + 1)
    if call.operation == "reduce_scatter":
        return total - total // (size + 1)
    return total


def encode_call(call: AnnouncedCall, size: int) -> torch.Tensor:
    """A call as a row of bytes of the same length on every rank of a group."""
    pairs = numpy.full(2 * size, _ANY, numpy.int64)
    if call.sends:
        pairs[:size] = call.sends
    if call.takes:
        pairs[size:] = call.takes
    encoded = call.text.encode()
    digest = hashlib.blake2b(encoded, digest_size=_DIGEST).digest()
    start = encoded[:_TEXT].ljust(_TEXT, b"\0")
    site = call.site.encode()[:_SITE].ljust(_SITE, b"\0")
    data = bytes([call.refused]) + digest + pairs.tobytes() + start + site
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def are_alike(rows: Sequence[torch.Tensor]) -> bool:
    """A quick check whether encoded calls are the same: then `find_mismatch` finds nothing. It
    is inconclusive for calls whose sizes differ between pairs."""
    first = rows[0].numpy()
    if first[1 + _DIGEST : 1 + _DIGEST + 8].view(numpy.int64)[0] != _ANY:
        return False
    said = len(first) - _SITE - _TEXT
    return all(numpy.array_equal(row.numpy()[:said], first[:said]) for row in rows[1:])


def decode_call(row: torch.Tensor, size: int) -> AnnouncedCall:
    data = row.numpy().tobytes()
    pairs = numpy.frombuffer(data[1 + _DIGEST : 1 + _DIGEST + 16 * size], numpy.int64).tolist()
    rest = data[1 + _DIGEST + 16 * size :]
    text, site = (
        part.rstrip(b"\0").decode(errors="replace") for part in (rest[:_TEXT], rest[_TEXT:])
    )
    sends, takes, digest = pairs[:size], pairs[size:], data[1 : 1 + _DIGEST]
    return AnnouncedCall(text, sends, takes, bool(data[0]), site=site, digest=digest)


def find_mismatch(
    peer_calls: Sequence[AnnouncedCall], rank: int, group: str
) -> CollectiveMismatch | None:
    """What every member raises if their calls differ."""
    if all(call.refused for call in peer_calls):
        return None
    kinds = [(b"" if call.refused else call.digest, call.refused) for call in peer_calls]
    culprits, pairs = find_minority(kinds), None
    if len(set(kinds)) == 1:
        pairs = PairwiseSizes(
            [_known(call.sends) for call in peer_calls], [_known(call.takes) for call in peer_calls]
        )
        if not pairs.unequal_pairs():
            return None
        culprits = pairs.culprits()
    calls, sites = zip(*((call.text, call.site or None) for call in peer_calls), strict=True)
    found = Mismatch(calls, sites, culprits, pairs)
    return found.error(found.text(f"{found.verdict()} (group {group})"), rank, group)


def _known(sizes: Sequence[int]) -> list[int | None]:
    return [None if size == _ANY else size for size in sizes]
