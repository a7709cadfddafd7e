"""Two ranks that both send first: the deadlock is detected, explained and fixed.

A blocking send waits for its receiver. If both ranks send first, both wait forever: with torch on
NCCL the program hangs, on gloo it works until the tensors grow. unisono raises DeadlockError on
both, with the line of each. The group is unusable afterwards; others, such as the world, go on.

    unisono run -n 2 examples/deadlock.py
"""

import torch

import unisono


def wrong(pair: unisono.Communicator, mine: torch.Tensor) -> None:
    """Each sends, then receives."""
    other = 1 - pair.rank
    unisono.send(mine, dst=other, group=pair)
    unisono.recv(torch.empty_like(mine), src=other, group=pair)


def right(pair: unisono.Communicator, mine: torch.Tensor) -> torch.Tensor:
    """One sends first, the other receives first."""
    received = torch.empty_like(mine)
    if pair.rank == 0:
        unisono.send(mine, dst=1, group=pair)
        unisono.recv(received, src=1, group=pair)
    else:
        unisono.recv(received, src=0, group=pair)
        unisono.send(mine, dst=0, group=pair)
    return received


def either_order(pair: unisono.Communicator, mine: torch.Tensor) -> torch.Tensor:
    """isend returns at once, so both may send first."""
    received = torch.empty_like(mine)
    leaving = unisono.isend(mine, dst=1 - pair.rank, group=pair)
    unisono.recv(received, src=1 - pair.rank, group=pair)
    leaving.wait()
    return received


def provoke(comm: unisono.Communicator, mine: torch.Tensor) -> str:
    """Run the wrong order, and return what happened."""
    if comm.backend != "unisono":
        return f"on {comm.backend} nobody would notice before the deadline: left out"
    pair = comm.split([0, 1])  # a separate group, because the deadlock ends it
    assert pair is not None
    found = None
    try:
        wrong(pair, mine)
    except unisono.DeadlockError as error:
        found = error
    assert found is not None, "the circle was not found"
    assert sorted(found.cycle) == [0, 1], f"the circle is {found.cycle}"
    return f"found: {found}"


def main() -> None:
    comm = unisono.init()
    if comm.size == 1:
        print("one rank has nobody to block: start at least two")
    elif comm.rank < 2:
        mine = torch.tensor([1.0, 2.0]) + 10 * comm.rank
        theirs = torch.tensor([1.0, 2.0]) + 10 * (1 - comm.rank)
        found = provoke(comm, mine)
        if comm.rank == 0:
            print(found)
        pair = comm.split([0, 1])
        assert pair is not None
        for exchange in (right, either_order):
            received = exchange(pair, mine)
            assert torch.equal(received, theirs), f"{exchange.__name__}: {received}"
        if comm.rank == 0:
            print("in the right order, and with isend, both got the other's numbers")
    unisono.barrier()  # the world still works
    unisono.shutdown()


if __name__ == "__main__":
    main()
