"""How long a training step takes, part by part, under the rules of docs/layouts.md."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.plan.layouts.calls import Calls
from unisono.plan.layouts.memory import (
    Layout,
    check_layout,
    parameters_on_rank,
    tokens_per_micro_batch,
)
from unisono.plan.layouts.model import PRECISIONS, Model
from unisono.plan.layouts.roofline import check_device, layer_s, matmul_s, memory_s
from unisono.plan.topology import Topology


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step: `computing_s`, `bubble_s` (stages that wait for others),
    `optimizer_s`, and of each kind of communication what is `exposed_s` and what is `hidden_s`
    behind computing. All ranks together work on `tokens`; each does `flops_per_rank`. See also
    `step_time`.

    >>> from unisono.plan import layouts
    >>> step = layouts.StepTime(0.8, 0.1, 0.0, {"dp": 0.1}, {"dp": 0.3}, 1000.0, 1e12)
    >>> step.time_s, step.tokens_per_s, step.flops_per_s
    (1.0, 1000.0, 1000000000000.0)
    """

    computing_s: float
    bubble_s: float
    optimizer_s: float
    exposed_s: dict[str, float]
    hidden_s: dict[str, float]
    tokens: float
    flops_per_rank: float

    @property
    def time_s(self) -> float:
        """The whole step."""
        return self.computing_s + self.bubble_s + self.optimizer_s + sum(self.exposed_s.values())

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens / self.time_s

    @property
    def flops_per_s(self) -> float:
        """Per rank, without what is computed again: for the utilisation (MFU), divide by the
        device's peak."""
        return self.flops_per_rank / self.time_s

    def parts_s(self) -> dict[str, float]:
        """What the time consists of."""
        parts = {"computing": self.computing_s, "bubble": self.bubble_s}
        return parts | {"optimizer": self.optimizer_s} | self.exposed_s


def step_time(
    model: Model, layout: Layout, batch: int, cluster: Topology, calls: Calls | None = None
) -> StepTime:
    """The time of a step of `model` in a `layout`, with a global `batch` of sequences, on
    `cluster`; nothing is run.

    Computation follows a roofline, every collective is simulated on its group in the mesh; `calls`
    keeps these times for several layouts. Raises ValueError if the layout does not fit the model or
    the batch, or if the topology does not describe its devices. See also `memory_by_part`,
    `Layout`.

    >>> from unisono import plan
    >>> from unisono.plan import layouts
    >>> model = layouts.Model(layers=32, width=4096, heads=32, positions=4096, vocabulary=32000)
    >>> h100 = plan.find_topology("h100")
    >>> one, both = (layouts.step_time(model, layouts.Layout(dp=n), 16, h100) for n in (1, 2))
    >>> 1 < one.time_s / both.time_s < 2
    True
    """
    check_layout(model, layout, batch)
    check_device(cluster)
    calls = calls or Calls(cluster)
    weight_bytes, gradient_bytes, state_bytes = PRECISIONS[model.precision]
    tokens = tokens_per_micro_batch(model, layout, batch)
    layers, count, tp = model.layers / layout.pp, layout.micro_batches, layout.tp

    # Computing, of the stage that has the output's products besides its layers.
    forward_s, core_s = layer_s(model, tokens, tp, cluster, layout.sequence_parallel)
    again_s = {"none": 0.0, "attention": core_s, "full": forward_s}[layout.recompute]
    if not model.plain_attention and layout.recompute != "full":
        again_s = core_s / 2  # a fused kernel computes scores again
    output_s = matmul_s(tokens, model.width, model.vocabulary / tp, cluster, weight_bytes)
    output_s += memory_s(tokens * model.vocabulary / tp * 4 * weight_bytes, cluster)
    calls_s = cluster.layer_call_s + (layout.cp * cluster.ring_call_s if layout.cp > 1 else 0.0)
    layers_s = layers * (3 * forward_s + again_s + calls_s)
    computing_s = count * (layers_s + 3 * output_s)

    # Communication inside a layer: of each micro-batch, all exposed but the ring's of cp.
    exposed, hidden = {}, {}
    activation = tokens * model.width * weight_bytes
    passes = 3 if layout.recompute == "full" else 2
    of_layers = count * layers
    exposed["tp"] = of_layers * passes * 2 * calls.time_s("all_reduce", layout, "tp", activation)
    keys = 2 * tokens * model.key_width / tp * weight_bytes
    ring_s = (layout.cp - 1) * calls.time_s("send", layout, "cp", keys)
    beside_s = core_s * (layout.cp - 1) / layout.cp
    # forward once, backward with the gradients behind them; each hides behind attention's core
    rounds = ((ring_s, beside_s), (2 * ring_s, 2 * beside_s))
    exposed["cp"] = of_layers * sum(max(0.0, wire - core) for wire, core in rounds)
    hidden["cp"] = of_layers * sum(min(wire, core) for wire, core in rounds)
    routed = activation * model.top_k / tp if model.experts else 0.0
    exposed["ep"] = of_layers * passes * 2 * calls.time_s("all_to_all", layout, "ep", routed)

    # The pipeline: a message each way per micro-batch and chunk, and the bubble (Narayanan, 2021).
    sent = activation / tp if layout.sequence_parallel else activation
    exposed["pp"] = count * layout.chunks * 2 * calls.time_s("send", layout, "pp", sent)
    per_micro_batch_s = (layers_s * count + sum(exposed.values())) / count
    bubble_s = (layout.pp - 1) / layout.chunks * per_micro_batch_s

    # Gradients and weights between ranks that have the same parameters.
    common, experts = parameters_on_rank(model, layout, 1.0)
    replicas = layout.dp * layout.cp
    both = ((common, "ep cp dp", replicas * layout.ep), (experts, "cp dp", replicas))
    reduce_s = sum(
        calls.time_s("all_reduce", layout, axes, each * gradient_bytes) for each, axes, _ in both
    )
    gather_s = sum(
        calls.time_s("all_reduce", layout, axes, each * weight_bytes) / 2 for each, axes, _ in both
    )
    forward_all_s, backward_all_s = layers * forward_s, layers * (2 * forward_s + again_s)
    travels: tuple[tuple[float, float], ...]
    if layout.zero == 0:
        travels = ((reduce_s, backward_all_s),)
    elif layout.zero < 3:  # reduce_scatter in the last backward (2: in each), gathered in forward
        reductions = count if layout.zero == 2 else 1
        travels = ((gather_s, forward_all_s), *[(reduce_s / 2, backward_all_s)] * reductions)
    else:  # layer by layer, for every micro-batch
        travels = ((gather_s, forward_all_s), (gather_s + reduce_s / 2, backward_all_s)) * count
    # What is in flight last has nothing to hide behind: one layer's share.
    left = [max(wire - beside, wire / layers) for wire, beside in travels]
    exposed["dp"] = sum(left)
    hidden["dp"] = sum(wire for wire, _ in travels) - exposed["dp"]

    updated = sum(each / (size if layout.zero else 1) for each, _, size in both)
    optimizer_s = memory_s(updated * (2 * state_bytes + gradient_bytes + weight_bytes), cluster)
    whole = float(batch * model.positions)
    return StepTime(
        computing_s, bubble_s, optimizer_s, exposed, hidden, whole,
        whole * model.flops_per_token / layout.ranks,
    )  # fmt: skip
