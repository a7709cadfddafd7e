"""Run by every rank: pytorch-ignite's auto_model, and three steps on data of the rank's own.

    unisono run -n 2 --replace gloo tests/real/ignite_model.py gloo

Prints the class of the model, the backend that ignite sees, what moves the data, and whether all
ranks have the same weights. "wrapped" names unisono itself, and wraps the model as docs/programs.md
says; "bare" does not.
"""

from __future__ import annotations

import sys

import ignite.distributed as idist
import torch
import torch.distributed as dist
from ignite.engine import Engine
from torch.nn.parallel import DistributedDataParallel

import unisono

form = sys.argv[1]
if form == "gloo":
    idist.initialize("gloo")
else:
    dist.init_process_group("unisono")
torch.manual_seed(1)
model = idist.auto_model(torch.nn.Linear(8, 1))
if form == "wrapped":
    model = DistributedDataParallel(model)
optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))


def step(engine: Engine, batch: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    optimizer.step()
    return float(loss)


torch.manual_seed(2 + idist.get_rank())
Engine(step).run([torch.randn(4, 8) for _ in range(3)])
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
everywhere = idist.all_gather(weights.unsqueeze(0))
if idist.get_rank() == 0:
    agree = "same" if torch.equal(everywhere[0], everywhere[1]) else "other"
    print(type(model).__name__, idist.backend(), unisono.get_backend(), agree)
dist.barrier()
dist.destroy_process_group()
