"""A batch size that adapts to memory: the fullest rank decides, and all ranks change together.

Ranks have sequences of different lengths, so some are nearly full when others are half empty. All
see the same maximum, and so reach the same decision without another message.

    unisono run -n 4 examples/batch_size.py
"""

import torch

import unisono

BUDGET_BYTES = 1_000_000


def length_of(rank: int) -> int:
    """How long this rank's sequences are."""
    return 500 * (rank + 1)


def memory_used(batch_size: int, rank: int) -> float:
    """The part of the budget that a step's activations take."""
    activations = torch.zeros(batch_size, length_of(rank))
    return activations.untyped_storage().nbytes() / BUDGET_BYTES


def adapt(batch_size: int, rank: int) -> int:
    """The next batch size, the same on every rank."""
    used = torch.tensor(memory_used(batch_size, rank), dtype=torch.float64)
    fullest = unisono.all_reduce(used, "max").item()
    if fullest > 0.9:
        return max(1, batch_size // 2)
    if fullest < 0.45:
        return batch_size * 2
    return batch_size


def main() -> None:
    comm = unisono.init()
    history = [1000]
    while True:
        history.append(adapt(history[-1], comm.rank))
        if history[-1] == history[-2]:
            break

    everyone = unisono.all_gather_object(history)
    assert everyone == [history] * comm.size, f"the ranks disagree: {everyone}"
    bytes_per_sample = 4 * length_of(comm.size - 1)  # of the rank with the longest sequences
    expected = 1000
    while expected * bytes_per_sample > 0.9 * BUDGET_BYTES:
        expected //= 2
    assert history[-1] == expected, f"the batch size settled at {history[-1]}, not {expected}"
    if comm.rank == 0:
        print("batch sizes on every rank:", ", ".join(map(str, history)))
    unisono.shutdown()


if __name__ == "__main__":
    main()
