"""The model of expected times: exact for data of its own form, close elsewhere."""

from __future__ import annotations

from itertools import pairwise

import pytest

from unisono.plan.predict import calibration_sizes, fit, mean_absolute_error

SIZES = tuple(8 * 2**power for power in range(26))
CACHES = (64 << 10, 1 << 20, 32 << 20)


def machine_s(size: int) -> float:
    """A machine with a latency of 1 us and three caches, with the steepest drop after the last."""
    ns_per_byte = 0.05 if size <= CACHES[0] else 0.1 if size <= CACHES[2] else 0.4
    return 1e-6 + size * ns_per_byte * 1e-9


def test_a_straight_line_is_found_from_two_points() -> None:
    model = fit({8: 2e-6 + 8e-9, 1 << 20: 2e-6 + (1 << 20) * 1e-9})
    assert model.latency_s == pytest.approx(2e-6)
    for size in SIZES:
        assert model.predict_s(size) == pytest.approx(2e-6 + size * 1e-9, rel=1e-6)


def test_held_out_sizes_of_a_machine_with_caches() -> None:
    chosen = calibration_sizes(SIZES, CACHES)
    model = fit({size: machine_s(size) for size in chosen})
    held_out = [size for size in SIZES if size not in chosen]
    error = mean_absolute_error([(model.predict_s(size), machine_s(size)) for size in held_out])
    assert len(held_out) > len(SIZES) / 2
    assert error < 0.10


def test_a_byte_costs_what_its_regime_does_without_the_latency() -> None:
    model = fit({size: machine_s(size) for size in (8, 4096, 256 << 10, 256 << 20)})
    assert model.cost_s_per_byte(256 << 10) == pytest.approx(0.1e-9, rel=1e-3)
    assert model.cost_s_per_byte(256 << 20) == pytest.approx(0.4e-9, rel=1e-3)


def test_a_first_point_that_is_slower_than_a_later_one_is_no_latency() -> None:
    model = fit({8: 5e-3, 1024: 1e-3, 1 << 20: 2e-3})
    assert model.latency_s <= 1e-3
    assert model.predict_s(1 << 20) == pytest.approx(2e-3)


def test_calibration_sizes() -> None:
    chosen = calibration_sizes(SIZES, CACHES)
    assert {SIZES[0], SIZES[-1], *CACHES} <= set(chosen) <= set(SIZES)
    gaps = [high / low for low, high in pairwise(chosen)]
    assert max(gaps) <= 24
    assert calibration_sizes([64]) == (64,)
    assert calibration_sizes([0]) == (0,)
    assert calibration_sizes([]) == ()
    assert calibration_sizes([8, 1 << 30]) == (8, 1 << 30)  # there is nothing in between


def test_what_has_no_size_is_all_latency() -> None:
    assert fit({0: 3e-6}).predict_s(0) == 3e-6


def test_mean_absolute_error() -> None:
    assert mean_absolute_error([(1.1, 1.0), (1.6, 2.0)]) == pytest.approx(0.15)


@pytest.mark.parametrize("times_s", [{}, {8: 0.0}, {8: -1.0}])
def test_times_that_cannot_be(times_s: dict[int, float]) -> None:
    with pytest.raises(ValueError, match=r"a fit needs|above zero"):
        fit(times_s)
