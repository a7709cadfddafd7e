"""all_reduce = reduce_scatter, then all_gather: what each rank has before and after each of them.

On 4 ranks, rank r begins with [0, 1, 2, 3] + r, and all end with [6, 10, 14, 18].

    unisono run -n 4 examples/identity.py
"""

import torch

import unisono


def show(rank: int, what: str, tensor: torch.Tensor) -> None:
    print(f"rank {rank} {what}: {tensor.tolist()}", flush=True)


def by_all_reduce(mine: torch.Tensor, rank: int) -> torch.Tensor:
    show(rank, "before all_reduce", mine)
    total = unisono.all_reduce(mine.clone())  # works in place, so on a copy
    show(rank, "after all_reduce", total)
    return total


def by_two_steps(mine: torch.Tensor, rank: int) -> torch.Tensor:
    show(rank, "before reduce_scatter", mine)
    part = unisono.reduce_scatter(mine)  # rank r has part r of the sum
    show(rank, "after reduce_scatter", part)
    total = torch.cat(unisono.all_gather(part))
    show(rank, "after all_gather", total)
    return total


def main() -> None:
    comm = unisono.init()
    mine = torch.arange(comm.size, dtype=torch.float32) + comm.rank
    together = by_all_reduce(mine, comm.rank)
    in_two_steps = by_two_steps(mine, comm.rank)

    # Element i is the sum of i + r over all ranks r.
    expected = [
        comm.size * element + comm.size * (comm.size - 1) / 2 for element in range(comm.size)
    ]
    assert comm.size != 4 or expected == [6, 10, 14, 18]
    assert together.tolist() == expected, f"all_reduce gave {together}, not {expected}"
    assert torch.equal(together, in_two_steps), f"{together} is not {in_two_steps}"
    if comm.rank == 0:
        print(f"all_reduce = reduce_scatter, then all_gather: {together.tolist()}")
    unisono.shutdown()


if __name__ == "__main__":
    main()
