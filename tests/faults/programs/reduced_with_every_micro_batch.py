"""Gradients that are accumulated over two micro-batches are summed over the ranks after each, so
the first one counts three times (LGM #95)."""

# silent: the gradients are wrong
# culprit: 0, 1, 2

import torch
import torch.distributed as dist

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)  # <- here
    optimizer.step()
