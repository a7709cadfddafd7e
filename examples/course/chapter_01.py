"""A solution of chapter 1's exercise."""


def my_share(items: list[int], rank: int, size: int) -> list[int]:
    length, longer = divmod(len(items), size)
    begin = rank * length + min(rank, longer)
    return items[begin : begin + length + (rank < longer)]
