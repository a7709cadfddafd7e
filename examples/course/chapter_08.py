"""A solution of chapter 8's exercises."""

from unisono import Communicator


def my_half(comm: Communicator) -> Communicator:
    return comm.split(list(range(comm.rank % 2, comm.size, 2)))


def layout(size: int, tp: int, pp: int) -> dict[str, list[list[int]]]:
    dp = size // tp // pp
    rank = [[[t + tp * (p + pp * d) for t in range(tp)] for p in range(pp)] for d in range(dp)]
    return {
        "tp": [rank[d][p] for d in range(dp) for p in range(pp)],
        "pp": [[rank[d][p][t] for p in range(pp)] for d in range(dp) for t in range(tp)],
        "dp": [[rank[d][p][t] for d in range(dp)] for p in range(pp) for t in range(tp)],
    }
