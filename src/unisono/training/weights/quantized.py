"""The trainer's weights in the form that engines serve: float8 or int8, and scales.

The formulas are those of vLLM's quantisers, by torch's operators alone: the same bits on every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from unisono.collectives.objects import all_gather_object
from unisono.training.weights.shards import (
    HeldTensor,
    Lengths,
    WeightShard,
    held_tensor,
    pairs_of,
)

Form = Literal["fp8", "fp8_blocks", "int8_channels"]

_BLOCK = 128
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max
_INT8_MAX = torch.iinfo(torch.int8).max
_LEAST_BLOCK_MAXIMUM = 1e-4  # as in vLLM


class QuantizedWeights:
    """`weights`, as a `WeightSender` takes them, with the chosen ones quantised: it is passed to a
    sender, which quantises anew at every update, and keeps the result until that is done.

    `names` tells which ones: it is called with each name. They are matrices. `form` is one of:

    - "fp8": float8_e4m3fn, a scale for each tensor, `<name>_scale` of shape (1,)
    - "fp8_blocks": the same, a scale for each block of 128 x 128, `<name>_scale_inv`
    - "int8_channels": int8, a scale for each row, `<name>_scale` of shape (rows, 1)

    A number is its quantised value times its scale; where all are zero the scale is 1. A trainer
    rank may hold shards: of whole rows for "int8_channels", of whole blocks for "fp8_blocks"; for
    "fp8" `group` is that of the trainer's ranks, which find the largest number together.

    A weight with NaN or infinity fails the update on every rank, with its name.

    >>> weights = {"up.weight": torch.tensor([[0.5, -1.0], [0.0, 0.0]]), "norm": torch.ones(2)}
    >>> chosen = unisono.training.QuantizedWeights(weights, "int8_channels", lambda n: n != "norm")
    >>> dict(chosen)["up.weight_scale"].tensor.tolist()
    [[0.007874015718698502], [1.0]]
    """

    def __init__(
        self, weights: Any, form: Form, names: Callable[[str], bool], *, group: Any = None
    ) -> None:
        if form not in _FORMS:
            raise ValueError(f"{form!r} is not a form of weights: choose from {', '.join(_FORMS)}")
        self._weights, self._form, self._names, self._group = weights, form, names, group

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Any]]:
        try:
            pairs, chosen, largest = self._read()
        except Exception as error:
            if self._group is not None:  # where the others wait
                all_gather_object((str(error), {}), self._group)
            raise
        if self._group is not None:
            for problem, theirs in all_gather_object(("", largest), self._group):
                if problem:
                    raise ValueError(problem)
                largest = theirs | {
                    name: max(most, theirs.get(name, 0.0)) for name, most in largest.items()
                }
        for name, most in largest.items():
            if most == math.inf:
                raise ValueError(f"the weight {name!r} has NaN or infinite elements")
        for name, value in pairs:
            if name in chosen:
                number = torch.tensor(largest[name], dtype=torch.float32)
                yield from _FORMS[self._form](name, chosen[name], number, self._group)
            else:
                yield name, value

    def _read(self) -> tuple[list[tuple[str, Any]], dict[str, HeldTensor], dict[str, float]]:
        """The weights, the chosen ones, and their largest magnitudes."""
        pairs = list(pairs_of(self._weights))
        chosen = {name: held_tensor(name, value) for name, value in pairs if self._names(name)}
        for name, held in chosen.items():
            dtype = held.tensor.dtype
            if not dtype.is_floating_point or dtype.itemsize == 1 or len(held.whole) != 2:
                raise ValueError(f"the weight {name!r} is no matrix of floating-point numbers")
        return pairs, chosen, {name: _largest(held.tensor) for name, held in chosen.items()}


def _largest(tensor: torch.Tensor) -> float:
    """The largest magnitude; infinity if an element is not finite."""
    if not tensor.numel():
        return 0.0
    low, high = tensor.aminmax()
    most = float(torch.maximum(low.abs(), high.abs()).float())
    return most if math.isfinite(most) else math.inf


def _maxima(numbers: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """The largest magnitudes along some dimensions, which stay with a length of one."""
    if numbers.numel():
        return numbers.abs().amax(dims, keepdim=True)
    return numbers.sum(dims, keepdim=True)


def _or_one(scale: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The scale, if it can be divided by."""
    least = torch.finfo(torch.float32).tiny
    return torch.where(largest == 0, torch.ones_like(scale), scale.clamp_min(least))


