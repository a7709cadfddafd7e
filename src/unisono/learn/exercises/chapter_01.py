"""Chapter 1: which items are mine?"""


def my_share(items: list[int], rank: int, size: int) -> list[int]:
    """Return the items that this rank works on.

    The shares of all ranks, joined in the order of the ranks, are the items. No share is more
    than one item longer than another, also where the ranks do not divide the number of items.
    """
    raise NotImplementedError
