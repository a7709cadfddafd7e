"""A ring: every rank sends to the next one and receives from the one before it, all at once.

With blocking calls one rank would have to receive first; a batch has no order that could block.
After as many shifts as there are ranks, every rank has its own data again. Ring attention passes
keys and values around in this way.

    unisono run -n 4 examples/ring_shift.py
"""

import torch

import unisono
from unisono import Message


def shift(comm: unisono.Communicator, data: torch.Tensor) -> torch.Tensor:
    """The data of the rank before this one."""
    if comm.size == 1:
        return data.clone()  # the rank before the only one is itself
    received = torch.empty_like(data)
    messages = [Message("send", data, comm.next), Message("recv", received, comm.prev)]
    for work in unisono.batch_isend_irecv(messages):
        work.wait()  # do not touch the tensors before
    return received


def main() -> None:
    comm = unisono.init()
    mine = torch.tensor([comm.rank, 10 * comm.rank])
    data, seen = mine, mine.clone()
    for step in range(1, comm.size + 1):
        data = shift(comm, data)
        origin = (comm.rank - step) % comm.size
        expected = [origin, 10 * origin]
        assert data.tolist() == expected, (
            f"after {step} shifts rank {comm.rank} has {data.tolist()}, not {expected}"
        )
        if step < comm.size:
            seen += data
    total = sum(range(comm.size))
    assert seen.tolist() == [total, 10 * total], f"rank {comm.rank} did not see all: {seen}"
    if comm.rank == 0:
        print(f"{comm.size} shifts brought every rank's data to every rank, and back home")
    unisono.shutdown()


if __name__ == "__main__":
    main()
