"""The course: solutions solve the exercises, the exercises as handed out do not, and what the
chapters say and draw is what the library does."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from docs.blocks import ROOT, blocks_of
from ranks import RankPool
from unisono.comm.communicator import Communicator
from unisono.groups.manager import AXES
from unisono.learn import checking, pictures
from unisono.learn.chapters import SOLUTIONS, chapters
from unisono.learn.checks import CHECKS
from unisono.learn.command import learn
from unisono.plan.mesh import Mesh

NUMBERS = range(1, len(CHECKS) + 1)
HANDED_OUT = {6: "DeadlockError", 7: "under way", 12: "CollectiveMismatch"}
"""Exercises that are programs with a bug, and what their check says about it."""


def run(*words: object) -> Result:
    return CliRunner().invoke(learn, [str(word) for word in words])


def launch_warm(*args: Any, **options: Any) -> Any:
    """As launch, but the ranks need not import torch."""
    with RankPool() as ranks:
        return ranks.launch(*args, **options)


def write(folder: Path, number: int, text: str) -> None:
    (folder / f"chapter_{number:02}.py").write_text(text)


# --- the way through the course -------------------------------------------------------------


def test_lists_the_chapters_of_the_site(tmp_path: Path) -> None:
    pages = sorted((ROOT / "docs").glob("course-*.md"))
    titles = [page.read_text().partition("\n")[0].removeprefix("# ") for page in pages]
    (tmp_path / ".solved.json").write_text("[2]\n")
    listed = run("list", "--folder", tmp_path).output.splitlines()
    titles[1] += "  (solved)"
    assert listed == titles
    assert len(CHECKS) == len(titles)


def test_from_the_first_chapter_to_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "course"
    first = run("--folder", folder)
    assert first.exit_code == 0
    assert "One program, several processes" in first.output
    assert first.output.splitlines()[-1].startswith(f"Your exercise: {folder}/chapter_01.py.")

    again = run("--folder", folder)  # nothing is written yet: the chapter once more
    assert "One program, several processes" in again.output

    write(folder, 1, "def every_size_th(items, rank, size):\n    return items[rank::size]\n")
    half = run("--folder", folder)
    assert half.exit_code == 1
    assert "every_size_th: solved" in half.output
    assert "my_share: chapter_01.py does not define the function my_share" in half.output
    assert "hint" not in half.output

    shutil.copy(SOLUTIONS / "chapter_01.py", folder)
    solved = run("--folder", folder)
    assert solved.exit_code == 0, solved.output
    assert "Next: 2. The collectives." in solved.output

    shutil.copy(SOLUTIONS / "chapter_04.py", folder)
    assert "Next: 2. The collectives." in run("check", 4, "--folder", folder).output
    assert json.loads((folder / ".solved.json").read_text()) == [1, 4]

    second = run("--folder", folder)
    assert "From one to all" in second.output
    assert (folder / "chapter_02.py").read_text() == chapters()[1].exercise


def test_what_the_reader_has_written_is_kept(tmp_path: Path) -> None:
    write(tmp_path, 3, "my own\n")
    assert run("show", 3, "--folder", tmp_path).exit_code == 0
    assert (tmp_path / "chapter_03.py").read_text() == "my own\n"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for words in (["--folder", tmp_path / "file/course"],
                  ["show", "--html", 1, "--folder", tmp_path / "file/course"]):  # fmt: skip
        begun = run(*words)
        assert begun.exit_code == 1
        assert f"Error: cannot write {tmp_path}/file/course" in begun.output
        assert "Go to a folder of your own, or name one" in begun.output


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "chapter_01.py").mkdir()
    checked = run("--folder", tmp_path)
    assert checked.exit_code == 1
    assert "every_size_th: " in checked.output
    (tmp_path / "chapter_01.py").rmdir()
    (tmp_path / "chapter_01.py").write_bytes(b"\xff = 1\n")
    checked = run("--folder", tmp_path)
    assert checked.exit_code == 1
    assert "my_share: " in checked.output


def test_check_without_an_exercise_says_what_to_do(tmp_path: Path) -> None:
    checked = run("check", "--folder", tmp_path)
    assert checked.exit_code == 1
    assert "`unisono learn` writes the first" in checked.output
    checked = run("check", 4, "--folder", tmp_path)
    assert "`unisono learn show 4` writes it" in checked.output


@pytest.mark.parametrize("wrong", ["0", "99", "two"])
def test_a_chapter_that_does_not_exist(wrong: str) -> None:
    for command in ("show", "check", "solution"):
        asked = run(command, wrong)
        assert asked.exit_code == 2
        assert f"there is no chapter {wrong}: there are 1 to {len(NUMBERS)}" in asked.output


def test_pages_lead_to_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROWSER", "true")
    shown = run("show", "--html", 2, "--folder", tmp_path)
    assert shown.exit_code == 0, shown.output
    pages = {page.name: page.read_text() for page in (tmp_path / "pages").iterdir()}
    assert len(pages) == len(NUMBERS)
    for page in pages.values():
        links = re.findall(r'<a href="([^"#]+)"', page)
        assert set(links) <= set(pages)
    assert pages["chapter_02.html"].count("<svg class=") == 16
    assert "://" not in re.sub(r"http://www\.w3\.org/\d+/\w+", "", pages["chapter_02.html"])


def test_a_solution_is_printed() -> None:
    assert run("solution", 5).output == (ROOT / "examples/course/chapter_05.py").read_text()


# --- what checks say ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "said", "hinted"),
    [
        ("def my_share(i\n", "SyntaxError: '(' was never closed (chapter_01.py, line 1)", False),
        ("", "chapter_01.py does not define the function my_share", False),
        ("my_share = 3\n", "chapter_01.py does not define the function my_share", False),
        ("def my_share(i, r, s):\n    return i / s\n", "'int' (chapter_01.py, line 2)", False),
        ("def my_share(i, r, s):\n    i[r::s]\n", "returned None: is a `return` missing?", False),
        ("def my_share(i, r, s):\n    return 5\n", "returned a int, not a list: 5", False),
        ("raise SystemExit(0)\n", "SystemExit: 0 (chapter_01.py, line 1)", False),
        ("import os\nos._exit(3)\n", "exited with code 3", False),
        ("import os\nos._exit(0)\n", "exited with code 0 and returned nothing", False),
        ("import os\nos.kill(os.getpid(), 9)\n", "was killed by SIGKILL", False),
        ("def my_share(i, r, s):\n    return i[r::s]\n", "[0, 4, 1, 5, 2, 6, 3, 7]", True),
    ],
)  # fmt: skip
def test_an_error_is_told_where_and_hints_are_for_wrong_values(
    written: str, said: str, hinted: bool, tmp_path: Path
) -> None:
    write(tmp_path, 1, written)
    checked = run("check", 1, "--folder", tmp_path)
    assert checked.exit_code == 1
    told = checked.output.partition("my_share: ")[2]
    assert said in told
    assert ("hint: divmod" in told) == hinted


def test_a_function_that_never_ends_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "_CALL_S", 0.5)
    write(tmp_path, 1, "def my_share(i, r, s):\n    while True:\n        pass\n")
    told = run("check", 1, "--folder", tmp_path).output.partition("my_share: ")[2]
    assert re.match(r"TimeoutError: not done after \d+ s; .* \(chapter_01\.py, line [23]\)", told)


@pytest.mark.docs
def test_a_function_on_ranks_that_never_ends_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "_CALL_S", 5.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))  # it ends after 15 s
    write(tmp_path, 2, "def largest(comm, number):\n    while True:\n        pass\n")
    told = run("check", 2, "--folder", tmp_path).output.partition("largest: ")[2]
    assert re.match(r"rank \d of \d: TimeoutError: .* \(chapter_02\.py, line [23]\)", told)


@pytest.mark.docs
def test_a_wrong_value_names_its_rank_and_both_values(tmp_path: Path) -> None:
    write(
        tmp_path,
        2,
        "def transpose(comm, row):\n    return row + (comm.rank == 2)\n"
        "def largest(comm, number):\n    print('hello')\n    return 1 / 0\n",
    )
    checked = run("check", 2, "--folder", tmp_path)
    assert checked.exit_code == 1
    assert re.search(
        r"transpose: rank (\d) of 4: column \1 should be \[\1, .*\], not \[", checked.output
    )
    assert re.search(r"ZeroDivisionError: .* \(chapter_02.py, line 5\)\n", checked.output)
    assert "[rank 0] hello\n" in checked.output
    assert checked.output.count("hint: ") == 1


@pytest.mark.docs
def test_a_ring_that_sends_too_much_is_counted(tmp_path: Path) -> None:
    write(
        tmp_path,
        6,
        "import torch\n"
        "def ring_all_reduce(comm, x):\n"
        "    total, passing = x.clone(), x.clone()\n"
        "    for _ in range(comm.size - 1):\n"
        "        work = comm.isend(passing.clone(), comm.next)\n"
        "        comm.recv(passing, comm.prev)\n"
        "        work.wait()\n"
        "        total += passing\n"
        "    x.copy_(total)\n",
    )
    checked = run("check", 6, "--folder", tmp_path)
    assert checked.exit_code == 1
    assert "sent 48 elements; 24 are enough" in checked.output


def test_a_ring_without_messages_is_proved(tmp_path: Path) -> None:
    write(tmp_path, 3, "def part_to_send(rank, step, size):\n    return (rank + step) % size\n")
    told = run("check", 3, "--folder", tmp_path).output.partition("part_to_send: ")[2]
    assert re.match(r"chunk \d of rank \d lacks what rank \d contributed.*\n +hint: ", told), told


@pytest.mark.docs
def test_what_may_not_be_called_is_told(tmp_path: Path) -> None:
    write(tmp_path, 5, "def tree_broadcast(comm, x):\n    comm.broadcast(x, 0)\n")
    checked = run("check", 5, "--folder", tmp_path)
    assert "comm.broadcast may not be used here, only comm.send, comm.recv" in checked.output


def test_limits_grow_with_the_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = []

    def note(function: Any, ranks: int, *, args: Any, timeout: float, **_: Any) -> None:
        limits.append((timeout, args[-1]))

    monkeypatch.setattr(checking, "launch", note)
    cores = len(os.sched_getaffinity(0))
    for load in (0.0, 3.0 * cores):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        list(checking.verdicts(chapters()[6], SOLUTIONS / "chapter_07.py"))
    assert limits == [(120.0, 10.0)] * 2 + [(360.0, 30.0)] * 2


def test_frames_within_a_message_are_no_frames_of_the_program() -> None:
    """What a rank raised is said, also where its message or a note ends with a stack."""
    story = (
        'Traceback (most recent call last):\n  File "chapter_12.py", line 3, in train\n    go()\n'
        "unisono.errors.CollectiveTimeout: rank 1 has not come\nunisono.watch: it was here:\n"
        '  File "chapter_12.py", line 9, in train\n    barrier()  # where they meet.'
    )
    verdict = checking._explain(CHECKS[11][0], "rank 1 of 2: ", story, Path("chapter_12.py"))
    said, *more = verdict.problem.splitlines()
    assert said == "rank 1 of 2: CollectiveTimeout: rank 1 has not come (chapter_12.py, line 9)"
    assert more[0] == "unisono.watch: it was here:"


@pytest.mark.docs
@pytest.mark.parametrize("number", NUMBERS)
def test_solutions(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checking, "launch", launch_warm)
    shutil.copy(SOLUTIONS / f"chapter_{number:02}.py", tmp_path)
    checked = run("check", number, "--folder", tmp_path)
    assert checked.exit_code == 0, checked.output
    assert checked.output.count(": solved\n") == len(CHECKS[number - 1])


@pytest.mark.docs
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.provokes
def test_exercises_are_not_solved_yet(number: int, tmp_path: Path) -> None:
    write(tmp_path, number, chapters()[number - 1].exercise)
    checked = run("check", number, "--folder", tmp_path)
    assert checked.exit_code == 1
    assert ": solved" not in checked.output
    not_written = len(CHECKS[number - 1]) - (number in HANDED_OUT)
    assert checked.output.count(": not written yet\n") == not_written
    assert HANDED_OUT.get(number, "") in checked.output


# --- what chapters say and draw -------------------------------------------------------------


@pytest.mark.ranks(pictures.RANKS)
@pytest.mark.parametrize("collective", pictures.ALGORITHMS)
def test_pictures_show_what_ranks_have(comm: Communicator, collective: str) -> None:
    """The drawn moves, made by ranks, lead from "before" to "after"; so does the engine."""
    import unisono

    schedule, before, after = pictures.picture_of(collective)
    example = pictures.example_of(schedule)
    primitive = schedule.primitive
    for run_it in ("schedule", "engine"):
        given, result = example.input(comm.rank), example.output(comm.rank)
        if primitive.is_empty:
            assert before[comm.rank].values == after[comm.rank].values == []
            continue
        assert before[comm.rank].values == ([] if given is None else given.tolist())
        if run_it == "schedule":
            unisono.run_schedule(schedule, comm, result, None if primitive.is_in_place else given)
        else:
            example.bind(comm, result, given)()
        if run_it == "engine" or not primitive.is_to_root or comm.rank == 0:
            assert after[comm.rank].values == ([] if result is None else result.tolist())


def test_groups_of_chapter_8_are_those_of_the_manager() -> None:
    sizes = {"tp": 2, "pp": 2, "dp": 2}
    mesh = Mesh({axis: sizes.get(axis, 1) for axis in AXES})
    table = chapters()[7].text
    for axis in sizes:
        (row,) = re.findall(rf"^    {axis} group +((?:\d +){{7}}\d)", table, re.M)
        numbers = [int(number) for number in row.split()]
        groups = [[r for r in range(8) if numbers[r] == n] for n in sorted(set(numbers))]
        assert groups == mesh.groups(axis)
        (shown,) = re.findall(rf"^        {axis}  (.*)$", chapters()[7].exercise, re.M)
        assert [json.loads(group) for group in re.findall(r"\[.*?\]", shown)] == groups


def test_bytes_of_chapter_9() -> None:
    """A parameter, its gradient, and Adam's state: 2, 2 and 12 bytes, each whole or divided."""
    rows = re.findall(r"^\| (DDP|ZeRO-\d)[^|]*\| ([^|]+) \| (.*) \|$", chapters()[8].text, re.M)
    divided = {"DDP": (), "ZeRO-1": (12,), "ZeRO-2": (12, 2), "ZeRO-3": (12, 2, 2)}
    assert [name for name, _, _ in rows] == list(divided)
    for name, formula, moves in rows:
        for n in (1, 8, 64):
            expected = 16 - sum(divided[name]) + sum(divided[name]) / n
            assert eval(formula, {"n": n}) == expected
        used = set(re.findall(r"all_reduce|reduce_scatter|all_gather|the same", moves))
        expected_calls = {"DDP": {"all_reduce"}, "ZeRO-2": {"the same"}}
        assert used == expected_calls.get(name, {"reduce_scatter", "all_gather"})


