"""Objects created in inference mode work for training outside it, and what helpers write counts as
a write for autograd."""

from __future__ import annotations

import pytest
import torch

import unisono
from unisono.comm.communicator import Communicator
from unisono.training import (
    GradientSync,
    ShardedOptimizer,
    sync_gradients,
)


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def losses_of(model: torch.nn.Module, comm: Communicator) -> torch.Tensor:
    return model(torch.arange(3.0) + comm.rank).square().sum()


def gradients_by_hand(comm: Communicator) -> list[torch.Tensor]:
    """The mean of all ranks' gradients, from a model that the other ranks do not have."""
    model = model_of()
    ranks = range(comm.size)
    loss = sum(model(torch.arange(3.0) + rank).square().sum() for rank in ranks) / comm.size
    return list(torch.autograd.grad(loss, list(model.parameters())))  # type: ignore[arg-type]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wide", [False, True])
def test_a_gradient_sync_made_and_finished_in_inference_mode(
    comm: Communicator, wide: bool
) -> None:
    expected = gradients_by_hand(comm)
    model = model_of().bfloat16() if wide else model_of()
    tolerance = 0.05 if wide else 1e-6
    with torch.inference_mode():
        sync = GradientSync(model, comm, accumulate_float32=wide)
    for finishes_there in (True, False, True, False):  # buckets are rebuilt after the first step
        model.zero_grad()
        x = (torch.arange(3.0) + comm.rank).to(model[0].weight.dtype)
        model(x).square().sum().backward()
        with torch.inference_mode(finishes_there):
            sync.finish()
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert not parameter.grad.is_inference()
            given = parameter.grad.float()
            torch.testing.assert_close(given, wanted, rtol=tolerance, atol=tolerance)
    sync.close()

    model.zero_grad()
    if comm.rank == 0:
        model[1].bias.grad = torch.ones_like(model[1].bias)
    with torch.inference_mode():
        sync_gradients(model, comm, unused="zero")
    assert model[0].weight.grad is None
    model[1].bias.grad.add_(1)  # to which only the other rank contributed
    assert model[1].bias.grad.item() == 1.5


@pytest.mark.ranks(2)
def test_a_sharded_optimizer_made_and_used_in_inference_mode(comm: Communicator) -> None:
    expected, model = model_of(), model_of()
    whole = torch.optim.AdamW(expected.parameters(), lr=0.1)
    with torch.inference_mode():
        optimizer = ShardedOptimizer(model, torch.optim.AdamW, comm, lr=0.1)
    for steps_there in (True, False):
        ranks = range(comm.size)
        wanted = sum(expected(torch.arange(3.0) + rank).square().sum() for rank in ranks)
        whole.zero_grad()
        (wanted / comm.size).backward()  # type: ignore[union-attr]
        whole.step()
        optimizer.zero_grad()
        loss = losses_of(model, comm)
        loss.backward(retain_graph=True)
        with torch.inference_mode(steps_there):
            optimizer.step()
        torch.testing.assert_close(list(model.parameters()), list(expected.parameters()))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()  # with the old weights


@pytest.mark.ranks(2)
def test_a_module_shared_in_inference_mode_still_learns(comm: Communicator) -> None:
    model = model_of()
    model.register_buffer("seen", torch.zeros(2))
    with torch.inference_mode():
        unisono.share_module(model, comm)
        served = unisono.share_module(model_of(), comm)  # created in that mode, and stays so
    loss = losses_of(model, comm)
    loss.backward()
    model.seen.add_(1)
    for parameter in model.parameters():
        assert not parameter.is_inference()
        assert parameter.requires_grad
        assert parameter.grad is not None
        assert comm.is_shared(parameter)
    assert all(parameter.is_inference() for parameter in served.parameters())
    assert comm.is_shared(served[0].weight)
