"""Layouts: parameters and memory against counts by hand, times against published runs."""

from __future__ import annotations

import json
import re
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from docs.blocks import ROOT
from plan.published_runs import predicted, table
from unisono.cli import main
from unisono.plan import PRESETS, find, simulate
from unisono.plan.layouts import (
    Layout,
    Model,
    against_the_wire,
    explain_layout,
    matmul_s,
    memory_by_part,
    rank_layouts,
    read_model,
    step_time,
)
from unisono.plan.layouts.calls import Calls
from unisono.plan.layouts.memory import activation_bytes

H100 = PRESETS["h100"]
SMALL = Model(layers=4, width=64, heads=8, positions=32, vocabulary=100)
LLAMA_8B = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 8192, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def test_published_runs_are_predicted() -> None:
    """One set of constants for all: no fitting per run."""
    rows = predicted()
    assert len(rows) >= 6
    assert statistics.median(abs(time_s / run.measured_s - 1) for run, time_s in rows) <= 0.2
    assert table(rows) in (ROOT / "docs/layouts.md").read_text(), (
        "python tests/plan/published_runs.py"
    )


def test_parameters_of_a_config(tmp_path: Path) -> None:
    """Llama 3's 8B has 8,030,261,248 parameters, as its card says."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    model = read_model(path)
    assert model.parameters + 4096 == 8_030_261_248  # the last norm
    assert read_model(path, positions=131072).positions == 131072
    mixtral = {"num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}
    path.write_text(json.dumps(LLAMA_8B | mixtral))
    assert round(read_model(path).parameters / 1e9, 1) == 46.7
    path.write_text("{}")
    with pytest.raises(ValueError, match="lacks num_hidden_layers, hidden_size"):
        read_model(path)
    path.write_text("[")
    with pytest.raises(ValueError, match=r"cannot read the model of .*config\.json"):
        read_model(path)


def test_activations_are_those_of_the_paper() -> None:
    """Korthikanti and others, 2022, equations 1 to 4 and table 2, for 2 bytes and dropout."""
    s, h, a, t = 2048, 6144, 64, 8
    model = Model(
        layers=2, width=h, heads=a, positions=s, vocabulary=100, plain_attention=True, dropout=True
    )
    tensor = Layout(tp=t, sequence_parallel=False)
    both = Layout(tp=t)
    for layout, expected in (
        (Layout(), h * (34 + 5 * a * s / h)),
        (tensor, h * (10 + 24 / t + 5 * a * s / (h * t))),
        (both, h * (34 / t + 5 * a * s / (h * t))),
        (replace(both, recompute="attention"), h * 34 / t),
        (replace(tensor, recompute="full"), 2 * h),
    ):
        assert activation_bytes(model, layout) == pytest.approx(expected)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_stages_shard_one_part_after_the_other(zero: int) -> None:
    """16 bytes a parameter: 2, 2 and 12 (Rajbhandari and others, 2020)."""
    held = memory_by_part(SMALL, Layout(dp=4, zero=zero), 8)
    for stage, part, each in ((3, "weights", 2), (2, "gradients", 2), (1, "optimizer", 12)):
        assert held[part] == each * SMALL.parameters / (4 if zero >= stage else 1)
    assert (held["gathered"] > 0) == (zero == 3)


def test_memory_of_a_stage() -> None:
    one = memory_by_part(SMALL, Layout(micro_batches=8), 8)
    four = memory_by_part(SMALL, Layout(pp=4, micro_batches=8), 8)
    assert four["activations"] == one["activations"]  # a quarter of the layers, four in flight
    layer = SMALL.attention_parameters + SMALL.network_parameters + 2 * SMALL.width
    assert four["weights"] == 2 * (layer + SMALL.embedding_parameters)
    experts = replace(SMALL, experts=8)
    alone, shared = (memory_by_part(experts, Layout(ep=ep), 8)["weights"] for ep in (1, 8))
    assert alone - shared == 2 * SMALL.layers * SMALL.network_parameters * 7
    wide = replace(SMALL, precision="float32")
    assert memory_by_part(wide, Layout(), 8)["optimizer"] == 8 * SMALL.parameters


def test_calls_are_simulated_on_the_groups_of_the_mesh() -> None:
    """tp inside a node is a ring on its ports; dp across nodes has one card for each rank."""
    calls, layout = Calls(H100), Layout(tp=8, dp=4)
    inside = simulate(find("all_reduce", "ring").schedule(8), H100.with_nodes_of(8), 1 << 30).time_s
    assert calls.time_s("all_reduce", layout, "tp", 1 << 30) == pytest.approx(inside, rel=0.01)
    between = calls.time_s("all_reduce", layout, "dp", 1 << 30)
    assert between == pytest.approx(2 * 3 / 4 * (1 << 30) / H100.card_bytes_per_s, rel=0.05)
    whole = calls.time_s("all_reduce", Layout(dp=32), "dp", 1 << 30)  # all cards of a node together
    assert whole < between
    assert calls.time_s("all_reduce", layout, "pp", 1 << 30) == 0
    message = calls.time_s("send", Layout(tp=8, pp=2), "pp", 1 << 30)
    assert message == pytest.approx((1 << 30) / H100.card_bytes_per_s, rel=0.01)


def test_a_product_is_bound_by_arithmetic_or_by_memory() -> None:
    large, thin = matmul_s(8192, 8192, 8192, H100), matmul_s(1, 8192, 8192, H100)
    assert large == pytest.approx(2 * 8192**3 / (0.73 * 989e12))
    assert thin == pytest.approx(2 * (8192**2 + 2 * 8192) / (0.80 * 3.35e12))
    layer, step = against_the_wire(SMALL, H100, tp=8, dp=2)
    assert (layer.bound, step.what) == ("wire", "step")  # tiny products: latency is longer
    assert layer.intensity < 1


def test_a_step_has_its_parts() -> None:
    model = Model(layers=32, width=4096, heads=32, positions=4096, vocabulary=32000)
    one = step_time(model, Layout(micro_batches=8), 8, H100)
    assert (one.bubble_s, sum(one.exposed_s.values())) == (0, 0)
    assert one.time_s == pytest.approx(sum(one.parts_s().values()))
    assert one.tokens_per_s == pytest.approx(8 * 4096 / one.time_s)
    assert 0.4 < one.flops_per_s / H100.flops_per_s < 0.73
    four = step_time(model, Layout(pp=4, micro_batches=8), 8, H100)
    computing_s = one.computing_s / 4
    assert four.bubble_s == pytest.approx(3 / 8 * computing_s, rel=0.2)  # (pp - 1) / micro-batches
    halved = step_time(model, Layout(pp=4, micro_batches=8, chunks=2), 8, H100)
    assert halved.bubble_s == pytest.approx(four.bubble_s / 2, rel=0.05)
    slow = step_time(model, Layout(micro_batches=8), 8, replace(H100, layer_call_s=1e-3))
    assert slow.computing_s == pytest.approx(one.computing_s + 8 * 32 * 1e-3)
    ring = Layout(cp=4, micro_batches=8)
    more_s = step_time(model, ring, 8, replace(H100, ring_call_s=1e-3)).computing_s
    assert more_s == pytest.approx(step_time(model, ring, 8, H100).computing_s + 4 * 8 * 32 * 1e-3)
    dp = step_time(model, Layout(dp=8), 8, H100)
    assert 0 < dp.exposed_s["dp"] < dp.hidden_s["dp"]


def test_layouts_are_ranked() -> None:
    model = Model(layers=32, width=4096, heads=32, positions=4096, vocabulary=32000)
    ranking = rank_layouts(model, H100, 16, 64)
    times = [choice.step.time_s for choice in ranking.choices]
    assert times == sorted(times)
    assert all(choice.layout.ranks == 16 for choice in ranking.choices)
    assert all(choice.memory_bytes <= 80e9 for choice in ranking.choices)
    assert all("the largest part is" in why for _, why in ranking.left_out)
    best = ranking.best
    again = step_time(model, best.layout, 64, H100)
    assert best.step.time_s == pytest.approx(again.time_s)
    why = explain_layout(ranking)
    assert why.startswith(f"{best.layout.label} wins: ")
    assert "takes" in why
    fixed = rank_layouts(model, H100, 16, 64, {"tp": 2, "pp": 4, "zero": 1})
    assert {(c.layout.tp, c.layout.pp, c.layout.zero) for c in fixed.choices} == {(2, 4, 1)}


@pytest.mark.parametrize(
    ("ranks", "batch", "fixed", "reason"),
    [
        (12, 12, {"tp": 3}, "tp = 3 does not divide 8 heads"),
        (8, 3, {"dp": 8}, "dp x ep x micro-batches = 8 does not divide 3 sequences"),
        (8, 8, {"pp": 8}, "pp x chunks = 8 does not divide 4 layers"),
        (8, 8, {"tp": 5}, "8 ranks cannot be divided so"),
        (4, 4, {"ep": 2}, "ep = 2 does not divide 0 experts"),
        (8, 8, {"zero": 4}, "the ZeRO stage is 0, 1, 2 or 3, not 4"),
        (0, 8, {}, "ranks and batch must be at least 1"),
    ],
)
def test_impossible_input(ranks: int, batch: int, fixed: dict[str, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        rank_layouts(SMALL, H100, ranks, batch, fixed)


def test_what_does_not_fit_says_which_part() -> None:
    huge = Model(layers=96, width=12288, heads=96, positions=2048, vocabulary=51200)
    with pytest.raises(
        ValueError, match=r"no layout of 8 ranks fits: the smallest, .* needs .* GB"
    ):
        rank_layouts(huge, H100, 8, 8)
    with pytest.raises(ValueError, match=r"the largest part is (weights|optimizer)"):
        rank_layouts(huge, H100, 8, 8, {"zero": 0})
    with pytest.raises(ValueError, match="few has 4 devices, not 8"):
        rank_layouts(SMALL, replace(H100, name="few", devices=4), 8, 8)
    bare = replace(H100, name="bare", flops_per_s=float("inf"))
    with pytest.raises(ValueError, match="topology bare lacks flops_per_s of a device"):
        rank_layouts(SMALL, bare, 8, 8)
    with pytest.raises(ValueError, match="3 heads do not divide a width of 64"):
        replace(SMALL, heads=3, key_heads=3, head_width=0)


GPT = (
    *("--layers", 32, "--width", 4096, "--heads", 32, "--vocabulary", 32000),
    *("--positions", 4096, "-n", 16, "--batch", 64),
)


def run(*arguments: object) -> Result:
    command = ["layout", *map(str, arguments)]
    return CliRunner().invoke(main, command, env={"COLUMNS": "150"}, catch_exceptions=False)


def test_the_command(tmp_path: Path) -> None:
    page = tmp_path / "layouts.html"
    shown = run(*GPT, "--html", page)
    assert shown.exit_code == 0, shown.output
    assert "6.57 billion parameters on 16 ranks of h100, 64 sequences a step" in shown.output
    assert re.search(r"^ *1 +dp 16 +1 +4 ", shown.output, re.M)
    assert "dp 16 wins: 99% computing. The next with other axes, " in shown.output
    assert re.search(r"\d+ layouts do not fit into memory; the closest:", shown.output)
    text = page.read_text()
    assert "<td>dp 16</td>" in text
    assert "://" not in re.sub(r"<(style|script)>.*?</\1>", "", text, flags=re.DOTALL)
    found = json.loads(run(*GPT, "--json", "--tp", 2, "--top", 4).stdout)
    assert len(found["layouts"]) == 4
    assert all(each["layout"]["tp"] == 2 for each in found["layouts"])
    best = found["layouts"][0]
    assert best["time_s"] == pytest.approx(sum(best["parts_s"].values()))
    assert sum(best["memory_bytes"].values()) < 80e9
    axes = [tuple(each["layout"][axis] for axis in ("cp", "pp", "dp")) for each in found["layouts"]]
    assert len(set(axes)) == 4


def test_the_command_says_in_a_sentence_what_cannot_be(tmp_path: Path) -> None:
    for arguments, sentence in (
        (("-n", 2, "--batch", 2), "give a config.json, or --layers, --width"),
        ((*GPT, "--tp", 3), "16 ranks cannot be divided so"),
        ((*GPT[:-4], "-n", 3, "--batch", 3, "--tp", 3), "tp = 3 does not divide 32 heads"),
        ((*GPT, "--topology", "moon"), "there is no topology 'moon'"),
        ((*GPT, "--recompute", "some"), "recompute is none, attention, full"),
        ((*GPT, "--html", tmp_path / "no" / "page.html"), "no/page.html"),
        ((tmp_path / "none.json", "-n", 2, "--batch", 2), "cannot read the model of"),
    ):
        refused = run(*arguments)
        assert refused.exit_code == 2, refused.output
        assert sentence in refused.stderr
        assert refused.stderr.count("\n") == 1


def test_16384_ranks_take_seconds() -> None:
    sizes = {"width": 16384, "heads": 128, "key_heads": 8, "inner": 53248}
    sizes |= {"layers": 126, "vocabulary": 128256, "positions": 8192}
    begin_s = time.process_time()
    ranking = rank_layouts(Model(gated=True, tied=False, **sizes), H100, 16384, 2048)  # type: ignore[arg-type]
    assert time.process_time() - begin_s < 30
    assert ranking.best.layout.ranks == 16384
