"""A solution of chapter 1's exercises."""


def every_size_th(items: list[int], rank: int, size: int) -> list[int]:
    return items[rank::size]


def my_share(items: list[int], rank: int, size: int) -> list[int]:
    length, longer = divmod(len(items), size)
    begin = rank * length + min(rank, longer)
    return items[begin : begin + length + (rank < longer)]