def test_what_a_ring_sends_in_chapter_3() -> None:
    from unisono.plan import find

    found = re.findall(
        r"bytes: ([\d.]+) S with (\d+) ranks, ([\d.]+) S with (\d+)", chapters()[2].text
    )
    ((few, size, many, more),) = found
    for shown, ranks in ((few, int(size)), (many, int(more))):
        schedule = find("all_reduce", "ring").schedule(ranks)
        assert set(schedule.chunks_sent() / schedule.chunks) == {2 * (ranks - 1) / ranks}
        assert f"{2 * (ranks - 1) / ranks:.3g}" == f"{float(shown):.3g}"


def test_steps_of_ring_and_tree_in_chapter_4() -> None:
    from unisono.plan import find

    text = " ".join(chapters()[3].text.split())
    (ranks,) = {
        int(n.replace(",", "")) for n in re.findall(r"[Ww]ith ([\d,]+) ranks (?:it|that)", text)
    }
    (ring,) = re.findall(r"it is ([\d,]+) latencies", text)
    (tree,) = re.findall(r"that is (\d+) latencies instead", text)
    assert find("all_reduce", "ring").schedule(ranks).rounds == int(ring.replace(",", ""))
    there, back = (
        find(name, "binomial").schedule(ranks).rounds for name in ("reduce", "broadcast")
    )
    assert there + back == int(tree)


