"""Scatter against broadcast: how many bytes each rank must hold to get its quarter of a matrix.

Rank 0 has a [1000, 1000] matrix, and each of 4 ranks needs 250 of its columns. After a broadcast
every rank holds the whole matrix (a slice is a view, which keeps all of it alive). With scatter
only rank 0 does, until its parts are sent; the others hold their part.

    unisono run -n 4 examples/scatter_or_broadcast.py
"""

import torch

import unisono

ROWS = COLUMNS = 1000


def matrix() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def my_columns(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return whole.tensor_split(size, dim=1)[rank]


def by_broadcast(rank: int, size: int) -> torch.Tensor:
    whole = matrix() if rank == 0 else torch.empty(ROWS, COLUMNS)
    unisono.broadcast(whole, src=0)
    return my_columns(whole, rank, size)


def by_scatter(rank: int, size: int) -> torch.Tensor:
    parts = list(matrix().tensor_split(size, dim=1)) if rank == 0 else None
    return unisono.scatter(parts, src=0)  # the other ranks need not know shapes


def bytes_held(tensor: torch.Tensor) -> int:
    """Of all memory that the tensor keeps alive."""
    return tensor.untyped_storage().nbytes()


def main() -> None:
    comm = unisono.init()
    broadcast, scattered = by_broadcast(comm.rank, comm.size), by_scatter(comm.rank, comm.size)

    # Element (i, j) is 1000 i + j, and this rank's columns begin after those of the ranks before.
    widths = [len(range(COLUMNS)[rank :: comm.size]) for rank in range(comm.size)]
    begin, width = sum(widths[: comm.rank]), widths[comm.rank]
    expected = 1000.0 * torch.arange(ROWS)[:, None] + torch.arange(begin, begin + width)
    assert torch.equal(broadcast, expected), f"rank {comm.rank} has wrong columns by broadcast"
    assert torch.equal(scattered, expected), f"rank {comm.rank} has wrong columns by scatter"

    held = bytes_held(broadcast), bytes_held(scattered)
    whole_bytes, part_bytes = 4 * ROWS * COLUMNS, 4 * ROWS * width
    assert held[0] == whole_bytes, f"after broadcast rank {comm.rank} holds {held[0]} bytes"
    assert held[1] == part_bytes, f"after scatter rank {comm.rank} holds {held[1]} bytes"
    everyone = unisono.gather_object(held)
    if comm.rank == 0:
        assert everyone is not None
        for rank, (after_broadcast, after_scatter) in enumerate(everyone):
            print(f"rank {rank}: broadcast {after_broadcast:,} bytes, scatter {after_scatter:,}")
    unisono.shutdown()


if __name__ == "__main__":
    main()
