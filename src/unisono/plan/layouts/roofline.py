"""How long computation takes, by a roofline (Williams, Waterman and Patterson, 2009): as long as
the slower of the arithmetic and the memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unisono.plan.layouts.model import PRECISIONS, Model
from unisono.plan.topology import Topology

MATMUL_REACH, MEMORY_REACH = 0.73, 0.80
"""What large products and copies reach of a device's peaks: one pair of numbers for all devices
and runs (docs/layouts.md compares)."""


def check_device(cluster: Topology) -> None:
    """Raise ValueError if the topology does not describe its devices."""
    names = ("flops_per_s", "memory_bytes", "memory_bytes_per_s")
    missing = [name for name in names if math.isinf(getattr(cluster, name))]
    if missing:
        raise ValueError(
            f"topology {cluster.name} lacks {', '.join(missing)} of a device: "
            "`unisono doctor --topology FILE` measures this machine"
        )


def matmul_s(
    rows: float, inner: float, columns: float, cluster: Topology, element: int = 2
) -> float:
    """How long a device of `cluster` takes to multiply a matrix of `rows` x `inner` by one of
    `inner` x `columns`.

    `element` is the number of bytes of an element. Raises ValueError if the topology does not
    describe its devices. See also `against_the_wire`.

    >>> from unisono import plan
    >>> from unisono.plan import layouts
    >>> h100 = plan.find_topology("h100")
    >>> wide, thin = (layouts.matmul_s(rows, 8192, 8192, h100) for rows in (8192, 1))
    >>> wide / thin < 100  # one row is bound by memory: the matrix must be read
    True
    """
    check_device(cluster)
    flops = 2.0 * rows * inner * columns
    moved = element * (rows * inner + inner * columns + rows * columns)
    return max(
        flops / (cluster.flops_per_s * MATMUL_REACH),
        moved / (cluster.memory_bytes_per_s * MEMORY_REACH),
    )


def memory_s(moved_bytes: float, cluster: Topology) -> float:
    """How long a device takes to read or write so many bytes of its memory."""
    return moved_bytes / (cluster.memory_bytes_per_s * MEMORY_REACH)


def layer_s(model: Model, tokens: float, tp: int, cluster: Topology, sequence_parallel: bool = True
            ) -> tuple[float, float]:  # fmt: skip
    """Forward of one layer on a tp-th of it, for `tokens`: (everything, attention's core alone)."""
    element, width = PRECISIONS[model.precision][0], model.width

    def product(inner: float, columns: float, times: float = 1.0) -> float:
        return matmul_s(tokens * times, inner, columns, cluster, element)

    active = model.top_k if model.experts else 1
    wide = model.inner / tp
    work = product(width, (model.query_width + 2 * model.key_width) / tp)
    work += product(model.query_width / tp, width)
    work += product(width, (2 if model.gated else 1) * wide, active) + product(wide, width, active)
    # Elementwise: two norms, two sums with the residual, the activation.
    divided = tp if sequence_parallel else 1
    passed = (
        element * (4 + 6) * width / divided + element * (3 if model.gated else 2) * wide * active
    )
    passed += 2 * model.dropout * width / divided
    core_flops = 4.0 * tokens * model.positions * model.query_width / tp
    if model.plain_attention:  # the whole square; scores are written and read
        passes = 6 * element + model.dropout * (2 * element + 1)
        core = core_flops / (cluster.flops_per_s * MATMUL_REACH)
        core += memory_s(tokens * model.positions * model.heads / tp * passes, cluster)
    else:  # half of it, in a fused kernel
        core = core_flops / 2 / (cluster.flops_per_s * MATMUL_REACH)
    return work + memory_s(tokens * passed, cluster) + core, core


@dataclass(frozen=True)
class Against:
    """What computes (`what`: "layer" or "step"), for `computing_s`, against `wire_s` of
    communication, and which one is longer. See also `against_the_wire`.

    >>> from unisono.plan import layouts
    >>> pair = layouts.Against("layer", computing_s=2e-3, wire_s=1e-3)
    >>> pair.bound, pair.intensity
    ('computing', 2.0)
    """

    what: str
    computing_s: float
    wire_s: float

    @property
    def bound(self) -> str:
        """ "computing" or "wire"."""
        return "wire" if self.wire_s > self.computing_s else "computing"

    @property
    def intensity(self) -> float:
        """Seconds of computing for a second on the wire."""
        return self.computing_s / self.wire_s if self.wire_s else math.inf


def against_the_wire(
    model: Model, cluster: Topology, *, tp: int = 1, dp: int = 1, tokens: int | None = None
) -> tuple[Against, ...]:
    """What bounds a layer of `model` split over `tp` ranks of `cluster`, and a step of `dp` ranks:
    computation or wire.

    `tokens` is how many a rank works on at once, one sequence by default. A layer forward is
    compared with its two all_reduces; backward of all layers with the all_reduce of their
    gradients. Raises ValueError if the topology does not describe its devices. See also `matmul_s`.

    >>> from unisono import plan
    >>> from unisono.plan import layouts
    >>> model = layouts.Model(layers=32, width=4096, heads=32, positions=4096, vocabulary=32000)
    >>> layer, step = layouts.against_the_wire(model, plan.find_topology("h100"), tp=2, dp=16)
    >>> layer.bound, step.bound
    ('computing', 'computing')
    """
    from unisono.plan.layouts.calls import Calls
    from unisono.plan.layouts.memory import Layout

    calls, count = Calls(cluster), tokens or model.positions
    weight_bytes, gradient_bytes, _ = PRECISIONS[model.precision]
    layout = Layout(tp=tp, dp=dp)
    forward_s, _ = layer_s(model, count, tp, cluster)
    gradients = gradient_bytes * (model.parameters - model.embedding_parameters) / tp
    return (
        Against(
            "layer",
            forward_s,
            2 * calls.time_s("all_reduce", layout, "tp", count * model.width * weight_bytes),
        ),
        Against(
            "step",
            2 * forward_s * model.layers,
            calls.time_s("all_reduce", layout, "dp", gradients),
        ),
    )
