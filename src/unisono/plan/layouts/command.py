"""`unisono layout`: which layout trains a model fastest on a cluster, and why."""

import dataclasses
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from unisono.errors import Misuse
from unisono.output_files import write_text
from unisono.plan.layouts.model import PRECISIONS, Model, read_model
from unisono.plan.layouts.rank import LayoutChoice, LayoutRanking, explain_layout, rank_layouts
from unisono.plan.progress import show_progress
from unisono.plan.sizes import format_seconds
from unisono.plan.topology import find_topology
from unisono.show.pages import build_page, element, elements, panel, table
from unisono.show.table import LINED, build_table, name_of, print_whole, to_json

_SIZES = {
    "layers": "The model's layers.",
    "width": "The model's hidden size.",
    "heads": "Attention heads.",
    "vocabulary": "Tokens in the vocabulary.",
    "positions": "Tokens of a sequence.",
    "key_heads": "Heads of keys and values.  [default: --heads]",
    "inner": "Hidden units of an MLP.  [default: 4 x --width]",
    "experts": "Experts of a layer.  [default: none]",
    "top_k": "Experts for each token.  [default: 2]",
}
_AXES = {
    "tp": "Only this much tensor parallelism.",
    "cp": "Only this much context parallelism.",
    "pp": "Only this many pipeline stages.",
    "dp": "Only this much data parallelism.",
    "ep": "Only this much expert parallelism.",
    "zero": "Only this ZeRO stage, 0 to 3.",
    "micro_batches": "Only this many microbatches.",
    "chunks": "Only this many model chunks per stage.",
}
_HEADINGS = ("<", "<layout", ">ZeRO", ">micro-batches", ">chunks", "<again", ">step", ">tokens/s",
             ">of peak", ">exposed", ">bubble", ">memory")  # fmt: skip


def _add_numbers(command: Any) -> Any:
    for name, what in reversed((_SIZES | _AXES).items()):
        command = click.option(f"--{name.replace('_', '-')}", type=int, help=what)(command)
    return command


@click.command()
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("-n", "--ranks", type=int, required=True, help="How many ranks.")
@click.option("--batch", type=int, required=True, help="Sequences in a step of all ranks.")
@click.option(
    "--topology", metavar="NAME", default="h100", show_default=True,
    help="a100, h100, summit, ethernet, or a .toml file.",
)  # fmt: skip
@click.option("--gated", is_flag=True, default=None, help="An MLP has three matrices (SwiGLU).")
@click.option(
    "--precision", type=click.Choice([*PRECISIONS]), help="Of the weights.  [default: bf16]"
)
@click.option(
    "--recompute", help='What backward computes again: only "none", "attention" or "full".'
)
@click.option(
    "--top",
    type=int,
    default=10,
    show_default=True,
    help="How many rows to show, one for each tp x cp x pp x dp x ep.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write a page, for a browser.",
)  # fmt: skip
@_add_numbers
def layout(
    config: Path | None, ranks: int, batch: int, topology: str, recompute: str | None, top: int,
    as_json: bool, html: Path | None, **given: Any,
) -> None:  # fmt: skip
    """Rank the layouts of a model on a cluster: tp x cp x pp x dp x ep, memory and time.

    \b
      unisono layout config.json -n 1024 --batch 2048 --topology h100
      unisono layout --layers 32 --width 4096 --heads 32 --vocabulary 32000 \\
          --positions 4096 -n 16 --batch 64 --tp 2 --html layouts.html

    CONFIG is a Hugging Face config.json; sizes of the model that are options go before it.
    """
    fixed = {name: given.pop(name) for name in _AXES} | {"recompute": recompute}
    sizes = {name: value for name, value in given.items() if value is not None}
    try:
        if config is None:
            missing = [f"--{name}" for name in list(_SIZES)[:5] if name not in sizes]
            if missing:
                raise ValueError(f"give a config.json, or {', '.join(missing)}")
        model = Model(**sizes) if config is None else read_model(config, **sizes)
        chosen = {name: value for name, value in fixed.items() if value is not None}
        with show_progress(ranks) as say:
            ranking = rank_layouts(model, find_topology(topology), ranks, batch, chosen, say)
        if html is not None:
            write_text(html, _page(ranking, top))
    except (ValueError, OSError) as error:
        raise Misuse(str(error)) from error
    if as_json:
        click.echo(to_json(_as_json(ranking, top)))
    else:
        _print(Console(highlight=False), ranking, top)
    if html is not None:
        click.echo(f"Wrote {html}.", err=as_json)


