"""What a rank brings to an update, as the others are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from unisono.comm.base import dtype_name
from unisono.training.weights import gpus
from unisono.training.weights.reading import Place
from unisono.training.weights.shards import Box, HeldTensor, Lengths, tied_names


@dataclass(frozen=True)
class UpdateOptions:
    """How an update goes on, as its senders say."""

    transactional: bool
    checksum: bool
    convert: bool
    bucket_bytes: int


@dataclass(frozen=True)
class DescribedTensor:
    """A tensor in a description: `first` is the name that it shares its memory with, or its own;
    `place` where it lies in memory that all ranks have mapped."""

    dtype: str
    whole: Lengths
    box: Box
    first: str
    place: Place | None = None


@dataclass(frozen=True)
class Description:
    """What a rank brings to an update. An engine without `weights` takes whatever comes."""

    role: Literal["sender", "receiver"]
    weights: dict[str, DescribedTensor] | None
    options: UpdateOptions | None = None
    partial: bool = False
    gpu: str = ""
    """The one on which all of its weights lie, if there is one."""
    alias: bool = False

    @classmethod
    def of(
        cls,
        role: Any,
        weights: Mapping[str, HeldTensor] | None,
        place_of: Callable[[torch.Tensor], Place | None] = lambda tensor: None,
        **more: Any,
    ) -> Description:
        """The description of what a rank holds."""
        if weights is None:
            return cls(role, None, **more)
        more["gpu"] = gpus.gpu_of(held.tensor for held in weights.values())
        firsts = tied_names(weights)
        entries = {
            name: DescribedTensor(
                dtype_name(held.tensor),
                held.whole,
                held.box,
                firsts[name],
                place_of(held.tensor),
            )
            for name, held in weights.items()
        }
        return cls(role, entries, **more)

    def plain(self) -> dict[str, Any]:
        """As plain data, for the way to the others."""
        weights = self.weights
        lines = None
        if weights is not None:
            lines = [
                [
                    *(name, entry.dtype, entry.whole, entry.box.offset, entry.box.shape),
                    *(entry.first, entry.place and entry.place.plain()),
                ]
                for name, entry in weights.items()
            ]
        options = None if self.options is None else asdict(self.options)
        return vars(self) | {"weights": lines, "options": options}

    def text(self) -> str:
        """As a text."""
        return json.dumps(self.plain())

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Description:
        """The other way."""
        weights = None
        if data["weights"] is not None:
            weights = {
                name: DescribedTensor(
                    dtype,
                    tuple(whole),
                    Box(tuple(offset), tuple(shape)),
                    first,
                    place and Place(place[0], place[1], tuple(place[2])),
                )
                for name, dtype, whole, offset, shape, first, place in data["weights"]
            }
        options = None if data["options"] is None else UpdateOptions(**data["options"])
        return cls(**(data | {"weights": weights, "options": options}))
