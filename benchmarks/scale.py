"""The figures of docs/scale.md: latency against GPUs, and the comparison with published points.

    python benchmarks/scale.py             write the tables into docs/scale.md, and docs/images
    python benchmarks/scale.py --check     say whether the tables there are up to date

Everything is computed; nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono.plan import PRESETS, Topology, find, simulate
from unisono.plan.choose import rank_sizes
from unisono.plan.draw import to_svg
from unisono.plan.sizes import format_seconds, parse_sizes
from unisono.plan.tables import save_chart, series

DOCS = Path(__file__).resolve().parent.parent / "docs"
GPUS = (24, 96, 384, 1536, 6144, 24_576)
ALGORITHMS = ("ring", "binomial", "double_tree")

# Where, which algorithm, ranks, nodes, the microseconds that NCCL counts for posting a message (2
# beside AMD's processors), measured microseconds. The ranks of nccl 1453 follow from its table
# (busbw / algbw = 4.99 / 2.60 = 2(n - 1)/n gives 24); that nodes have eight is assumed.
MEASURED = (
    ("[nccl 812](https://github.com/NVIDIA/nccl/issues/812)", "ring", 16, 2, 2.0, 93.1),
    ("[nccl 1453](https://github.com/NVIDIA/nccl/issues/1453)", "tree", 24, 3, 1.0, 64.18),
)


# NCCL's own formulas for the latency of a ring and of a tree, to compare simulated times with:
# constants and formulas are those of NCCL 2.30.7, src/graph/tuning.cc.
PROTOCOLS = ("LL", "LL128", "Simple")
CALL_US: Mapping[str, Sequence[float]] = {"Tree": (6.8, 14.0, 8.4), "Ring": (6.6, 14.0, 8.4)}
"""The fixed cost of a call, by protocol."""
HOP_US: Mapping[str, Mapping[str, Sequence[float]]] = {
    "Tree": {"inside": (0.6, 1.25, 4.0), "between": (5.0, 8.5, 14.0)},
    "Ring": {"inside": (0.6, 1.9, 3.4), "between": (2.7, 4.0, 14.0)},
}
"""The latency of a hop over NVLink and over the network, by protocol."""


def ring_latency_us(ranks: int, nodes: int, protocol: str, post_us: float = 1.0) -> float:
    """The latency of an all_reduce: twice around a ring. A hop between nodes takes at least as long
    as posting a message. With one rank per node nothing hides the network: a hop costs a tree's."""
    which = PROTOCOLS.index(protocol)
    near_us = HOP_US["Ring"]["inside"][which]
    if nodes > 1:
        near_us = max(near_us, post_us * (3 if protocol == "Simple" else 1))
    far_us = HOP_US["Tree" if nodes == ranks else "Ring"]["between"][which]
    near, far = 2 * (ranks - nodes), 2 * (nodes - 1)
    return CALL_US["Ring"][which] + near * near_us + far * far_us


def tree_latency_us(ranks: int, nodes: int, protocol: str) -> float:
    """The latency up and down a chain in each node and a tree between the nodes."""
    which = PROTOCOLS.index(protocol)
    near, far = ranks // nodes - 1, nodes.bit_length() - 1
    hops = HOP_US["Tree"]
    one_way_us = near * hops["inside"][which] + far * hops["between"][which]
    return CALL_US["Tree"][which] + 2 * one_way_us


def summit(protocol: str, tree: bool) -> Topology:
    """Summit's nodes with the hop latencies that NCCL's tuner has for a protocol."""
    algorithm, which = "Tree" if tree else "Ring", PROTOCOLS.index(protocol)
    hops = HOP_US[algorithm]
    return Topology(
        f"summit, {protocol}",
        node_size=6,
        inside_latency_s=hops["inside"][which] * 1e-6,
        inside_bytes_per_s=PRESETS["summit"].inside_bytes_per_s,
        between_latency_s=hops["between"][which] * 1e-6,
        card_bytes_per_s=PRESETS["summit"].card_bytes_per_s,
        cards=2,
        call_s=CALL_US[algorithm][which] * 1e-6,
    )


def simulated_s(name: str, gpus: int, protocol: str) -> float:
    """An all_reduce of 8 bytes."""
    schedule = find("all_reduce", name).schedule(gpus)
    return simulate(schedule, summit(protocol, name != "ring"), 8).time_s


def ratio_table() -> str:
    """24,576 GPUs with every set of constants."""
    lines = [
        "| hops as in NCCL's | ring | binomial tree | double tree | ring / double tree "
        "| NCCL's formulas: ring | tree | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for protocol in PROTOCOLS:
        times = [simulated_s(name, 24_576, protocol) for name in ALGORITHMS]
        ring = ring_latency_us(24_576, 4096, protocol) * 1e-6
        tree = tree_latency_us(24_576, 4096, protocol) * 1e-6
        cells = [
            protocol,
            *map(format_seconds, times),
            f"{times[0] / times[2]:.0f}",
            format_seconds(ring),
            format_seconds(tree),
            f"{ring / tree:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def scale_table(times: dict[str, list[float]]) -> str:
    lines = [
        "| GPUs | ring | binomial tree | double tree | ring / double tree |",
        "|---|---|---|---|---|",
    ]
    for index, gpus in enumerate(GPUS):
        here = [times[name][index] for name in ALGORITHMS]
        cells = [f"{gpus:,}", *map(format_seconds, here), f"{here[0] / here[2]:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measured_table() -> str:
    lines = [
        "| source | algorithm | GPUs | measured | LL | LL128 | Simple |",
        "|---|---|---|---|---|---|---|",
    ]
    for source, name, ranks, nodes, post_us, measured_us in MEASURED:
        cells = [source, name, f"{nodes} x {ranks // nodes}", f"{measured_us:.3g} us"]
        for protocol in PROTOCOLS:
            model_us = (
                ring_latency_us(ranks, nodes, protocol, post_us=post_us)
                if name == "ring"
                else tree_latency_us(ranks, nodes, protocol)
            )
            cells.append(f"{model_us:.3g} us ({model_us / measured_us - 1:+.0%})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_tables(text: str, tables: dict[str, str]) -> str:
    """The page with each table between its two marks."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        _, mark, after = rest.partition(end)
        if not mark:
            raise SystemExit(f"docs/scale.md has no marks for the table {name}")
        text = before + begin + table + "\n" + end + after
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    times = {name: [simulated_s(name, gpus, "LL128") for gpus in GPUS] for name in ALGORITHMS}
    page = DOCS / "scale.md"
    text = page.read_text()
    tables = {"ratios": ratio_table(), "scale": scale_table(times), "measured": measured_table()}
    fresh = with_tables(text, tables)
    if check:
        if fresh != text:
            sys.exit("docs/scale.md is not what comes out now: run python benchmarks/scale.py")
        return
    page.write_text(fresh)
    images = DOCS / "images"
    title = "all_reduce of 8 bytes, nodes of 6 GPUs, LL128 hops"
    save_chart(images / "scale.svg", GPUS, times, title, "GPUs")
    sizes = parse_sizes("8:1G", factor=4)
    rankings = rank_sizes("all_reduce", 64, sizes, PRESETS["h100"])
    title = "all_reduce on 64 ranks, 8 nodes, h100"
    save_chart(images / "crossover.svg", sizes, series(rankings), title)
    for name in ("ring", "double_tree"):
        ranks = 4 if name == "ring" else 8
        picture = to_svg(find("all_reduce", name).schedule(ranks))
        (images / f"{name}.svg").write_text(picture)
    print(f"wrote {page} and four pictures beside it")


if __name__ == "__main__":
    main()
