"""A solution of chapter 16's exercises."""


def bytes_per_parameter(ranks: int, zero: int) -> float:
    return sum(size / ranks if zero >= stage else size for size, stage in ((2, 3), (2, 2), (12, 1)))


def micro_batches(sequences: int, held_gb: float, gb_per_sequence: float, memory_gb: float) -> int:
    for number in range(1, sequences + 1):
        at_once = sequences / number
        if sequences % number == 0 and held_gb + at_once * gb_per_sequence <= memory_gb:
            return number
    return 0
