"""Not every step needs a message: losses are added up locally and reduced every k steps.

It logs the mean over all samples of all ranks since the last time: nothing is lost, with a k-th of
the messages. The number is read only when it is needed.

    unisono run -n 4 examples/sync_interval.py
"""

import unisono
from unisono.training import mean_over_samples

STEPS, INTERVAL = 20, 8


def batch_losses(step: int, rank: int) -> list[float]:
    """The losses of a step's samples; ranks have batches of different sizes."""
    return [100 / (step + 1) + rank + sample for sample in range(2 + (step + rank) % 3)]


def train(rank: int) -> tuple[list[tuple[int, float]], int]:
    """What was logged, as (step, loss), and how many messages it took."""
    logged, messages, total, count = [], 0, 0.0, 0
    for step in range(STEPS):
        losses = batch_losses(step, rank)
        total, count = total + sum(losses), count + len(losses)
        if (step + 1) % INTERVAL == 0 or step == STEPS - 1:  # the last steps count, too
            logged.append((step, mean_over_samples({"loss": total}, count)["loss"]))
            messages, total, count = messages + 1, 0.0, 0
    return logged, messages


def main() -> None:
    comm = unisono.init()
    logged, messages = train(comm.rank)
    begin = 0
    for step, loss in logged:
        everything = [
            loss
            for past in range(begin, step + 1)
            for rank in range(comm.size)
            for loss in batch_losses(past, rank)
        ]
        expected = sum(everything) / len(everything)
        assert abs(loss - expected) < 1e-9, f"steps {begin} to {step}: {loss}, not {expected}"
        begin = step + 1
        if comm.rank == 0:
            print(f"step {step}: loss {loss:.4f} over {len(everything)} samples")
    assert begin == STEPS, f"the steps from {begin} on were never logged"
    assert messages == 3, f"{messages} messages for {STEPS} steps"
    unisono.shutdown()


if __name__ == "__main__":
    main()
