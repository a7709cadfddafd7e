"""A receive for the last message is posted at the beginning, and asked about now and then."""

# late:

import time

import torch
import torch.distributed as dist

rank, size = dist.get_rank(), dist.get_world_size()
end = torch.zeros(1)
awaited = dist.irecv(end, 0, tag=9) if rank else None
for _ in range(150):
    dist.all_reduce(torch.ones(4))
    time.sleep(0.02)
    if awaited is not None:
        awaited.is_completed()
for peer in range(1, size) if rank == 0 else ():
    dist.send(torch.ones(1), peer, tag=9)
if awaited is not None:
    awaited.wait()
