"""Chapters 16 to 18: memory, the roofline of communication, layouts."""

from typing import Any

from unisono.learn.checks.requirements import require, require_equal

Exercise = Any


def bytes_per_parameter(exercise: Exercise) -> None:
    """Stage 1 divides 12 of the 16 bytes by the number of ranks, stage 2 14, stage 3 all."""
    for ranks in (1, 8):
        for zero, divided in enumerate((0, 12, 14, 16)):
            got = float(exercise.bytes_per_parameter(ranks, zero))
            expected = 16 - divided + divided / ranks
            require_equal(got, expected, f"bytes_per_parameter({ranks}, {zero})")


def micro_batches(exercise: Exercise) -> None:
    """Try 1, 2, 3, ... and take the first that divides the sequences and fits."""
    for case, expected in (
        ((8, 40.0, 20.0, 80.0), 4),
        ((8, 40.0, 5.0, 80.0), 1),
        ((6, 40.0, 9.0, 80.0), 2),
        ((6, 40.0, 25.0, 80.0), 6),
        ((8, 79.0, 20.0, 80.0), 0),
    ):
        require_equal(exercise.micro_batches(*case), expected, f"micro_batches{case}")


def is_bound_by_memory(exercise: Exercise) -> None:
    """Compare 2 * rows * inner * columns / flops_per_s with the bytes of all three matrices /
    bytes_per_s."""
    for case, expected in (
        ((1, 8192, 8192, 1e15, 3e12), True),
        ((8192, 8192, 8192, 1e15, 3e12), False),
        ((64, 64, 8192, 1e12, 1e11), False),
        ((64, 64, 8192, 1e13, 1e11), True),
    ):
        require_equal(exercise.is_bound_by_memory(*case), expected, f"is_bound_by_memory{case}")


def largest_tp(exercise: Exercise) -> None:
    """Double tp as long as computing_s / tp is at least wire_s * 2 * (tp - 1) / tp."""
    for case, expected in (((10.0, 1.0, 8), 4), ((100.0, 1.0, 8), 8), ((1.0, 1.0, 8), 1)):
        require_equal(exercise.largest_tp(*case), expected, f"largest_tp{case}")


def is_inside_a_node(exercise: Exercise) -> None:
    """Groups of tp neighbours begin at multiples of tp: the node must be such a multiple, too."""
    for tp, node, expected in ((8, 8, True), (16, 8, False), (2, 8, True), (3, 8, False)):
        got = exercise.is_inside_a_node(tp, node)
        require_equal(got, expected, f"is_inside_a_node({tp}, {node})")


def choose(exercise: Exercise) -> None:
    """dp is ranks // (tp * pp): most dp is the smallest tp * pp."""
    fits = {(1, 1): False, (8, 2): True, (4, 4): True, (16, 1): True, (3, 1): True, (8, 5): True}
    require_equal(exercise.choose(64, 8, 32, fits), (8, 2, 4), f"choose(64, 8, 32, {fits})")
    only = {(2, 3): True, (2, 4): True}
    require_equal(exercise.choose(24, 8, 32, only), (2, 4, 3), f"choose(24, 8, 32, {only})")
    try:
        got = exercise.choose(64, 8, 32, {(1, 1): False})
    except ValueError:
        return
    require(False, f"choose returned {got} where nothing fits, and should raise ValueError")
