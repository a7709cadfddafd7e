"""A solution of chapter 8's exercise."""


def layout(size: int, tp: int, pp: int) -> dict[str, list[list[int]]]:
    dp = size // tp // pp
    rank = [[[t + tp * (d + dp * p) for t in range(tp)] for d in range(dp)] for p in range(pp)]
    return {
        "tp": [rank[p][d] for p in range(pp) for d in range(dp)],
        "dp": [[rank[p][d][t] for d in range(dp)] for p in range(pp) for t in range(tp)],
        "pp": [[rank[p][d][t] for p in range(pp)] for d in range(dp) for t in range(tp)],
    }
