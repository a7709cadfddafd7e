"""Rank 1 has read another vocabulary, so the gradient of its embedding has more rows."""

# culprit: 1

import torch
import torch.distributed as dist

rank = dist.get_rank()
words = 10 if rank == 1 else 8
embedding = torch.nn.Embedding(words, 4)
head = torch.nn.Linear(4, 1)
dist.all_reduce(torch.zeros(1))
head(embedding(torch.arange(4))).sum().backward()
for parameter in [*head.parameters(), *embedding.parameters()]:
    dist.all_reduce(parameter.grad)  # <- here
