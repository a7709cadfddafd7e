"""Softmax, L2 normalisation and a weighted sum of tensors on different ranks.

Rank r has [r + 1, r + 2, r + 3]. Without `dim` the ranks' tensors are combined element by element,
as if they were stacked; with `dim` they are parts of one long tensor. Either way the result is that
of one process with all the data, and large numbers do not overflow.

    unisono run -n 4 examples/composite_math.py
"""

import torch

import unisono

WEIGHTS = torch.tensor([0.3, 0.3, 0.4])


def check(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.allclose(found, expected, rtol=1e-5), f"{name} is {found}, not {expected}"


def element_by_element(mine: torch.Tensor, everything: torch.Tensor, rank: int) -> None:
    """`everything` has a row for each rank."""
    weighted = unisono.math.weighted_sum(mine, WEIGHTS)
    softmax = unisono.math.softmax(mine)
    normal = unisono.math.normalize(mine)
    check("the weighted sum", weighted, (everything * WEIGHTS).sum(0))
    check("the softmax", softmax, torch.softmax(everything, 0)[rank])
    check("the normalised tensor", normal, everything[rank] / everything.norm(dim=0))
    if rank == 0:
        print(f"weighted sum {rounded(weighted)}")
        print(f"softmax over ranks, rank 0's part {rounded(softmax)}")
        print(f"L2-normalised, rank 0's part {rounded(normal)}")


def along_a_dimension(mine: torch.Tensor, everything: torch.Tensor, rank: int) -> None:
    """The ranks' tensors, one after another, as one vector."""
    vector = everything.flatten()
    part = slice(3 * rank, 3 * rank + 3)
    softmax = unisono.math.softmax(mine, dim=0)
    check("the softmax of the vector", softmax, torch.softmax(vector, 0)[part])
    check("the norm of the vector", unisono.math.l2_norm(mine, dim=0), vector.norm())
    large = unisono.math.softmax(mine * 1000, dim=0)  # exp(1000) would be infinite
    check("the softmax of large numbers", large, torch.softmax(vector * 1000, 0)[part])
    if rank == 0:
        print(f"softmax of the whole vector, rank 0's part {rounded(softmax)}")


def rounded(tensor: torch.Tensor) -> list[float]:
    return [round(number, 4) for number in tensor.tolist()]


def main() -> None:
    comm = unisono.init()
    rows = [[rank + 1.0, rank + 2.0, rank + 3.0] for rank in range(comm.size)]
    everything = torch.tensor(rows)  # what a single process would have
    element_by_element(everything[comm.rank].clone(), everything, comm.rank)
    along_a_dimension(everything[comm.rank].clone(), everything, comm.rank)
    if comm.size == 4:
        check("the sum on four ranks", (everything * WEIGHTS).sum(0), torch.tensor([3, 4.2, 7.2]))
    unisono.shutdown()


if __name__ == "__main__":
    main()