def test_steps_of_trees_in_chapter_5() -> None:
    from unisono.plan import find

    text = " ".join(chapters()[4].text.split())
    assert "rank 0 sends to rank 4. Then both send, to ranks 2 and 6. Then all four" in text
    schedule = find("broadcast", "binomial").schedule(8)
    receivers = [sorted(t.destination for t in step) for step in schedule.steps]
    assert receivers == [[4], [2, 6], [1, 3, 5, 7]]
    double = find("all_reduce", "double_tree").schedule(8)
    halves = {t.chunk_name for step in double.steps for t in step}
    leaves = [
        {
            rank
            for rank in range(8)
            if not any(
                t.destination == rank and t.chunk_name == half and t.action == "reduce"
                for step in double.steps
                for t in step
            )
        }
        for half in sorted(halves)
    ]  # those that no child sends anything to
    assert len(leaves) == 2
    assert not leaves[0] & leaves[1]


def test_what_fsdp_sends_in_chapter_9() -> None:
    """An all_reduce is two halves; FSDP gathers twice and scatters once."""
    from unisono.cases.primitives import PRIMITIVES

    factors = {name: PRIMITIVES[name].bus_factor(8) for name in ("all_reduce", "all_gather")}
    scatter = PRIMITIVES["reduce_scatter"].bus_factor(8)
    more = float((2 * factors["all_gather"] + scatter) / factors["all_reduce"])
    assert f"{more:g} times the communication of DDP" in " ".join(chapters()[8].text.split())
    assert f"{more:g} times the communication" in chapters()[15].text


def test_bytes_of_chapter_16() -> None:
    (billions, held) = re.findall(
        r"a model of (\d+) billion parameters needs (\d+) GB", chapters()[15].text
    )[0]
    assert int(billions) * (2 + 2 + 12) == int(held)


def test_shares_of_time_in_chapter_14() -> None:
    text = chapters()[13].text
    sentence = r"(\d) stages and (\d) microbatches it is [^=]*= (\d+)%, with (\d+)[^(]* (\d+)%"
    ((stages, few, first, many, second),) = re.findall(sentence, text)
    p = int(stages)
    for m, shown in ((int(few), first), (int(many), second)):
        assert f"{(p - 1) / (m + p - 1):.0%}" == f"{shown}%"


def test_the_code_of_new_chapters_is_short() -> None:
    """120 lines for each of the chapters that write a way of parallel training by hand."""
    for page in sorted((ROOT / "docs").glob("course-1[3-8]*.md")):
        blocks = blocks_of(f"docs/{page.name}")
        code = [b.text for b in blocks if b.language == "python" and "exercise" not in b.marks]
        assert sum(text.count("\n") for text in code) <= 120, page.name
