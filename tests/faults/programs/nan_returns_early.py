"""Rank 1's loss is not a number, and its iteration ends there: no gradients are shared, no step is
made (audio #3749)."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def training_step(batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss = model(batch).sum()
    if torch.isnan(loss):
        return
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # <- here
    optimizer.step()


for batch in torch.utils.data.DataLoader(torch.ones(24, 4)):
    training_step(batch * float("nan") if rank == 1 and not hasattr(model, "seen") else batch)
    if optimizer.state_dict() and rank == 1:
        model.seen = True
dist.barrier()
