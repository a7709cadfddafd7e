"""A pipeline: every rank has some layers; micro-batches flow forward and gradients flow back.

Every stage but the first receives, and every stage but the last sends; the stages in the middle do
both. Outputs and gradients equal those of the whole model in one process.

    unisono run -n 4 examples/pipeline.py
"""

import torch
from torch import nn

import unisono
from unisono import ProcessGroupManager

LAYERS, WIDTH, BATCH, MICRO_BATCHES = 12, 16, 8, 4


def whole_model() -> nn.Sequential:
    torch.manual_seed(0)  # the same on every rank, so that each can take its own layers
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (MICRO_BATCHES, BATCH, WIDTH)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(shape, generator=generator, dtype=torch.float64)


def run(manager: ProcessGroupManager, stage: nn.Sequential) -> list[float]:
    """All micro-batches forward, then all backward; returns the losses on the last stage."""
    inputs, targets = data()
    pp = manager.pp  # its ranks are the stages, in order
    under_way, losses = [], []
    for number in range(MICRO_BATCHES):
        x = inputs[number]
        if not manager.pp_is_first_stage:
            x = unisono.recv(torch.empty_like(x), src=pp.prev, group=pp).requires_grad_()
        y = stage(x)
        if manager.pp_is_last_stage:
            y = nn.functional.mse_loss(y, targets[number]) / MICRO_BATCHES
            losses.append(y.item())
        else:
            unisono.send(y.detach(), dst=pp.next, group=pp)
        under_way.append((x, y))
    for x, y in under_way:
        gradient = None
        if not manager.pp_is_last_stage:
            gradient = unisono.recv(torch.empty_like(y), src=pp.next, group=pp)
        y.backward(gradient)
        if not manager.pp_is_first_stage:
            unisono.send(x.grad, dst=pp.prev, group=pp)
    return losses


def in_one_process(model: nn.Sequential) -> list[float]:
    losses = []
    for x, target in zip(*data(), strict=True):
        loss = nn.functional.mse_loss(model(x), target) / MICRO_BATCHES
        loss.backward()
        losses.append(loss.item())
    return losses


def main() -> None:
    comm = unisono.init()
    with ProcessGroupManager(pp_size=comm.size) as manager:
        begin, end = (LAYERS * stage // comm.size for stage in (comm.rank, comm.rank + 1))
        stage, expected = whole_model()[begin:end], whole_model()
        losses, right_losses = run(manager, stage), in_one_process(expected)

        wrong = f"stage {manager.pp_rank} differs from the model in one process: its"
        if manager.pp_is_last_stage:
            assert torch.allclose(torch.tensor(losses), torch.tensor(right_losses)), (
                f"{wrong} losses are {losses}, not {right_losses}"
            )
            print(f"{MICRO_BATCHES} micro-batches through {comm.size} stages: loss {sum(losses)}")
        pairs = zip(stage.named_parameters(), expected[begin:end].parameters(), strict=True)
        for (name, ours), theirs in pairs:
            assert torch.allclose(ours.grad, theirs.grad), f"{wrong} gradient of {name} is wrong"
        comm.barrier()
    unisono.shutdown()


if __name__ == "__main__":
    main()