def _fp8(name: str, held: HeldTensor, largest: torch.Tensor, group: Any) -> Iterator[Any]:
    if group is None and held.box.shape != held.whole:
        raise ValueError(
            f"the weight {name!r} is sharded: pass the trainers' group, whose ranks find the "
            "largest number together"
        )
    largest = largest.to(held.tensor.device)
    # by a tensor: a division by a number becomes a multiplication
    scale = _or_one(largest / torch.full_like(largest, _FP8_MAX), largest).reshape(1)
    scaled = (held.tensor.float() * (1.0 / scale)).clamp_(-_FP8_MAX, _FP8_MAX)
    yield name, WeightShard(scaled.to(_FP8), held.whole, held.box.offset)
    yield f"{name}_scale", scale


def _fp8_blocks(name: str, held: HeldTensor, largest: torch.Tensor, group: Any) -> Iterator[Any]:
    for begin, length, whole in zip(held.box.offset, held.box.shape, held.whole, strict=True):
        cuts = begin % _BLOCK or ((begin + length) % _BLOCK and begin + length != whole)
        if cuts and held.box.count:
            raise ValueError(
                f"the weight {name!r}: the shard {held.box.shape} at {held.box.offset} of "
                f"{held.whole} cuts blocks of {_BLOCK} x {_BLOCK}"
            )
    rows, columns = held.tensor.shape
    padding = (0, -columns % _BLOCK, 0, -rows % _BLOCK)
    padded = torch.nn.functional.pad(held.tensor, padding).float()
    down, across = (length // _BLOCK for length in padded.shape)
    blocks = padded.view(down, _BLOCK, across, _BLOCK)
    maxima = _maxima(blocks, (1, 3))
    scales = _or_one(maxima.clamp(_LEAST_BLOCK_MAXIMUM) / _FP8_MAX, maxima)
    values = (blocks * (1.0 / scales)).to(_FP8).view(padded.shape)[:rows, :columns]
    yield name, WeightShard(values.contiguous(), held.whole, held.box.offset)
    shape = tuple(-(-length // _BLOCK) for length in held.whole)
    offset = tuple(begin // _BLOCK for begin in held.box.offset)
    yield f"{name}_scale_inv", WeightShard(scales.view(down, across), shape, offset)


def _int8_channels(name: str, held: HeldTensor, largest: torch.Tensor, group: Any) -> Iterator[Any]:
    if held.box.shape[1] != held.whole[1]:
        raise ValueError(f"the weight {name!r}: a shard of columns has no scales for its rows")
    numbers = held.tensor.float()
    maxima = _maxima(numbers, (1,))
    scales = _or_one(maxima / _INT8_MAX, maxima)
    values = (numbers / scales).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
    yield name, WeightShard(values, held.whole, held.box.offset)
    yield f"{name}_scale", WeightShard(scales, (held.whole[0], 1), (held.box.offset[0], 0))


def kinds_of(name: str, shape: Lengths, form: Form) -> list[tuple[str, torch.dtype, Lengths]]:
    """Name, dtype and shape of what a quantised weight becomes: values and scales."""
    scales = {
        "fp8": ("scale", (1,)),
        "fp8_blocks": ("scale_inv", tuple(-(-length // _BLOCK) for length in shape)),
        "int8_channels": ("scale", (shape[0], 1)),
    }
    suffix, of_scales = scales[form]
    values = torch.int8 if form == "int8_channels" else _FP8
    return [(name, values, shape), (f"{name}_{suffix}", torch.float32, of_scales)]


_FORMS: dict[str, Callable[..., Iterator[Any]]] = {
    "fp8": _fp8,
    "fp8_blocks": _fp8_blocks,
    "int8_channels": _int8_channels,
}
