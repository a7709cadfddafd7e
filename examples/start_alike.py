"""The same start on every rank: rank 0's parameters and buffers, and one random seed.

unisono run -n 4 examples/start_alike.py
"""

import torch
from torch import nn

import unisono
from unisono.training import sync_seed


def sync_parameters(model: nn.Module) -> None:
    """Rank 0's state on every rank: parameters and buffers, in place and together."""
    unisono.broadcast(model.state_dict(), src=0)


def model_of(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model(torch.randn(7, 3))  # leaves different running means on each rank
    return model


def main() -> None:
    comm = unisono.init()
    model = model_of(comm.rank)
    sync_parameters(model)
    for (name, ours), expected in zip(
        model.state_dict().items(), model_of(0).state_dict().values(), strict=True
    ):
        assert torch.equal(ours, expected), f"rank {comm.rank}: {name} is not rank 0's"

    seed = sync_seed()  # rank 0 draws one; sync_seed(42) gives a fixed one
    order = torch.randperm(10).tolist()  # the same shuffle everywhere
    torch.manual_seed(seed)
    expected_order = torch.randperm(10).tolist()
    assert order == expected_order, f"seed {seed} does not lead to {order}"
    orders = unisono.all_gather_object(order)
    assert orders == [order] * comm.size, f"the ranks shuffle differently: {orders}"

    torch.manual_seed(seed + comm.rank)  # a different one per rank, for dropout and the like
    noise = unisono.all_gather(torch.rand(4))
    assert len({tuple(numbers.tolist()) for numbers in noise}) == comm.size, (
        "two ranks draw the same"
    )
    if comm.rank == 0:
        print(f"parameters of rank 0 and seed {seed} on {comm.size} ranks; order {order}")
    unisono.shutdown()


if __name__ == "__main__":
    main()
