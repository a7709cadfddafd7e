"""Quantised weights: the numbers of a quantiser that goes element by element, from any shards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from unisono import Communicator, WeightUpdateError
from unisono.training import QuantizedWeights, WeightReceiver, WeightSender, WeightShard
from unisono.training.weights.quantized import kinds_of

FORMS: list[Any] = ["fp8", "fp8_blocks", "int8_channels"]
SHAPE = (300, 200)
E4M3 = sorted(
    {
        sign * number
        for sign in (-1, 1)
        for number in [
            *(mantissa / 8 * 2.0**-6 for mantissa in range(8)),
            *(
                (1 + mantissa / 8) * 2.0 ** (exponent - 7)
                for exponent in range(1, 16)
                for mantissa in range(8)
                if (exponent, mantissa) != (15, 7)
            ),
        ]
    }
)


def matrix(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of very different sizes, rows of zeros, a block of zeros."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(SHAPE, generator=generator) * torch.logspace(-3, 2, SHAPE[0])[:, None]
    numbers[7] = 0
    numbers[:128, 128:] = 0
    return numbers.to(dtype)


def everywhere(name: str) -> bool:
    return name != "norm"


def quantized(weights: Any, form: Any) -> dict[str, torch.Tensor]:
    return {
        name: value.tensor if isinstance(value, WeightShard) else value
        for name, value in QuantizedWeights(weights, form, everywhere)
    }


def scale_of(numbers: torch.Tensor, most: float, least: float = 0.0) -> float:
    """A float32 division, done in float64 and rounded once, is the same."""
    largest = max(float(numbers.abs().max()), least) if numbers.abs().max() else 0.0
    return float(torch.tensor(largest / most, dtype=torch.float32)) if largest else 1.0


def areas(form: str) -> list[tuple[slice, slice]]:
    """What has a scale of its own."""
    rows, columns = SHAPE
    if form == "fp8":
        return [(slice(0, rows), slice(0, columns))]
    if form == "int8_channels":
        return [(slice(row, row + 1), slice(0, columns)) for row in range(rows)]
    ends = [range(0, length, 128) for length in SHAPE]
    return [(slice(i, i + 128), slice(j, j + 128)) for i in ends[0] for j in ends[1]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_numbers(form: Any, dtype: torch.dtype) -> None:
    weights = {"w": matrix(dtype), "norm": torch.ones(3)}
    found = quantized(weights, form)
    assert torch.equal(weights["w"], matrix(dtype))  # the trainer's are as before
    assert torch.equal(found["norm"], torch.ones(3))
    assert kinds_of("w", SHAPE, form) == [
        (name, each.dtype, tuple(each.shape)) for name, each in found.items() if name != "norm"
    ]
    scales = found["w_scale_inv" if form == "fp8_blocks" else "w_scale"].flatten().tolist()
    for scale, area in zip(scales, areas(form), strict=True):
        numbers = matrix(dtype)[area].float()
        if form == "int8_channels":
            assert scale == scale_of(numbers, 127)
            expected = torch.tensor([round(x) for x in (numbers / scale).flatten().tolist()])
            assert torch.equal(found["w"][area].flatten().long(), expected)
            continue
        assert scale == scale_of(numbers, 448, 1e-4 if form == "fp8_blocks" else 0)
        inverse = torch.tensor(1.0) / torch.tensor(scale)
        # to the nearest float8; of two as near, to the one with an even mantissa
        values = torch.tensor(E4M3)
        scaled = (numbers * inverse).clamp(-448, 448).flatten()
        above = torch.searchsorted(values, scaled).clamp(1, len(values) - 1)
        low, high = values[above - 1], values[above]
        below, over = scaled.double() - low.double(), high.double() - scaled.double()
        zero = E4M3.index(0.0)
        high_is_even = (above - zero) % 2 == 0
        nearest = torch.where((over < below) | ((over == below) & high_is_even), high, low)
        assert torch.equal(found["w"][area].float().flatten(), nearest)


@pytest.mark.parametrize("form", FORMS)
def test_empty_and_tiny(form: Any) -> None:
    for shape in ((0, 5), (5, 0), (1, 1)):
        found = quantized({"w": torch.zeros(shape)}, form)
        assert found["w"].shape == shape
        for name in found.keys() - {"w"}:
            assert bool(found[name].eq(1).all())
    found = quantized({"w": torch.full((2, 2), 1e-42)}, form)
    assert not found["w"].float().isnan().any()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'int4' is not a form.*fp8_blocks"):
        QuantizedWeights({}, "int4", everywhere)  # type: ignore[arg-type]
    for wrong in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="'w' is no matrix of floating-point"):
            quantized({"w": wrong}, "fp8")
    part = WeightShard(torch.zeros(100, 100), SHAPE, (0, 100))
    for form, why in (
        ("fp8", "pass the trainers'"),
        ("fp8_blocks", "cuts"),
        ("int8_channels", "columns"),
    ):
        with pytest.raises(ValueError, match=f"'w'.*{why}"):
            quantized({"w": part}, form)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("form", FORMS)
def test_shards_give_what_the_whole_gives(comm: Communicator, form: Any) -> None:
    """Two trainers hold a part of the rows each; a weight with NaN changes nothing."""
    trainers = comm.split([0, 1])
    expected = quantized({"w": matrix()}, form)
    if comm.rank < 2:
        begin, end = ((0, 128), (128, 300))[comm.rank]
        weights = {"w": WeightShard(matrix()[begin:end], SHAPE, (begin, 0))}
        chosen = QuantizedWeights(weights, form, everywhere, group=trainers)
        with WeightSender(comm, chosen) as sender:
            sender.update()
            if comm.rank == 1:
                weights["w"].tensor[3, 4] = math.inf if form == "fp8" else math.nan
            with pytest.raises(WeightUpdateError, match="the weight 'w' has NaN or infinite"):
                sender.update()
            weights["w"].tensor.copy_(matrix()[begin:end] * 2)
            assert sender.update().version == 2
        return
    served = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with WeightReceiver(comm, served) as receiver:
        receiver.update()
        for name, tensor in expected.items():
            assert torch.equal(served[name].view(torch.uint8), tensor.view(torch.uint8)), name
        before = {name: tensor.clone() for name, tensor in served.items()}
        with pytest.raises(WeightUpdateError, match="the weight 'w' has NaN or infinite"):
            receiver.update()
        for name, tensor in before.items():
            assert torch.equal(served[name].view(torch.uint8), tensor.view(torch.uint8)), name
        receiver.update()
        assert receiver.version == 2


@pytest.mark.ranks(3)
def test_trainers_of_other_layers_and_one_that_fails(comm: Communicator) -> None:
    """Two stages of a pipeline share a weight, of which the second has nothing; then one of the
    second's is no matrix, which all learn of at once."""
    trainers = comm.split([0, 1])
    if comm.rank < 2:
        rows = (1, 0)[comm.rank]
        weights: dict[str, Any] = {
            "w": WeightShard(torch.ones(rows, 5), (1, 5), (comm.rank, 0)),
            f"layer.{comm.rank}": matrix(),
        }
        chosen = QuantizedWeights(weights, "fp8_blocks", everywhere, group=trainers)
        party: Any = WeightSender(comm, chosen)
    else:
        made = quantized(
            {"w": torch.ones(1, 5), "layer.0": matrix(), "layer.1": matrix()}, "fp8_blocks"
        )
        served = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
        party = WeightReceiver(comm, served)
    party.update()
    if comm.rank == 2:
        for name, tensor in made.items():
            assert torch.equal(served[name].view(torch.uint8), tensor.view(torch.uint8)), name
    if comm.rank == 1:
        weights["layer.1"] = torch.zeros(3)
    with pytest.raises(WeightUpdateError, match=r"every engine keeps.*'layer.1' is no matrix"):
        party.update(timeout_s=30)
    assert party.version == 1
    party.close()