def _title(ranking: LayoutRanking) -> str:
    return (
        f"{ranking.model.parameters / 1e9:.3g} billion parameters on {ranking.ranks:,} ranks of "
        f"{ranking.cluster.name}, {ranking.batch:,} sequences a step"
    )


def _row(ranking: LayoutRanking, number: int, choice: LayoutChoice) -> tuple[str, ...]:
    layout, step = choice.layout, choice.step
    exposed_s = sum(step.exposed_s.values())
    return (
        *(str(number), layout.label, str(layout.zero), str(layout.micro_batches)),
        *(str(layout.chunks), layout.recompute, format_seconds(step.time_s)),
        *(f"{step.tokens_per_s:,.0f}", f"{step.flops_per_s / ranking.cluster.flops_per_s:.0%}"),
        *(f"{part_s / step.time_s:.0%}" for part_s in (exposed_s, step.bubble_s)),
        f"{choice.memory_bytes / 1e9:.3g} GB",
    )


def _parts(choice: LayoutChoice) -> list[tuple[str, str]]:
    """The best layout's time and memory, by part."""
    times = [(name, format_seconds(part)) for name, part in choice.step.parts_s().items() if part]
    held = [(name, f"{part / 1e9:.3g} GB") for name, part in choice.memory.items() if part]
    return [*times, *held]


def _left_out(ranking: LayoutRanking, most: int = 3) -> list[str]:
    count = len(ranking.left_out)
    if not count:
        return []
    closest = [f"{layout.label}, ZeRO {layout.zero}: {why}" for layout, why in ranking.left_out]
    return [f"{count:,} layouts do not fit into memory; the closest:", *closest[:most]]


def _print(console: Console, ranking: LayoutRanking, top: int) -> None:
    console.print(_title(ranking))
    rows = (_row(ranking, n, each) for n, each in enumerate(ranking.best_of_axes()[:top], 1))
    print_whole(console, build_table(_HEADINGS, rows, **LINED))
    console.print(explain_layout(ranking))
    console.print("The fastest: " + ", ".join(f"{name} {value}" for name, value in
                                              _parts(ranking.best)) + ".")  # fmt: skip
    for line in _left_out(ranking):
        console.print(line)


def _choice_as_json(choice: LayoutChoice) -> dict[str, Any]:
    step = choice.step
    return {
        "layout": dataclasses.asdict(choice.layout),
        "time_s": step.time_s,
        "tokens_per_s": step.tokens_per_s,
        "flops_per_s": step.flops_per_s,
        "parts_s": step.parts_s(),
        "hidden_s": step.hidden_s,
        "memory_bytes": choice.memory,
    }


def _as_json(ranking: LayoutRanking, top: int) -> dict[str, Any]:
    return {
        "model": ranking.model,
        "parameters": ranking.model.parameters,
        "topology": ranking.cluster.name,
        "ranks": ranking.ranks,
        "batch": ranking.batch,
        "why": explain_layout(ranking),
        "layouts": [_choice_as_json(choice) for choice in ranking.best_of_axes()[:top]],
        "left_out": [
            {"layout": dataclasses.asdict(layout), "why": why}
            for layout, why in ranking.left_out[:top]
        ],
        "left_out_in_all": len(ranking.left_out),
    }


def _page(ranking: LayoutRanking, top: int) -> str:
    head = element("header", element("h1", "Layouts"), element("p", _title(ranking)))
    rows = [
        element("tr", elements("td", _row(ranking, number, choice)))
        for number, choice in enumerate(ranking.best_of_axes()[:top], 1)
    ]
    parts = [element("tr", elements("td", row)) for row in _parts(ranking.best)]
    body = [
        head,
        panel("The fastest first", table(map(_heading, _HEADINGS), rows)),
        panel("Why", element("p", explain_layout(ranking)), table([], parts)),
    ]
    if ranking.left_out:
        body.append(panel("What does not fit", elements("p", _left_out(ranking, top))))
    return build_page("Layouts", [element("main", *body)])


def _heading(heading: str) -> str:
    return element("th", name_of(heading))
