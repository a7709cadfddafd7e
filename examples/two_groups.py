"""Two groups at once: each half of the ranks adds up its own numbers, then all have both sums.

unisono run -n 4 examples/two_groups.py
"""

import torch

import unisono


def halves(size: int) -> list[list[int]]:
    """The ranks of each group; in one process there is only one."""
    ranks = list(range(size))
    middle = (size + 1) // 2
    return [half for half in (ranks[:middle], ranks[middle:]) if half]


def sum_in_group(comm: unisono.Communicator, groups: list[list[int]]) -> tuple[int, torch.Tensor]:
    """This rank's group, and the sum of that group's ranks."""
    mine = next(number for number, ranks in enumerate(groups) if comm.rank in ranks)
    group = comm.split(groups[mine])  # only the members create it; the others need not call
    total = unisono.all_reduce(torch.tensor([comm.rank]), group=group)
    return mine, total


def both_sums(
    comm: unisono.Communicator, groups: list[list[int]], mine: int, total: torch.Tensor
) -> list[int]:
    """Every group's sum, on every rank: each comes from the first member of its group."""
    sums = torch.zeros(len(groups), dtype=torch.int64)
    if comm.rank == groups[mine][0]:
        sums[mine] = total  # from one member only, or each sum would count once per member
    return unisono.all_reduce(sums).tolist()


def main() -> None:
    comm = unisono.init()
    groups = halves(comm.size)
    mine, total = sum_in_group(comm, groups)
    assert total.item() == sum(groups[mine]), f"group {groups[mine]} added up to {total.item()}"
    sums = both_sums(comm, groups, mine, total)
    expected = [sum(ranks) for ranks in groups]
    assert sums == expected, f"rank {comm.rank} has {sums}, not {expected}"
    if comm.rank == 0:
        for ranks, found in zip(groups, sums, strict=True):
            print(f"ranks {ranks} add up to {found}")
    unisono.shutdown()


if __name__ == "__main__":
    main()
