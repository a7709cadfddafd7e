"""Step times that were published, and what layouts.step_time says of the same runs.

    python tests/plan/published_runs.py        the table of docs/layouts.md

Sizes of micro-batches and numbers of chunks are the publications' own where they state them, else
assumed, which the table marks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from unisono.plan import PRESETS, Topology
from unisono.plan.layouts import Layout, Model, step_time
from unisono.plan.layouts.calls import Calls


@dataclass(frozen=True)
class Run:
    source: str
    name: str
    model: Model
    layout: Layout
    batch: int
    cluster: Topology
    measured_s: float
    assumed: bool = False

    @property
    def label(self) -> str:
        zero = f", ZeRO {self.layout.zero}" if self.layout.zero else ""
        again = {"full": ", all again", "attention": ", scores again"}
        assumed = " *" if self.assumed else ""
        return f"{self.layout.label}{zero}{again.get(self.layout.recompute, '')}{assumed}"


def gpt(layers: int, width: int, heads: int) -> Model:
    return Model(
        layers=layers, width=width, heads=heads, positions=2048, vocabulary=51200,
        plain_attention=True, dropout=True,
    )  # fmt: skip


def megatron_2021() -> Iterator[Run]:
    """Narayanan and others, arXiv 2104.04473, table 1: TFLOP/s per A100, by their formula, which
    counts what is computed again. Sequences in a micro-batch are not in the table."""
    rows = (
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137, 16),
        ("3.6B", 30, 3072, 32, 2, 1, 64, 512, 138, 16),
        ("7.5B", 36, 4096, 32, 4, 1, 128, 512, 142, 16),
        ("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 135, 8),
        ("39.1B", 48, 8192, 64, 8, 2, 512, 1536, 138, 4),
        ("76.1B", 60, 10240, 80, 8, 4, 1024, 1792, 140, 2),
        ("145.6B", 80, 12288, 96, 8, 8, 1536, 2304, 148, 1),
        ("310.1B", 96, 16384, 128, 8, 16, 1920, 2160, 155, 1),
        ("529.6B", 105, 20480, 128, 8, 35, 2520, 2520, 163, 1),
        ("1008B", 128, 25600, 160, 8, 64, 3072, 3072, 163, 1),
    )
    for name, layers, width, heads, tp, pp, ranks, batch, tflops, size in rows:
        model, dp = gpt(layers, width, heads), ranks // tp // pp
        terms = 1 + 2048 / (6 * width) + 51200 / (16 * layers * width)
        flops = 96 * batch * 2048 * layers * width**2 * terms
        layout = Layout(
            tp=tp, pp=pp, dp=dp, micro_batches=batch // dp // size, recompute="full",
            sequence_parallel=False,
        )  # fmt: skip
        measured_s = flops / (ranks * tflops * 1e12)
        yield Run("Megatron-LM 2021", name, model, layout, batch, PRESETS["a100"], measured_s, True)


def megatron_2022() -> Iterator[Run]:
    """Korthikanti and others, arXiv 2205.05198, table 5: seconds of an iteration on A100s."""
    rows = (
        ("22B", 48, 6144, 64, 1, 8, 4, 1, 1, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 64, 64, 64, 3, 18.13, 13.75),
        ("530B", 105, 20480, 128, 35, 280, 280, 280, 3, 49.05, 37.83),
        ("1T", 128, 25600, 160, 64, 512, 512, 512, 1, 94.42, 71.49),
    )
    for name, layers, width, heads, pp, ranks, batch, count, chunks, full_s, present_s in rows:
        for again, measured_s in (("full", full_s), ("attention", present_s)):
            layout = Layout(
                tp=8, pp=pp, dp=ranks // 8 // pp, micro_batches=count, recompute=again,
                sequence_parallel=again == "attention", chunks=chunks,
            )  # fmt: skip
            model = gpt(layers, width, heads)
            yield Run("Megatron-LM 2022", name, model, layout, batch, PRESETS["a100"], measured_s)


def llama_3() -> Iterator[Run]:
    """Grattafiori and others, arXiv 2407.21783, table 4: TFLOP/s per H100. 126 layers, of which the
    first and the last stage have one less: planned as 128. Chunks are assumed."""
    rows = ((1, 64, 8192, 2048, 430), (1, 128, 8192, 2048, 400), (16, 8, 131072, 128, 380))
    for cp, dp, positions, batch, tflops in rows:
        sizes = {"width": 16384, "heads": 128, "key_heads": 8, "inner": 53248}
        sizes |= {"vocabulary": 128256, "positions": positions}
        real, planned = (
            Model(layers=layers, gated=True, tied=False, **sizes)  # type: ignore[arg-type]
            for layers in (126, 128)
        )
        count = batch // dp
        layout = Layout(tp=8, cp=cp, pp=16, dp=dp, zero=2, micro_batches=count, chunks=4)
        measured_s = batch * positions * real.flops_per_token / (layout.ranks * tflops * 1e12)
        yield Run("Llama 3", "405B", planned, layout, batch, PRESETS["h100"], measured_s, True)


def predicted() -> list[tuple[Run, float]]:
    """Every run, and the seconds that the planner expects."""
    calls = {name: Calls(PRESETS[name]) for name in ("a100", "h100")}
    found = []
    for run in [*megatron_2021(), *megatron_2022(), *llama_3()]:
        known = calls[run.cluster.name]
        step = step_time(run.model, run.layout, run.batch, run.cluster, known)
        found.append((run, step.time_s))
    return found


def table(rows: list[tuple[Run, float]]) -> str:
    lines = [
        f"| {run.source} | {run.name} | {run.layout.ranks:,} | {run.label} "
        f"| {run.measured_s:.2f} s | {time_s:.2f} s | {time_s / run.measured_s - 1:+.0%} |"
        for run, time_s in rows
    ]
    median = statistics.median(abs(time_s / run.measured_s - 1) for run, time_s in rows)
    heading = "| source | model | ranks | layout | published | predicted | off by |"
    said = f"Half of them are off by less than {median:.1%}."
    return "\n".join([heading, "|---|---|---:|---|---:|---:|---:|", *lines, "", said])


if __name__ == "__main__":
    print(table(predicted()))
