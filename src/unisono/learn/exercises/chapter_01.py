"""1. Ranks"""


def my_share(items: list[int], rank: int, size: int) -> list[int]:
    """Return the items that this rank works on.

    The shares of all ranks, joined in rank order, are the items. No share is more than one item
    longer than another, even if the number of items is not a multiple of `size`.
    """
    raise NotImplementedError
