"""`unisono demo`: pictures of what real ranks had and have, which it checks itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import unisono
from unisono.cli import main
from unisono.comm.communicator import Communicator
from unisono.demo import drawing, scenes
from unisono.demo.scenes import SCENES, RankOutcome
from unisono.errors import UnisonoError


@pytest.fixture(scope="module")
def outcomes() -> list[RankOutcome]:
    return unisono.launch(scenes.run_all_scenes, 4, threads=1)


def number_of(title: str) -> int:
    return next(number for number, scene in enumerate(SCENES) if scene.title == title)


def rows(outcomes: list[RankOutcome], title: str) -> list[tuple[float, ...]]:
    return [outcome.rows[number_of(title)][1] for outcome in outcomes]


def test_the_numbers_of_the_course(outcomes: list[RankOutcome]) -> None:
    whole = [(6, 10, 14, 18)] * 4
    assert rows(outcomes, "all_reduce (sum)") == whole
    assert rows(outcomes, "reduce_scatter (sum)") == [(6,), (10,), (14,), (18,)]
    assert rows(outcomes, "all_gather of these sums") == whole


@pytest.mark.ranks([2, 3, 8])
def test_any_number_of_ranks_passes_its_own_check(comm: Any, shared_tmp_path: Path) -> None:
    import pickle

    mine = scenes.run_scenes(comm)
    (shared_tmp_path / str(comm.rank)).write_bytes(pickle.dumps(mine))
    comm.barrier()
    all_ranks = [
        pickle.loads((shared_tmp_path / str(rank)).read_bytes()) for rank in range(comm.size)
    ]
    scenes.check(all_ranks)
    for number in range(len(SCENES)):
        picture = list(drawing.draw(number, all_ranks))
        assert all(line.cell_len <= 80 for line in picture), picture[0].plain


def test_every_wrong_number_is_found(outcomes: list[RankOutcome]) -> None:
    scenes.check(outcomes)
    tried = 0
    for rank in range(4):
        for number, scene in enumerate(SCENES):
            before, after = outcomes[rank].rows[number]
            for index in range(len(after)):
                wrong = (*after[:index], after[index] + 1, *after[index + 1 :])
                changed = list(outcomes[rank].rows)
                changed[number] = (before, wrong)
                spoiled = list(outcomes)
                spoiled[rank] = replace(outcomes[rank], rows=tuple(changed))
                with pytest.raises(UnisonoError, match=f"rank {rank} has"):
                    scenes.check(spoiled)
                tried += scene is not None
    assert tried > 60


def test_a_fault_without_an_error_is_a_failure(outcomes: list[RankOutcome]) -> None:
    for change in ({"deadlock": None}, {"mismatch": None}):
        with pytest.raises(UnisonoError, match="rank 1 should have an error"):
            scenes.check([outcomes[0], replace(outcomes[1], **change), *outcomes[2:]])


def test_a_picture_shows_values_and_owners(outcomes: list[RankOutcome]) -> None:
    picture = list(drawing.draw(number_of("all_to_all"), outcomes))
    assert [line.plain for line in picture[1:]] == [
        "  rank 0  │  0  1  2  3│ ─┐ ┌─→ │  0 10 20 30│",
        "  rank 1  │ 10 11 12 13│ ─┼─┼─→ │  1 11 21 31│",
        "  rank 2  │ 20 21 22 23│ ─┼─┼─→ │  2 12 22 32│",
        "  rank 3  │ 30 31 32 33│ ─┘ └─→ │  3 13 23 33│",
    ]
    colours = [str(span.style) for span in picture[1].spans]
    own, others = f"black on {drawing.COLOURS[0]}", [f"black on {c}" for c in drawing.COLOURS[:4]]
    assert colours == [own] * 4 + others


def test_the_faults_name_the_lines_that_are_shown(outcomes: list[RankOutcome]) -> None:
    text = "\n".join(line.plain for line in drawing.draw_all(outcomes))
    assert "2  group.send(numbers, other)" in text
    assert "rank 1: send to rank 0 (tag 0) at both_send.py:2" in text
    assert "rank 3: all_reduce of float64, 5 elements, sum at one_too_many.py:2" in text


def test_ascii_alone(outcomes: list[RankOutcome]) -> None:
    for line in drawing.draw_all(outcomes):
        assert line.plain.translate(drawing.PLAIN).isascii()


def test_the_command_writes_the_pictures_into_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = CliRunner().invoke(main, ["demo", "-n", "3", "--no-race", "--report", str(report)])
    assert done.exit_code == 0, done.output
    text = report.read_text()
    for scene in SCENES:
        assert scene.title in done.output
        assert scene.title in text
    assert "all are right" in done.output
    assert "times faster" not in text
    assert max(len(line) for line in done.output.splitlines() if "/" not in line) <= 80


def test_a_wrong_value_makes_the_command_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcomes: list[RankOutcome]
) -> None:
    """Ranks whose all_reduce forgets a number: the planted bug is pickled by value."""
    report = tmp_path / "report.md"
    monkeypatch.setattr(scenes, "run_all_scenes", run_with_a_fault)
    done = CliRunner().invoke(main, ["demo", "--no-race", "--report", str(report)])
    assert done.exit_code == 1
    assert "all_reduce (sum): rank 2 has" in done.output
    assert not report.exists()


def run_with_a_fault() -> RankOutcome:

    sound = Communicator.all_reduce

    def forgetful(self: Communicator, tensor: Any, *args: Any, **keywords: Any) -> Any:
        result = sound(self, tensor, *args, **keywords)  # type: ignore[arg-type]
        if self.rank == 2:
            tensor[-1] -= 1
        return result

    Communicator.all_reduce = forgetful  # type: ignore[method-assign, assignment]
    return REAL_RUN()


REAL_RUN = scenes.run_all_scenes


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = CliRunner().invoke(main, ["demo", "--report", str(report)])
    assert done.exit_code == 0, done.output
    assert "| 16 MiB |" in report.read_text()
