"""8. Groups"""


def layout(size: int, tp: int, pp: int) -> dict[str, list[list[int]]]:
    """Return the groups of "tp", "dp" and "pp", each a list of lists of ranks, in rank order.

    Ranks of a tp group are neighbours, stages of a pipeline are as far apart as possible, and dp
    has what remains. With 8 ranks, tp=2 and pp=2:

        tp  [0, 1] [2, 3] [4, 5] [6, 7]
        dp  [0, 2] [1, 3] [4, 6] [5, 7]
        pp  [0, 4] [1, 5] [2, 6] [3, 7]
    """
    raise NotImplementedError
