"""Loss and accuracy over all ranks when the batches differ in size.

The mean of the ranks' means is wrong if one rank has fewer samples, and the last batch rarely
divides evenly. Add up the losses and the counts, then divide.

    unisono run -n 4 examples/metrics.py
"""

import torch

import unisono
from unisono.training import mean_over_samples


def samples(size: int) -> tuple[torch.Tensor, torch.Tensor, list[slice]]:
    """Losses and right answers of all samples, and which of them each rank has: rank r has 3 more
    than rank r - 1."""
    counts = [2 + 3 * rank for rank in range(size)]
    ends = [sum(counts[: rank + 1]) for rank in range(size)]
    losses = torch.arange(sum(counts), dtype=torch.float64) ** 2 / 10
    right = torch.arange(sum(counts)) % 3 == 0
    return losses, right, [slice(end - n, end) for end, n in zip(ends, counts, strict=True)]


def by_hand(losses: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """The same with two reductions: sums on one side, counts on the other."""
    count = unisono.reduce_tensor(torch.tensor(len(losses)), "sum")
    loss = unisono.reduce_tensor(losses.sum(), "sum") / count
    accuracy = unisono.reduce_tensor(right.sum(), "sum") / count
    return loss.item(), accuracy.item()


def main() -> None:
    comm = unisono.init()
    losses, right, shards = samples(comm.size)
    my_losses, my_right = losses[shards[comm.rank]], right[shards[comm.rank]]

    sums = {"loss": my_losses.sum(), "accuracy": my_right.sum()}
    means = mean_over_samples(sums, len(my_losses))  # one message
    loss, accuracy = by_hand(my_losses, my_right)
    mean_of_means = unisono.reduce_tensor(my_losses.mean(), "mean").item()

    right_loss, right_accuracy = losses.mean().item(), right.double().mean().item()
    assert abs(means["loss"] - right_loss) < 1e-9, f"the loss is {means['loss']}"
    assert abs(means["accuracy"] - right_accuracy) < 1e-9, f"the accuracy is {means['accuracy']}"
    assert abs(loss - right_loss) < 1e-9, f"the loss by hand is {loss}, not {right_loss}"
    assert abs(accuracy - right_accuracy) < 1e-6, f"the accuracy by hand is {accuracy}"
    if comm.size > 1:
        assert abs(mean_of_means - right_loss) > 0.1, "the trap that this example shows is gone"
    if comm.rank == 0:
        print(
            f"loss {means['loss']:.4f}, accuracy {means['accuracy']:.4f} of {len(losses)} samples"
        )
        print(f"the mean of the ranks' means would have been {mean_of_means:.4f}")
    unisono.shutdown()


if __name__ == "__main__":
    main()
