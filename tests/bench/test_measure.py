"""`unisono.bench.measure`: rows in a program, alone or in a world."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import unisono
from user_programs import run_python, write_program


def test_naming_it_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, unisono; unisono.bench.measure; print({'torch', 'numpy'} & {*sys.modules})"
    assert run_python("-c", code).stdout == "set()\n"


@pytest.mark.slow
def test_a_program_alone_has_ranks_started_for_it(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        """
        import unisono

        said = []
        rows = unisono.bench.measure(
            "all_reduce", "barrier", sizes=[64, "4K"], ranks=2, backends="gloo", budget_s=0.02,
            progress=lambda *what: said.append(what))
        print([(row.collective, row.size_bytes, row.ranks, row.wrong) for row in rows])
        print(said[0], said[-1])
        again = rows[0].as_dict()
        print(again["op"], again["time_us"]["p50"] > 0, again["verdict"])
        """,
    )
    result = run_python(program.path)
    assert result.stderr == ""
    rows, said, values = result.stdout.splitlines()
    assert rows == str([("all_reduce", 64, 2, 0), ("all_reduce", 4096, 2, 0), ("barrier", 0, 2, 0)])
    assert said == "(0, 3, 'all_reduce of 64 bytes') (3, 3, '')"
    assert values == "sum True "


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_a_world_is_measured_as_it_is(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    comm = unisono.init(backend)
    before = torch.get_num_threads(), dict(os.environ)
    descriptors = []
    for _ in range(3):
        said: list[tuple[int, int, str]] = []
        rows = unisono.bench.measure(
            "all_reduce",
            sizes="1K",
            budget_s=0.01,
            progress=lambda *what: said.append(what),  # noqa: B023
        )
        heard = [(0, 1, "all_reduce of 1024 bytes"), (1, 1, "")]
        assert said == (heard if comm.rank == 0 else [])
        kinds = [(row.backend, row.ranks, row.size_bytes, row.wrong) for row in rows]
        assert kinds == [("unisono", 2, 1024, 0), ("gloo", 2, 1024, 0)]
        descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[1] == descriptors[2]  # the first call may leave some for the next
    everyone = unisono.all_gather_object([row.time_us.p50 for row in rows])
    assert everyone[0] == everyone[1]  # the same rows on every rank
    assert (torch.get_num_threads(), dict(os.environ)) == before
    with pytest.raises(ValueError, match="one of 2 ranks: leave out"):
        unisono.bench.measure("all_reduce", ranks=3)
    assert unisono.get_world() is comm  # the group stays usable
    assert unisono.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
    unisono.shutdown()


@pytest.mark.ranks(2)
def test_ranks_that_have_not_met_meet_for_it() -> None:
    run = unisono.bench.measure_run("barrier", backends=["unisono"], budget_s=0.01)
    assert run.finished
    assert run.settings["ranks"] == 2
    with pytest.raises(unisono.UnisonoError, match="not initialised"):
        unisono.get_world()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"sizes": "big"}, "'big' is not a size"),
        ({"sizes": []}, "the smallest size is 1 byte"),
        ({"backends": ["glue"]}, "there is no backend glue"),
        ({"device": "tpu"}, "there is no device tpu: choose from cpu, cuda"),
        ({"root": 7, "ranks": 2}, "root.*7"),
        ({"budget_s": 0}, "must be more than 0 s"),
        ({"ranks": 0}, "cannot measure on 0 ranks"),
    ],
)
def test_what_cannot_be_met_is_a_value_error(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        unisono.bench.measure("all_reduce", **arguments)  # type: ignore[arg-type]
