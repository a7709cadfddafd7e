"""`unisono bench --compare-untuned`: with the table and without it, and where that matters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuning_tables import table, write_table
from unisono import Communicator, bench
from unisono.bench import tuned
from unisono.bench.request import Request
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator


@pytest.mark.ranks(2)
def test_both_are_measured_and_only_rows_that_go_another_way_are_compared(
    comm: Communicator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(comm, SharedMemoryCommunicator)
    sizes = comm.default_tuning | {"all_reduce_turn": 8192}
    path = write_table(tmp_path, table(comm.size, comm.is_crowded, sizes))
    for tuning, differing in ((path, 1), ("off", 0)):
        monkeypatch.setenv("UNISONO_TUNING", tuning)
        run = bench.measure_run(
            "all_reduce",
            sizes="1K,256K",
            backends="unisono",
            untuned=True,
            budget_s=0.02,
            floor=False,
            fresh=True,
        )
        names = [row.backend for row in run.in_order]
        assert names == ["unisono", "unisono:untuned"] * 2
        assert not run.wrong
        assert len(tuned.changes(run)) == 2
        last = tuned.lines(run)[-1]
        if differing:
            assert last.startswith("the table sends 1 of 2 rows another way")
            assert run.machine["tuning"]["tuned"] == sizes
        else:
            assert last.startswith("there is no tuning table here")


def test_without_unisono_there_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="name it, too"):
        Request(collectives="all_reduce", backends="gloo", untuned=True).settings(None)
