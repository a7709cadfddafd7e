"""Every collective with every reduction, dtype and layout, through torch.distributed.

The expected result is computed with Python's own numbers (torch_parity/arithmetic.py). An undefined
combination raises on every rank, and the group continues with the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from torch_parity.calls import check_call
from torch_parity.matrix import MOVING, REDUCING, Case, cases

EVERY_COLLECTIVE = (*REDUCING, *MOVING)


def check(chosen: Iterable[Case], async_op: bool = False) -> None:
    """Run them all; the failures, if any, are listed together."""
    failures = []
    for case in chosen:
        try:
            check_call(case, async_op)
        except (TypeError, ValueError) as error:
            if case.has_meaning or not str(error):
                failures.append(f"{case}: {error!r}")
        except AssertionError as error:
            failures.append(f"{case}: {error!r}")
        else:
            if not case.has_meaning:
                failures.append(f"{case}: was accepted")
    assert not failures, f"{len(failures)} cases failed:\n" + "\n".join(failures[:20])


@pytest.mark.slow
@pytest.mark.ranks(3)
@pytest.mark.parametrize("collective", EVERY_COLLECTIVE)
def test_every_reduction_dtype_and_layout(process_group: Any, collective: str) -> None:
    check(cases((collective,)))


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_every_one_on_two_ranks(process_group: Any) -> None:
    check(cases())


@pytest.mark.ranks([2, 4])
@pytest.mark.parametrize("collective", EVERY_COLLECTIVE)
def test_a_sample_on_two_and_four_ranks(process_group: Any, collective: str) -> None:
    check(list(cases((collective,)))[::5])


@pytest.mark.ranks(3)
@pytest.mark.parametrize("collective", EVERY_COLLECTIVE)
def test_a_sample_of_works(process_group: Any, collective: str) -> None:
    check(list(cases((collective,)))[::7], async_op=True)


@pytest.mark.ranks(1)
def test_a_group_of_one_gives_what_larger_ones_give(process_group: Any) -> None:
    check(case for case in cases() if case.collective != "send_recv")
