"""`unisono plan`, and the drawings that it makes."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from unisono.cli import main
from unisono.plan import COLLECTIVES, Schedule, catalog, find
from unisono.plan.choose import rank_sizes
from unisono.plan.draw import to_svg, trees
from unisono.plan.tables import crossovers, save_chart
from unisono.plan.topology import PRESETS
from user_programs import run_python


def plan(*arguments: object) -> Result:
    command = ["plan", *map(str, arguments)]
    return CliRunner().invoke(main, command, env={"COLUMNS": "100"}, catch_exceptions=False)


def test_algorithms_are_ranked() -> None:
    result = plan("all_reduce", "-n", 64, "--nodes", 8, "--size", "64M", "--topology", "h100")
    assert result.exit_code == 0
    assert "all_reduce of 64M on 64 ranks, 8 nodes, h100" in result.output
    assert ranked(result)[:2] == ["hierarchical", "nccl_tree"]
    assert {*ranked(result)} == {e.name for e in catalog("all_reduce") if not e.only_planned}
    assert "bandwidth-bound" in result.output


def test_what_cannot_run_is_ranked_last_and_marked() -> None:
    """By time alone mates would be first: 33 us here, recursive_doubling 39."""
    asked = ("all_reduce", "-n", 32, "--size", 8)
    result = plan(*asked)
    assert ranked(result)[0] == "recursive_doubling"
    assert "mates" not in ranked(result)
    assert "mates can only be planned, not run: its schedule would add" in result.output
    found = json.loads(plan(*asked, "--json").stdout)["algorithms"]
    assert [each["algorithm"] for each in found if each["only_planned"]] == ["mates"]
    assert (found[0]["algorithm"], found[-1]["algorithm"]) == ("recursive_doubling", "mates")
    assert found[-1]["time_s"] < found[0]["time_s"]
    swept = plan("all_reduce", "-n", 32, "--sizes", "8:64")
    assert "8 to    64: recursive_doubling" in swept.output
    assert "mates can only be planned" in swept.output
    alone = plan(*asked, "--algorithm", "mates")
    assert "mates can only be planned" in alone.output
    assert "mates is latency-bound" in alone.output
    assert "8 to    64: mates" in plan(*asked[:3], "--algorithm", "mates", "--sizes", "8:64").output


def test_one_algorithm_or_two_alone() -> None:
    alone = plan(
        "all_reduce", "-n", 512, "--topology", "ethernet", "--algorithm", "lanes", "--pieces", 8
    )
    assert "all_reduce of 64M on 512 ranks, 64 nodes, ethernet" in alone.output
    assert ranked(alone) == ["lanes"]
    assert "(8 pieces)" in alone.output
    both = plan("broadcast", "-n", 16, "--algorithm", "chain", "--against", "lanes", "--json")
    names = [entry["algorithm"] for entry in json.loads(both.stdout)["algorithms"]]
    assert sorted(names) == ["chain", "lanes"]
    swept = plan("all_reduce", "-n", 12, "--algorithm", "lanes", "--sizes", "1K:4K")
    assert "1K to    4K: lanes" in swept.output


def ranked(result: Result) -> list[str]:
    """The algorithms of the table, in its order."""
    rows = [line.split() for line in result.output.splitlines()]
    return [row[1] for row in rows if len(row) > 4 and row[0].isdecimal()]


def test_a_ring_with_a_channel_for_each_card_uses_them_all() -> None:
    """busbw of eight cards of 50 GB/s: near 400 GB/s, where one channel has 50."""
    ring = ("all_reduce", "-n", 64, "--algorithm", "ring", "--topology", "h100", "--size", "16G")
    (best,) = json.loads(plan(*ring, "--json").stdout)["algorithms"]
    (one,) = json.loads(plan(*ring, "--json", "--channels", 1).stdout)["algorithms"]
    assert (best["channels"], one["channels"]) == (8, 1)
    busbw = [2 * 63 / 64 * (16 << 30) / entry["time_s"] / 1e9 for entry in (best, one)]
    assert 360 < busbw[0] < 400
    assert 49 < busbw[1] < 50
    assert "ring (8 channels)" in plan(*ring).output
    small = (*ring[:-1], "8")
    assert json.loads(plan(*small, "--json").stdout)["algorithms"][0]["channels"] == 1


def test_channels_are_shown_and_drawn(tmp_path: Path) -> None:
    ring = find("all_reduce", "ring")
    by_topology = plan("show", "ring", "-n", 12, "--topology", "summit", "--json")
    assert Schedule.from_json(by_topology.stdout) == ring.schedule(12, node_size=6, channels=2)
    asked = plan("show", "ring", "-n", 16, "--nodes", 4, "--channels", 2, "-o", tmp_path / "r.svg")
    assert "all_reduce by ring: 16 ranks, 32 chunks, 30 steps; verified" in asked.output
    assert (tmp_path / "r.svg").read_text().count("<polygon") == 30 * 32
    page = tmp_path / "play.html"
    assert plan("all_reduce", "-n", 16, "--algorithm", "ring", "--html", page).exit_code == 0


def test_the_same_for_programs() -> None:
    found = json.loads(plan("all_reduce", "-n", 16, "--size", "1M", "--json").stdout)
    assert found["nodes"] == 2
    assert found["bytes"] == 1 << 20
    times = [entry["time_s"] for entry in found["algorithms"]]
    assert times[:-1] == sorted(times[:-1])  # the last is mates, which cannot be run
    assert len(times) == len(catalog("all_reduce"))
    assert "-bound" in found["why"]
    swept = json.loads(plan("all_reduce", "-n", 16, "--sizes", "8:64", "--json").stdout)
    assert [entry["bytes"] for entry in swept] == [8, 16, 32, 64]
    costs = json.loads(plan("--table", "-n", 8, "--json").stdout)
    ring = {"collective": "all_reduce", "algorithm": "ring", "ranks": 8, "steps": 14}
    ring |= {"most_sent": 1.75, "total_sent": 14, "alpha": 14, "beta": 1.75, "gamma": 0.875}
    assert ring in costs
    assert len(costs) == len(catalog())


def test_json_stays_json_where_a_drawing_is_written(tmp_path: Path) -> None:
    result = plan("show", "ring", "-n", 4, "--json", "-o", tmp_path / "ring.svg")
    assert Schedule.from_json(result.stdout) == find("all_reduce", "ring").schedule(4)
    assert "Wrote" in result.stderr
    assert (tmp_path / "ring.svg").exists()


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_is_planned(collective: str) -> None:
    for ranks in (1, 5, 16):
        assert plan(collective, "-n", ranks, "--size", "1K", "--topology", "a100").exit_code == 0


def test_sizes_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sweep = ("all_reduce", "-n", 16, "--sizes", "8M:1G", "--topology", "a100")
    result = plan(*sweep, "-o", tmp_path / "chart.svg")
    assert result.exit_code == 0
    assert "8M to   16M: hierarchical" in result.output
    assert "32M to    1G: nccl_tree" in result.output
    svg = (tmp_path / "chart.svg").read_text()
    assert "hierarchical" in svg
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert plan("all_reduce", "-n", 4, "--sizes", "8:32", "-o", tmp_path / "c.png").exit_code == 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    for name in ("one.svg", "two.svg"):
        save_chart(tmp_path / name, [8, 64], {"ring": [1e-6, 2e-6]}, "the same every time")
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()
    with pytest.raises(ValueError, match=r"c\.pdf: give -o a \.png or \.svg file"):
        save_chart(tmp_path / "c.pdf", [1, 2], {"a": [1, 2]}, "")


def test_where_algorithms_cross() -> None:
    rankings = rank_sizes("all_reduce", 64, (8, 1 << 10, 1 << 30), PRESETS["h100"])
    assert crossovers(rankings) == [
        (8, 1 << 10, "recursive_doubling"),
        (1 << 30, 1 << 30, "ring"),
    ]


def test_a_schedule_is_shown(tmp_path: Path) -> None:
    result = plan("show", "double_tree", "-n", 8, "-o", tmp_path / "double_tree.svg")
    assert result.exit_code == 0
    assert "all_reduce by double_tree: 8 ranks, 2 chunks, 6 steps; verified" in result.output
    assert "step 0: 1 +> 2 c0, " in result.output
    assert (tmp_path / "double_tree.svg").exists()
    wide = plan("show", "ring", "-n", 16)
    assert "15 +> 0 c14" in wide.output
    other = plan("show", "binomial", "--collective", "reduce", "-n", 5, "--root", 3, "--json")
    assert Schedule.from_json(other.output) == find("reduce", "binomial").schedule(5, root=3)
    assert json.loads(other.stdout)["root"] == 3


def test_the_table() -> None:
    result = plan("--table", "-n", 8)
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines()]
    assert ["ring", "14", "1.75", "14", "14", "1.75", "0.875"] in rows
    assert sum(row[:1] == ["bruck"] or row[1:2] == ["bruck"] for row in rows) == 3
    assert plan("--table", "-n", 7, "all_reduce").exit_code == 0
    cut = plan("--table", "-n", 8, "broadcast", "--pieces", 4).output
    assert ["chain", "10"] in [line.split()[:2] for line in cut.splitlines()]  # n - 2 + pieces
    left_out = plan("--table", "-n", 12, "all_reduce").output
    assert (
        "Left out: hierarchical of all_reduce, hierarchical needs nodes of equal size: 12"
        in left_out
    )


def test_nodes_are_those_of_the_topology() -> None:
    for topology, nodes in (("h100", 2), ("summit", 3)):
        size = 18 if topology == "summit" else 16
        made = plan("show", "hierarchical", "-n", size, "--topology", topology, "--json").output
        wanted = find("all_reduce", "hierarchical").schedule(size, node_size=size // nodes)
        assert Schedule.from_json(made) == wanted
    made = plan("show", "hierarchical", "-n", 16, "--nodes", 8, "--json").output
    wanted = find("all_reduce", "hierarchical").schedule(16, node_size=2)
    assert Schedule.from_json(made) == wanted


@pytest.mark.parametrize("arguments", ["all_reduce -n 128", "--table -n 8", "show ring -n 4"])
def test_tables_keep_their_figures_however_narrow(arguments: str) -> None:
    command = ["plan", *arguments.split()]
    wide, *narrower = (
        CliRunner().invoke(main, command, env={"COLUMNS": width}).output
        for width in ("200", "80", "40")
    )
    figures = [word for word in wide.split() if word.strip("│").isdecimal()]
    for narrow in narrower:
        assert "…" not in narrow
        assert not [figure for figure in figures if figure not in narrow.split()]


def test_a_chart_without_matplotlib_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = plan("all_reduce", "-n", 24_756, "--sizes", "8:1G", "-o", tmp_path / "x.svg")
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: the chart x.svg needs matplotlib: pip install 'unisono[plot]', or leave out -o\n"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("all_reduce -n 0", "-n must be at least 1, not 0"),
        ("show ring -n -3", "-n must be at least 1, not -3"),
        ("show circle", "there is no algorithm 'circle': "),
        ("show", "name an algorithm: "),
        ("all_reduce --size 64Q", "'64Q' is not a size: sizes are written like 8, 64K"),
        ("all_reduce --sizes 1G:8", "write the smaller one first"),
        ("all_reduce --sizes 8", "--sizes needs a range"),
        ("all_reduce --topology moon", "there is no topology 'moon': h100, a100, summit"),
        ("all_reduce -n 8 --nodes 3", "8 ranks do not fill 3 nodes evenly"),
        ("all_reduce -n 8 --nodes 0", "8 ranks do not fill 0 nodes evenly"),
        ("", "name what to plan: all_reduce, "),
        ("shout", "cannot plan 'shout': all_reduce, "),
        ("allreduce", "show ALGORITHM, --table. Did you mean all_reduce?\n"),
        ("--table all-gather", ", barrier. Did you mean all_gather?\n"),
        ("show doubletree", ", dissemination. Did you mean double_tree?\n"),
        ("all_reduce --algorithm Rings", ", ring, nccl_tree, ring_2d. Did you mean ring?\n"),
        ("all_reduce ring", "to see ring, write: unisono plan show ring"),
        ("--table shout", "there is no collective 'shout', only all_reduce"),
        ("show ring -o ring.png", "ring.png: give -o a .svg file"),
        ("show ring -o nowhere/ring.svg", "the folder of nowhere/ring.svg does not exist"),
        ("show chain --pieces 0", "pieces must be at least 1, not 0"),
        ("show ring --pieces 3", "all_reduce by ring has no pieces: leave out --pieces"),
        ("show ring --root 1", "all_reduce by ring has no root: leave out --root"),
        ("show binomial --nodes 2", "all_reduce by binomial has no nodes: leave out --nodes"),
        ("show binomial --topology a100", "binomial is the same on every topology: leave out"),
        ("show binomial --channels 2", "all_reduce by binomial has no channels: leave out"),
        ("show ring --channels 0", "channels must be at least 1, not 0"),
        ("all_reduce --channels 2", "--channels has no effect on a ranking: leave it out"),
        ("show ring --size 8", "--size has no effect on show: leave it out"),
        ("show hierarchical -n 12", "do not fill nodes of 8; set the number of nodes with --nodes"),
        ("--table -o x.svg", "--output has no effect on --table: leave it out"),
        ("--table --size 8 --root 1", "--root and --size have no effect on --table"),
        ("--table all_reduce ring", "--table shows all algorithms: name one collective"),
        ("--table --sizes 8:64", "--sizes has no effect on --table"),
        ("all_reduce -o x.svg", "--output has no effect on a ranking: leave it out"),
        ("all_reduce --pieces 8", "--pieces has no effect on a ranking: leave it out"),
        ("all_reduce --root 1", "--root has no effect on a ranking: leave it out"),
        ("all_reduce --collective reduce", "--collective has no effect on a ranking"),
        ("all_reduce --sizes 8:64 --size 8", "--size has no effect on --sizes: leave it out"),
        ("all_reduce --sizes 8:64 --pieces 8", "--pieces has no effect on --sizes"),
        ("show binomial --collective broadcast --root 9", "root 9 is not among 8 ranks"),
        ("all_reduce --algorithm circle", "all_reduce has no algorithm 'circle', only"),
        ("all_reduce --algorithm lanes --pieces 0", "pieces must be at least 1, not 0"),
        (
            "all_reduce --algorithm lanes -n 2048",
            "lanes is too large beyond 1,024 ranks",
        ),
        (
            "show lanes -n 2048 --nodes 2",
            "lanes is too large beyond 1,024 ranks",
        ),
        ("show ring -n 40 -o ring.svg", "room for 32 ranks, not 40"),
        (
            "all_reduce --topology bad.toml",
            "of topology 'bad' must be more than 0, not -5",
        ),
    ],
)
def test_bad_input_gets_one_sentence(
    arguments: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = "node_size = 2\ninside_latency_s = 0\ninside_bytes_per_s = -5e9\n"
    Path("bad.toml").write_text(bad)
    result = plan(*arguments.split())
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("entry", catalog(), ids=lambda e: f"{e.collective}-{e.name}")
def test_every_schedule_is_drawn(entry) -> None:
    for ranks in (1, 2, 3, 8, 16):
        schedule = entry.schedule(ranks)
        transfers = sum(len(step) for step in schedule.steps)
        picture = ElementTree.fromstring(to_svg(schedule))
        heads = [shape for shape in picture.iter() if shape.tag.endswith("polygon")]
        assert len(heads) == transfers
        width = float(picture.attrib["width"])
        for shape in picture.iter():
            for name in ("x1", "x2", "cx"):
                assert 0 <= float(shape.attrib.get(name, 0)) <= width


def test_trees_are_found() -> None:
    (first, second) = trees(find("all_reduce", "double_tree").schedule(8, pieces=2))
    assert first == ([0, 1], {1: 2, 2: 4, 3: 2, 4: 0, 5: 6, 6: 4, 7: 6})
    assert second[0] == [2, 3]
    assert trees(find("reduce", "binomial").schedule(4)) == [([0], {1: 0, 2: 0, 3: 2})]
    assert trees(find("all_reduce", "ring").schedule(4)) == []
    assert trees(find("all_reduce", "recursive_doubling").schedule(4)) == []


def test_planning_needs_neither_torch_nor_the_engine() -> None:
    program = (
        "import sys; from unisono.cli import main; assert 'numpy' not in sys.modules; "
        "main(['plan', 'all_reduce', '-n', '4'], standalone_mode=False); "
        "assert not {'torch', 'unisono._native', 'matplotlib'} & set(sys.modules)"
    )
    done = run_python("-c", program)
    assert done.returncode == 0, done.stderr


def test_the_example_runs() -> None:
    done = run_python(Path(__file__).resolve().parents[2] / "examples" / "own_algorithm.py")
    assert "all_reduce by star: 4 ranks, 1 chunk, 2 steps" in done.stdout
    assert "without rank 3: chunk 0 of rank 0 lacks what rank 3 contributed (step 0)" in done.stdout
    assert "star " in done.stdout
