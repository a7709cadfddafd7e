"""A chain of messages: rank 0 sends [100, 200], and each rank in the middle doubles it.

On 3 ranks the last one ends with [200, 400]. Every rank but the first receives, every rank but the
last sends, and those in the middle do both.

    unisono run -n 3 examples/chain.py
"""

import torch

import unisono


def pass_on(rank: int, size: int) -> torch.Tensor:
    """What this rank has at the end."""
    first, last = rank == 0, rank == size - 1
    data = torch.tensor([100.0, 200.0]) if first else torch.empty(2)
    if not first:
        unisono.recv(data, src=rank - 1)
        print(f"rank {rank} received {data.tolist()}", flush=True)
    if not first and not last:
        data *= 2
    if not last:
        unisono.send(data, dst=rank + 1)  # returns once a receive has matched it
        print(f"rank {rank} sent {data.tolist()}", flush=True)
    return data


def main() -> None:
    comm = unisono.init()
    data = pass_on(comm.rank, comm.size)
    doublings = min(comm.rank, max(0, comm.size - 2))  # ranks 1 to size - 2 double it
    expected = [100.0 * 2**doublings, 200.0 * 2**doublings]
    assert data.tolist() == expected, f"rank {comm.rank} has {data.tolist()}, not {expected}"
    if comm.rank == comm.size - 1:
        print(f"the end of the chain has {data.tolist()}")
    unisono.shutdown()


if __name__ == "__main__":
    main()
