"""Evaluation on several ranks: every prediction on rank 0 once, in the dataset's order.

torch's DistributedSampler gives every rank the same number of samples, and repeats some to do so.
These would count twice. So predictions travel with their indices in the dataset.

    unisono run -n 4 examples/evaluation.py
"""

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import unisono
from unisono.training import gather_in_order

SAMPLES, BATCH = 23, 4


class Points(Dataset):
    """Points of a plane, in two classes; a sample knows its own index."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(0))
        self.labels = (self.x[:, 0] > 0.2).long()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.labels[index], index


def predict(x: torch.Tensor) -> torch.Tensor:
    """A model that is sometimes wrong."""
    return (x.sum(1) > 0).long()


def evaluate(data: Points, rank: int, size: int) -> tuple[float, int]:
    """The accuracy, on every rank, and how many samples the ranks were given together."""
    sampler = DistributedSampler(data, size, rank, shuffle=True, seed=3)
    predictions, indices = [], []
    for x, _, numbers in DataLoader(data, BATCH, sampler=sampler):  # the last batch is smaller
        predictions.append(predict(x))
        indices.append(numbers)
    everything = gather_in_order(torch.cat(predictions), torch.cat(indices), len(data))
    accuracy = None
    if rank == 0:
        assert torch.equal(everything, predict(data.x)), "the predictions are not in order"
        accuracy = (everything == data.labels).double().mean().item()
    accuracy = unisono.broadcast_object(accuracy)  # rank 0 has computed it for all
    return accuracy, len(sampler) * size


def main() -> None:
    comm = unisono.init()
    data = Points()
    accuracy, given_out = evaluate(data, comm.rank, comm.size)
    right = sum(int(a == b) for a, b in zip(predict(data.x), data.labels, strict=True))
    assert accuracy == right / SAMPLES, f"the accuracy is {accuracy}, not {right} of {SAMPLES}"
    if comm.rank == 0:
        print(f"accuracy {accuracy:.4f}: {right} of {SAMPLES}, {given_out - SAMPLES} repeated once")
    unisono.shutdown()


if __name__ == "__main__":
    main()
