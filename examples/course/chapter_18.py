"""A solution of chapter 18's exercises."""


def is_inside_a_node(tp: int, node_size: int) -> bool:
    return node_size % tp == 0


def choose(
    ranks: int, node_size: int, layers: int, fits: dict[tuple[int, int], bool]
) -> tuple[int, int, int]:
    pairs = [
        (tp * pp, pp, tp)
        for (tp, pp), it_fits in fits.items()
        if it_fits and is_inside_a_node(tp, node_size)
        if ranks % (tp * pp) == 0 and layers % pp == 0
    ]
    if not pairs:
        raise ValueError("nothing fits")
    size, pp, tp = min(pairs)
    return tp, pp, ranks // size
