"""A solution of chapter 12's exercises."""

import torch

from unisono import Communicator


def mean_loss(comm: Communicator, losses: list[float]) -> float:
    sum_and_count = torch.tensor([sum(losses), float(len(losses))])
    comm.all_reduce(sum_and_count)
    return (sum_and_count[0] / sum_and_count[1]).item()


def train(comm: Communicator, losses: list[float], log: list[float]) -> float:
    total, count = 0.0, 0.0
    for loss in losses:
        is_finite = loss == loss
        x = torch.tensor([loss if is_finite else 0.0, float(is_finite)])
        comm.all_reduce(x)
        step_total, step_count = x.tolist()
        if comm.rank == 0:
            log.append(step_total / step_count)
        total += step_total
        count += step_count
    return total / count
