"""The helpers of a training loop: the same code for one process and for many.

reduce_tensor leaves its input unchanged and gives every rank the result. gather_tensor gives rank 0
a list and the others None. broadcast_tensor writes into the tensor. In a single process, even
without init(), all of them work and do nothing.

    python examples/helper_functions.py
    unisono run -n 4 examples/helper_functions.py
"""

import torch

import unisono

LOSSES = [0.5, 0.3, 0.7, 0.4]


def reduce_losses(rank: int, size: int) -> None:
    losses = [LOSSES[peer % 4] for peer in range(size)]
    mine = torch.tensor(losses[rank], dtype=torch.float64)
    total, mean = unisono.reduce_tensor(mine, "sum"), unisono.reduce_tensor(mine, "mean")
    assert abs(total - sum(losses)) < 1e-12, f"the losses add up to {total}, not {sum(losses)}"
    assert abs(mean - sum(losses) / size) < 1e-12, f"the mean loss is {mean}"
    assert mine.item() == losses[rank], "reduce_tensor changed its input"
    if unisono.is_main_process():
        print(f"losses {losses}: sum {total:.4g}, mean {mean:.4g}, on every rank")


def gather_predictions(rank: int, size: int) -> None:
    predictions = torch.arange(3) + 10 * rank
    collected = unisono.gather_tensor(predictions, dst=0)
    if unisono.is_main_process():
        found = [tensor.tolist() for tensor in collected]
        expected = [[10 * peer, 10 * peer + 1, 10 * peer + 2] for peer in range(size)]
        assert found == expected, f"rank 0 collected {found}, not {expected}"
        print(f"predictions of all ranks, on rank 0: {found}")
    else:
        assert collected is None, f"rank {rank} got what was for rank 0"


def broadcast_configuration(rank: int) -> None:
    device = unisono.get_device()
    configuration = torch.zeros(3, device=device)
    if rank == 0:
        configuration = torch.tensor([1.0, 2.0, 3.0], device=device)
    unisono.broadcast_tensor(configuration, src=0)
    assert configuration.tolist() == [1, 2, 3], f"rank {rank} has {configuration.tolist()}"


def all_of_them() -> None:
    rank, size = unisono.get_rank(), unisono.get_world_size()
    reduce_losses(rank, size)
    gather_predictions(rank, size)
    broadcast_configuration(rank)
    unisono.barrier()  # no rank goes on before all are here


def main() -> None:
    comm = unisono.init()
    assert (unisono.get_rank(), unisono.get_world_size()) == (comm.rank, comm.size)
    assert unisono.is_main_process() == (comm.rank == 0)
    assert unisono.is_distributed() == (comm.size > 1)
    all_of_them()
    unisono.shutdown()
    if comm.size == 1:
        all_of_them()  # a program of one process need not start anything


if __name__ == "__main__":
    main()
