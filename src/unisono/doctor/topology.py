"""`unisono doctor --topology FILE`: this machine as a topology, measured between two ranks.

Latency is half of a ping-pong of 8 bytes, bandwidth comes from one of 64 MiB. Each of the two ranks
adds, copies and trains a transformer's layer on one thread while the other does the same. Medians.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from unisono.launcher.functions import launch
from unisono.output_files import write_text
from unisono.plan.layouts.model import Model
from unisono.plan.layouts.roofline import MATMUL_REACH, MEMORY_REACH, layer_s
from unisono.plan.sizes import format_seconds
from unisono.plan.topology import Topology

_MANY, _FEW = 2000, 12
_LARGE = 64 << 20
_LAYER = Model(layers=1, width=256, heads=4, positions=64, vocabulary=1, precision="float32")
_BATCH = 16
"""Sequences in the layer that is measured."""


def write_topology(path: Path) -> str:
    """Measure this machine, write the file, and return a sentence about it."""
    found = launch(_measure, 2, threads=1)[0]
    small_s, large_s, call_s, add_s, copy_s, one_s, batch_s, ring_s = found
    cores = len(os.sched_getaffinity(0))
    topology = Topology(
        path.stem,
        node_size=cores,
        inside_latency_s=small_s,
        inside_bytes_per_s=_LARGE / max(large_s - small_s, 1e-9),
        reduce_bytes_per_s=_LARGE / add_s,
        call_s=max(0.0, call_s - small_s),
        card_bytes_per_s=1e12,
        memory_bytes=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // cores),
        memory_bytes_per_s=2 * _LARGE / copy_s / MEMORY_REACH,
        devices=cores,
        source=f"measured between two ranks: {platform.machine()}, {cores} cores, float32",
    )
    sequence_s = (batch_s - one_s) / (_BATCH - 1)
    topology = dataclasses.replace(
        topology,
        flops_per_s=_peak(topology, sequence_s),
        layer_call_s=max(0.0, one_s - sequence_s),
        ring_call_s=ring_s / 2,
    )
    write_text(path, topology.to_toml())
    return (
        f"wrote {path}: {format_seconds(small_s)} a hop, "
        f"{topology.inside_bytes_per_s / 1e9:.1f} GB/s; a rank computes "
        f"{topology.flops_per_s * MATMUL_REACH / 1e9:.0f} GFLOP/s and copies at "
        f"{2e-9 * _LARGE / copy_s:.1f} GB/s"
    )


def _peak(topology: Topology, sequence_s: float) -> float:
    """The peak with which layouts expect of the layer what was measured for a sequence more: its
    products take a time that is inverse to the peak, and the rest always the same."""

    def expected_s(flops_per_s: float) -> float:
        device = dataclasses.replace(topology, flops_per_s=flops_per_s)
        forward_s, core_s = layer_s(_LAYER, _LAYER.positions, 1, device)
        return 3 * forward_s + core_s / 2

    products = 2e9 * (expected_s(1e9) - expected_s(2e9))
    return products / max(sequence_s - (expected_s(1e9) - products / 1e9), sequence_s / 4)


def _measure() -> tuple[float, ...]:
    """On each of two ranks, seconds: of 8 bytes, of _LARGE bytes, of an all_reduce of 8 bytes, of
    adding _LARGE bytes, of copying them, of a layer with one and with _BATCH sequences, and of
    ring attention over a few positions of each."""
    import numpy
    import torch

    from unisono.training.attention import ring_attention
    from unisono.world.world import init

    comm = init()

    def median_s(work: Callable[[], object], times: int) -> float:
        laps = []
        for _ in range(times):
            begin_s = time.perf_counter()
            work()
            laps.append(time.perf_counter() - begin_s)
        return statistics.median(laps)

    def ping_pong_s(size: int, times: int) -> float:
        tensor = numpy.zeros(size, numpy.uint8)

        def there_and_back() -> None:
            if comm.rank == 0:
                comm.send(tensor, 1)
            comm.recv(tensor, 1 - comm.rank)
            if comm.rank == 1:
                comm.send(tensor, 0)

        return median_s(there_and_back, times) / 2

    mine, other = torch.ones(_LARGE // 4), torch.ones(_LARGE // 4)
    small = torch.ones(2)
    layer = torch.nn.TransformerEncoderLayer(
        _LAYER.width, _LAYER.heads, _LAYER.inner, 0.0, "gelu", batch_first=True, norm_first=True
    )

    def train(sequences: int) -> None:
        layer(torch.ones(sequences, _LAYER.positions, _LAYER.width)).sum().backward()

    heads = torch.ones(_BATCH, _LAYER.heads, 4, _LAYER.width // _LAYER.heads, requires_grad=True)

    def go_round() -> None:
        ring = ring_attention(heads, heads, heads, comm, causal=True, order="zigzag")
        torch.autograd.backward(ring.sum())

    found = [ping_pong_s(8, _MANY), ping_pong_s(_LARGE, _FEW)]
    found.append(median_s(lambda: comm.all_reduce(small), _MANY))
    alone: list[Callable[[], object]] = [
        lambda: mine.add_(other),
        lambda: mine.copy_(other),
        lambda: train(1),
        lambda: train(_BATCH),
        go_round,
    ]
    for work in alone:
        comm.barrier()
        found.append(median_s(work, _FEW))
    return tuple(found)
