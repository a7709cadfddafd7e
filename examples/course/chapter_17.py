"""A solution of chapter 17's exercises."""


def is_bound_by_memory(
    rows: int, inner: int, columns: int, flops_per_s: float, bytes_per_s: float
) -> bool:
    moved = 2 * (rows * inner + inner * columns + rows * columns)
    return moved / bytes_per_s > 2 * rows * inner * columns / flops_per_s


def largest_tp(computing_s: float, wire_s: float, most: int) -> int:
    tp = 1
    while 2 * tp <= most and computing_s / (2 * tp) >= wire_s * 2 * (2 * tp - 1) / (2 * tp):
        tp *= 2
    return tp
