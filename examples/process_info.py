"""Who is in the group: each rank describes itself, and rank 0 has all descriptions.

You can send objects of plain data (numbers, strings, lists, dicts, tensors) directly; you need not
pack them into tensors of a fixed length.

    unisono run -n 4 examples/process_info.py
"""

import os
import platform

import torch

import unisono


def describe(rank: int, size: int) -> dict[str, object]:
    return {
        "rank": rank,
        "of": size,
        "pid": os.getpid(),
        "machine": platform.node(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    comm = unisono.init()
    everyone = unisono.gather_object(describe(comm.rank, comm.size))  # a list on rank 0
    if comm.rank == 0:
        assert everyone is not None, "rank 0 got no list"
        for info in everyone:
            print("  ".join(f"{name} {value}" for name, value in info.items()))
        found = [info["rank"] for info in everyone]
        assert found == list(range(comm.size)), f"the ranks are out of order: {found}"
        processes = {info["pid"] for info in everyone}
        assert len(processes) == comm.size, f"{comm.size} ranks in {len(processes)} processes"
    else:
        assert everyone is None, f"rank {comm.rank} got what was for rank 0"

    total = unisono.all_reduce(torch.tensor([comm.rank]))
    expected = comm.size * (comm.size - 1) // 2
    assert total.item() == expected, f"the ranks add up to {total.item()}, not {expected}"
    unisono.shutdown()


if __name__ == "__main__":
    main()
