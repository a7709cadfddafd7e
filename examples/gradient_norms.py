"""Gradient norms: each rank's own, the averaged gradient's, and a sharded model's.

Norms do not average: the norm of the mean gradient is at most the mean of the norms. If each rank
has different parameters (tensor or pipeline parallel), add the squares of all ranks;
clip_grad_norm then scales all gradients by the same factor.

    unisono run -n 4 examples/gradient_norms.py
"""

import math

import torch

import unisono
from unisono.training import clip_grad_norm


def gradient(rank: int) -> torch.Tensor:
    """What backward leaves on a rank."""
    return torch.tensor([3.0, 4.0], dtype=torch.float64) * (-1) ** rank * (rank + 1)


def norms_of_replicas(rank: int, size: int) -> None:
    """Data parallel: all ranks have the same parameters."""
    mine = gradient(rank)
    norms = unisono.gather_tensor(mine.norm(), dst=0)
    mean = unisono.reduce_tensor(mine, "mean")
    everything = torch.stack([gradient(peer) for peer in range(size)])
    assert torch.allclose(mean.norm(), everything.mean(0).norm()), f"the mean is {mean}"
    if rank == 0:
        found = [norm.item() for norm in norms]
        assert found == [5.0 * (peer + 1) for peer in range(size)], f"the ranks' norms are {found}"
        assert mean.norm() <= sum(found) / size + 1e-12
        for peer, norm in enumerate(found):
            print(f"rank {peer}: gradient norm {norm:.4f}")
        print(f"norm of the averaged gradient: {mean.norm():.4f}")


def norm_of_shards(rank: int, size: int) -> None:
    """Each rank has parameters of its own; together they are one model."""
    parameter = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    parameter.grad = gradient(rank)
    norm = clip_grad_norm([parameter], max_norm=1.0).item()
    expected = math.sqrt(sum((5.0 * (peer + 1)) ** 2 for peer in range(size)))
    assert math.isclose(norm, expected), f"the norm of the model is {norm}, not {expected}"
    clipped = unisono.all_gather(parameter.grad)
    assert math.isclose(torch.cat(clipped).norm(), 1.0, rel_tol=1e-5), "it was not clipped to 1"
    assert torch.allclose(parameter.grad, gradient(rank) / expected, rtol=1e-5)
    if rank == 0:
        print(f"norm of a model sharded over all ranks: {norm:.4f}, clipped to 1")


def main() -> None:
    comm = unisono.init()
    norms_of_replicas(comm.rank, comm.size)
    norm_of_shards(comm.rank, comm.size)
    unisono.shutdown()


if __name__ == "__main__":
    main()
