"""`unisono.bench.measure`: rows in a program, alone or in a world, and verdicts by earlier runs."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

import unisono
from unisono.bench.forecast import SCHEMA, KeptModels, cache_folder
from unisono.bench.results import Row, Run
from unisono.bench.settings import BenchSettings
from unisono.bench.statistics import Summary
from unisono.bench.text import summary
from user_programs import run_python, write_program

SETTINGS = BenchSettings(2, ("all_reduce",), (8,), ("unisono",))


def row(size_bytes: int, time_us: float, **changes: object) -> Row:
    """A row as a run would have measured it."""
    times = {field.name: time_us for field in dataclasses.fields(Summary)}
    usual = Row(
        collective="all_reduce",
        size_bytes=size_bytes,
        count=size_bytes // 4,
        dtype="float32",
        op="sum",
        root=-1,
        place="in",
        backend="unisono",
        ranks=2,
        time_us=Summary(**times),
        skew_us=0.0,
        transfer_us=0.0,
        algbw=1.0,
        busbw=1.0,
        wrong=0,
        floor_us=None,
        expected_us=None,
        calibrates=True,
        samples=5,
        calls_per_sample=1,
        disturbed_share=0.0,
    )
    return dataclasses.replace(usual, **changes)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# -- rows in a program -----------------------------------------------------------------------------


def test_naming_it_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, unisono; unisono.bench.measure; print({'torch', 'numpy'} & {*sys.modules})"
    assert run_python("-c", code).stdout == "set()\n"


@pytest.mark.slow
def test_a_program_alone_has_ranks_started_for_it(tmp_path: Path, cache: Path) -> None:
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
        print(again["place"], again["time_us"]["p50"] > 0, again["verdict"])
        """,
    )
    result = run_python(program.path, environment={"UNISONO_CACHE": str(cache)})
    assert result.stderr == ""
    rows, said, values = result.stdout.splitlines()
    assert rows == str([("all_reduce", 64, 2, 0), ("all_reduce", 4096, 2, 0), ("barrier", 0, 2, 0)])
    assert said == "(0, 3, 'all_reduce of 64 bytes') (3, 3, '')"
    assert values == "in True calibrates"
    (file,) = (cache / "bench").iterdir()  # and what says enough is kept
    assert '"barrier, gloo' in file.read_text()
    assert "all_reduce" not in file.read_text()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_a_world_is_measured_as_it_is(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    comm = unisono.init(backend)
    before = torch.get_num_threads(), dict(os.environ)
    for _ in range(2):
        said: list[tuple[int, int, str]] = []
        rows = unisono.bench.measure(
            "all_reduce",
            sizes="1K",
            budget_s=0.01,
            fresh=True,
            progress=lambda *what: said.append(what),  # noqa: B023
        )
        heard = [(0, 1, "all_reduce of 1024 bytes"), (1, 1, "")]
        assert said == (heard if comm.rank == 0 else [])
        kinds = [(row.backend, row.ranks, row.size_bytes, row.wrong) for row in rows]
        assert kinds == [("unisono", 2, 1024, 0), ("gloo", 2, 1024, 0)]
    everyone = unisono.all_gather_object([row.time_us.p50 for row in rows])
    assert everyone[0] == everyone[1]  # the same rows on every rank
    assert (torch.get_num_threads(), dict(os.environ)) == before
    with pytest.raises(ValueError, match="one of 2 ranks already"):
        unisono.bench.measure("all_reduce", ranks=3)
    assert unisono.get_world() is comm  # it goes on
    assert unisono.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
    unisono.shutdown()


@pytest.mark.ranks(2)
def test_ranks_that_have_not_met_meet_for_it() -> None:
    run = unisono.bench.measure_run("barrier", backends=["unisono"], budget_s=0.01, fresh=True)
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
        ({"place": "nowhere"}, "there is no place nowhere: choose from natural"),
        ({"root": 7, "ranks": 2}, "root 7 is not a rank"),
        ({"budget_s": 0}, "a row needs more than 0 s"),
        ({"ranks": 0}, "0 ranks measure nothing"),
    ],
)
def test_what_cannot_be_met_is_a_value_error(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        unisono.bench.measure("all_reduce", **arguments)  # type: ignore[arg-type]


# -- models of earlier runs ------------------------------------------------------------------------


def test_what_is_kept_serves_later_runs(cache: Path) -> None:
    kept = KeptModels(SETTINGS)
    assert kept.model(row(64, 1.0)) is None
    kept.keep([row(8, 1.0), row(4096, 2.0), row(1 << 20, 900.0)])
    later = KeptModels(SETTINGS)
    found = later.model(row(4096, 1.0))
    assert found is not None
    model, origin = found
    assert model.predict_s(4096) == pytest.approx(2e-6)
    assert f"unisono {unisono.__version__}" in origin
    assert later.path.is_relative_to(cache)
    document = json.loads(later.path.read_text())
    assert document["schema"] == SCHEMA
    assert [*document["series"]] == ["all_reduce, unisono, float32, sum, in place, max of ranks"]
    assert [file.name for file in later.path.parent.iterdir()] == [later.path.name]
    for other in (
        row(1 << 30, 1.0),  # far beyond what was measured
        row(64, 1.0, dtype="float64"),
        row(64, 1.0, place="out"),
        row(64, 1.0, backend="gloo"),
    ):
        assert later.model(other) is None
    assert KeptModels(dataclasses.replace(SETTINGS, ranks=3)).model(row(64, 1.0)) is None


def test_what_says_little_is_not_kept(cache: Path) -> None:
    kept = KeptModels(SETTINGS)
    kept.keep([row(8, 1.0), row(4096, 2.0)])  # too few sizes
    sizes = (8, 4096, 1 << 20)
    kept.keep([row(size, 1.0 + size, disturbed_share=0.9) for size in sizes])
    kept.keep([row(size, 1.0 + size, wrong=1) for size in sizes])
    assert not kept.path.exists()
    kept.keep([row(0, 3.0, collective="barrier")])  # which has no sizes
    assert KeptModels(SETTINGS).model(row(0, 3.0, collective="barrier")) is not None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "other"}', '{"schema": "unisono-bench-models/1"}', "\0"]
)
def test_a_damaged_file_is_replaced(cache: Path, text: str) -> None:
    kept = KeptModels(SETTINGS)
    kept.path.parent.mkdir(parents=True)
    kept.path.write_text(text)
    assert KeptModels(SETTINGS).model(row(64, 1.0)) is None
    kept.keep([row(size, 1.0 + size) for size in (8, 4096, 1 << 20)])
    assert KeptModels(SETTINGS).model(row(64, 1.0)) is not None


