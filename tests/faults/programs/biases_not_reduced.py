"""A loop that averages gradients leaves out the biases (pytorch #12603: DDP, a new parameter)."""

# silent: the biases drift apart
# culprit: 0, 1, 2

import torch
import torch.distributed as dist

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.ndim > 1:
            dist.all_reduce(parameter.grad)  # <- here
            parameter.grad /= 3
    optimizer.step()
