"""Communication while a rank computes: isend and irecv, and an asynchronous all_reduce.

The rule: do not touch the tensors of an operation until `wait()` returns. A second backward() adds
to .grad, so it must not run while that .grad is being reduced; work on other tensors may. `wait()`
raises the errors of the operation.

    unisono run -n 2 examples/overlap.py
"""

import torch

import unisono


def compute(rounds: int) -> torch.Tensor:
    """Work that does not touch the tensors in flight."""
    matrix = torch.eye(64) * 0.5 + 0.01
    for _ in range(rounds):
        matrix = torch.tanh(matrix @ matrix)
    return matrix


def chain(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[100, 200] from rank to rank, each in the middle doubling it; computing while it travels."""
    data = torch.tensor([100.0, 200.0]) if rank == 0 else torch.empty(2)
    arriving = unisono.irecv(data, src=rank - 1) if rank > 0 else None
    computed = compute(5)
    if arriving is not None:
        arriving.wait()  # only now may `data` be read
        if rank < size - 1:
            data *= 2
    leaving = unisono.isend(data, dst=rank + 1) if rank < size - 1 else None
    computed += compute(5)
    if leaving is not None:
        leaving.wait()  # only now might `data` be written to
    return data, computed


def two_layers(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of one layer is reduced while the next one's is computed."""
    of_last_layer = torch.full((1000,), rank + 1.0)
    work = unisono.all_reduce(of_last_layer, "mean", async_op=True)
    compute(5)  # what backward does for the first layer: it touches other tensors
    of_first_layer = torch.full((1000,), 10.0 * rank)
    second = unisono.all_reduce(of_first_layer, "mean", async_op=True)
    return work.wait(), second.wait()


def main() -> None:
    comm = unisono.init()
    data, computed = chain(comm.rank, comm.size)
    doublings = min(comm.rank, max(0, comm.size - 2))
    expected = [100.0 * 2**doublings, 200.0 * 2**doublings]
    assert data.tolist() == expected, f"rank {comm.rank} has {data.tolist()}, not {expected}"
    assert torch.equal(computed, 2 * compute(5)), "what was computed meanwhile is wrong"

    last, first = two_layers(comm.rank)
    mean_rank = (comm.size - 1) / 2
    assert last.eq(mean_rank + 1).all(), f"the last layer's mean is {last[0]}, not {mean_rank + 1}"
    assert first.eq(10 * mean_rank).all(), f"the first layer's mean is {first[0]}"
    if comm.rank == comm.size - 1:
        print(f"the end of the chain has {data.tolist()}; both layers' gradients are averaged")
    unisono.shutdown()


if __name__ == "__main__":
    main()
