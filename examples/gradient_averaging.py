"""Data parallel training without DDP: each rank has a part of the batch, gradients are averaged.

All gradients travel in one message. The model ends as it does in one process with the whole batch,
and is the same on every rank, bit for bit.

    unisono run -n 2 examples/gradient_averaging.py
"""

import torch
from torch import nn

import unisono

SAMPLES_PER_RANK, STEPS = 6, 5


def new_model() -> nn.Module:
    torch.manual_seed(0)  # the same start on every rank; start_alike.py shows how to be sure
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch, for all ranks together."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES_PER_RANK * size, 4, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def average_gradients(model: nn.Module) -> None:
    """In place. Every rank must have the same gradients; "mean" divides by the group's size."""
    gradients = [parameter.grad for parameter in model.parameters()]
    unisono.all_reduce([gradient for gradient in gradients if gradient is not None], "mean")


def train(size: int, mine: slice, average: bool) -> tuple[nn.Module, float]:
    model = new_model()
    for step in range(STEPS):
        x, y = batch(step, size)
        loss = nn.functional.mse_loss(model(x[mine]), y[mine])
        model.zero_grad()
        loss.backward()
        if average:
            average_gradients(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # as any optimizer, on the same gradient
    return model, loss.item()


def main() -> None:
    comm = unisono.init()
    begin = SAMPLES_PER_RANK * comm.rank
    model, loss = train(comm.size, slice(begin, begin + SAMPLES_PER_RANK), average=True)
    alone, loss_alone = train(comm.size, slice(None), average=False)  # one process, whole batches

    mean_loss = unisono.reduce_tensor(torch.tensor(loss, dtype=torch.float64), "mean").item()
    assert abs(mean_loss - loss_alone) < 1e-12, f"the loss is {mean_loss}, not {loss_alone}"
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12), f"{name} is not as in one process"
        everyone = unisono.all_gather(ours.detach())
        assert all(torch.equal(ours, theirs) for theirs in everyone), (
            f"{name} differs between ranks"
        )
    if comm.rank == 0:
        print(f"{STEPS} steps on {comm.size} ranks: loss {mean_loss:.6f}, as in one process")
    unisono.shutdown()


if __name__ == "__main__":
    main()
