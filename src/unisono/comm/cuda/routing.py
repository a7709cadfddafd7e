"""Which path CUDA tensors take: the ranks' GPUs decide, for all calls of a group.

| GPUs of the ranks | way |
|---|---|
| one, which all ranks share, on one host | ours |
| each rank its own | NCCL |
| anything else | refused |
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

from unisono.errors import name_ranks

Way = Literal["shared", "nccl"]
SHARED: Way = "shared"
NCCL: Way = "nccl"


class RankGpu(NamedTuple):
    """What a rank tells the others about its GPU. `token` is unique to the process; `refusal`
    says why others cannot open its memory, "" if they can."""

    host: str
    gpu: str
    name: str
    token: str
    refusal: str

    def encode(self) -> bytes:
        return json.dumps(self).encode()


def decode_gpu(data: bytes) -> RankGpu:
    """The reverse of `RankGpu.encode`."""
    return RankGpu(*json.loads(data))


def choose_way(gpus: Sequence[RankGpu]) -> Way | None:
    """The path for ranks with these GPUs; None if there is none."""
    places = {gpu.gpu for gpu in gpus}
    if len(places) == 1 and len({gpu.host for gpu in gpus}) == 1:
        return SHARED
    return NCCL if len(places) == len(gpus) else None


def describe_no_way(gpus: Sequence[RankGpu]) -> str:
    """Why CUDA tensors of these ranks are refused, and what to do."""
    sharing: dict[tuple[str, str], list[int]] = {}
    for rank, gpu in enumerate(gpus):
        sharing.setdefault((gpu.host, gpu.gpu), []).append(rank)
    names = {(gpu.host, gpu.gpu): gpu.name for gpu in gpus}
    said = "; ".join(
        f"{name_ranks(ranks)} on {names[place]} {place[1]} of host {place[0]}"
        for place, ranks in sharing.items()
    )
    what = "some ranks of this group share a GPU and others do not"
    if len({host for host, _ in sharing}) > 1:
        what = "ranks of a group over several hosts share a GPU"
    return (
        f"{what} ({said}): give every rank its own GPU (then NCCL is used), let all of them share "
        "one GPU of one host, or pass CPU tensors"
    )


def why_no_mapping(gpus: Sequence[RankGpu]) -> str:
    """Why even large calls of ranks that share a GPU are staged; "" if they need not be."""
    refused = {gpu.refusal: rank for rank, gpu in reversed(list(enumerate(gpus))) if gpu.refusal}
    return next((f"rank {rank}: {why}" for why, rank in refused.items()), "")


@functools.cache
def process_token() -> str:
    """A name unique to this process."""
    return os.urandom(16).hex()