def test_a_folder_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.delenv("UNISONO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache_folder() == str(tmp_path / "file" / "unisono")
    KeptModels(SETTINGS).keep([row(size, 1.0 + size) for size in (8, 4096, 1 << 20)])


@pytest.mark.ranks(2)
def test_a_single_size_has_a_verdict_by_an_earlier_run(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(shared_tmp_path))
    comm = unisono.init()
    if comm.rank == 0:
        KeptModels(SETTINGS).keep([row(size, 1e-3) for size in (8, 4096, 1 << 20)])
    comm.barrier()

    def measure(fresh: bool) -> Run:
        usual = {"sizes": 4096, "backends": "unisono", "budget_s": 0.01}
        return unisono.bench.measure_run("all_reduce", fresh=fresh, **usual)

    run = measure(fresh=False)
    (found,) = run.rows
    assert found.verdict.startswith("slow by ")  # 1 ns was expected
    assert found.expected_from.endswith(f"unisono {unisono.__version__}")
    assert f"expected times by a model of an earlier run here: {found.expected_from}" in summary(
        run
    )
    assert Row.from_dict(found.as_dict()) == found
    assert not run.held_out_error  # which is of this run's own model
    (found,) = measure(fresh=True).rows
    assert (found.verdict, found.expected_from) == ("calibrates", "")
    unisono.shutdown()
