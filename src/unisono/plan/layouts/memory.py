"""What a rank must hold in memory, part by part."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from unisono.plan.layouts.model import PRECISIONS, Model

RECOMPUTE = ("none", "attention", "full")


@dataclass(frozen=True)
class Layout:
    """How ranks share a step: `tp` x `cp` x `pp` x `dp` x `ep` ranks, tp the fastest axis, as in
    `ProcessGroupManager`.

    `zero` is the ZeRO stage: 0 none, 1 optimizer state, 2 also gradients, 3 also weights are
    sharded over the ranks that have the same parameters. A rank's batch is cut into
    `micro_batches`. `recompute` is what backward computes again: "none", "attention" (the scores)
    or "full" (the layer). `sequence_parallel` cuts what tp alone leaves whole along the sequence.
    `chunks` is the number of model chunks per pipeline stage (interleaving). Raises ValueError for
    values that do not fit.

    >>> from unisono.plan import layouts
    >>> layouts.Layout(tp=2, dp=4).ranks
    8
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    zero: int = 0
    micro_batches: int = 1
    recompute: str = "none"
    sequence_parallel: bool = True
    chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "pp", "dp", "ep", "micro_batches", "chunks"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, not {value!r}")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"the ZeRO stage is 0, 1, 2 or 3, not {self.zero!r}")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute is {', '.join(RECOMPUTE)}, not {self.recompute!r}")

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.tp * self.cp * self.pp * self.dp * self.ep

    @property
    def label(self) -> str:
        """The axes with more than one rank: "tp 8, pp 16, dp 64"."""
        axes = [(name, getattr(self, name)) for name in ("tp", "cp", "pp", "dp", "ep")]
        return ", ".join(f"{name} {size}" for name, size in axes if size > 1) or "one rank"

    def misfit(self, model: Model, batch: int) -> str:
        """Why `model` with a global `batch` of sequences cannot be laid out so, or ""."""
        data = self.dp * self.ep * self.micro_batches
        rules = (
            ("tp", self.tp, model.heads, "heads"),
            ("tp", self.tp, model.inner, "inner units"),
            ("cp", self.cp, model.positions, "positions"),
            ("pp x chunks", self.pp * self.chunks, model.layers, "layers"),
            ("ep", self.ep, model.experts, "experts"),
            ("dp x ep x micro-batches", data, batch, "sequences of the batch"),
        )
        for name, size, number, what in rules:
            if size > 1 and (number % size or not number):
                return f"{name} = {size} does not divide {number} {what}"
        if self.chunks > 1 and self.micro_batches % self.pp:
            return f"interleaving needs a multiple of {self.pp} micro-batches"
        return ""


def check_layout(model: Model, layout: Layout, batch: int) -> None:
    """Raise ValueError where `layout.misfit` has something to say."""
    why = layout.misfit(model, batch)
    if why:
        raise ValueError(f"{layout.label}: {why}")


def memory_by_part(model: Model, layout: Layout, batch: int) -> dict[str, float]:
    """The bytes that the rank with most to hold of `model` in a `layout` needs, by part:
    "weights", "gradients", "optimizer", "activations", "logits", "gathered" (whole layers, with
    ZeRO 3).

    `batch` is the number of sequences in a step of all ranks. The formulas stand in
    docs/layouts.md. Raises ValueError if the layout does not fit the model or the batch. See also
    `step_time`, `Layout`.

    >>> from unisono.plan import layouts
    >>> model = layouts.Model(layers=2, width=64, heads=4, positions=32, vocabulary=128)
    >>> held = layouts.memory_by_part(model, layouts.Layout(dp=4, zero=1), batch=8)
    >>> held["optimizer"] * 4 == 12 * model.parameters
    True
    """
    check_layout(model, layout, batch)
    stages = [_stage(model, layout, batch, first, first != (layout.pp > 1))
              for first in ((True, False) if layout.pp > 1 else (True,))]  # fmt: skip
    return max(stages, key=lambda parts: sum(parts.values()))


def parameters_on_rank(model: Model, layout: Layout, outer: float) -> tuple[float, float]:
    """Of a stage with `outer` embeddings: parameters that are shared by dp, cp and ep, and those
    of experts, which are shared by dp and cp."""
    layers = model.layers / layout.pp
    common = model.attention_parameters / layout.tp + 2 * model.width + model.width * model.experts
    network = model.network_parameters / layout.tp
    if model.experts:
        experts = layers * network * model.experts / layout.ep
    else:
        common, experts = common + network, 0.0
    return layers * common + outer * model.embedding_parameters / layout.tp, experts


def _stage(
    model: Model, layout: Layout, batch: int, is_first: bool, is_last: bool
) -> dict[str, float]:
    weight_bytes, gradient_bytes, state_bytes = PRECISIONS[model.precision]
    outer = 1.0 if model.tied and is_first and is_last else float(is_first) + float(is_last)
    common, experts = parameters_on_rank(model, layout, outer)
    replicas = layout.dp * layout.cp

    def held(stage: int, each: int) -> float:
        cut = layout.zero >= stage
        return each * (
            common / (replicas * layout.ep if cut else 1) + experts / (replicas if cut else 1)
        )

    tokens = tokens_per_micro_batch(model, layout, batch)
    layers = model.layers / layout.pp
    in_flight = float(min(layout.pp, layout.micro_batches)) if is_first else 1.0
    if layout.chunks > 1 and is_first:
        in_flight *= 1 + (layout.pp - 1) / (layout.pp * layout.chunks)
    kept = activation_bytes(model, layout) * layers * in_flight
    if layout.recompute == "full":  # the layer that is being computed again is there as a whole
        kept += activation_bytes(model, dataclasses.replace(layout, recompute="none"))
    layer = (common - outer * model.embedding_parameters / layout.tp + experts) / layers
    return {
        "weights": held(3, weight_bytes),
        "gradients": held(2, gradient_bytes),
        "optimizer": held(1, state_bytes),
        "activations": kept * tokens,
        "logits": tokens * model.vocabulary / layout.tp * (weight_bytes + 4) if is_last else 0.0,
        "gathered": 2 * weight_bytes * layer if layout.zero == 3 and replicas > 1 else 0.0,
    }


def tokens_per_micro_batch(model: Model, layout: Layout, batch: int) -> float:
    """How many positions of how many sequences a rank works on at once."""
    sequences = batch / (layout.dp * layout.ep * layout.micro_batches)
    return sequences * model.positions / layout.cp


def activation_bytes(model: Model, layout: Layout) -> float:
    """What forward keeps of one token in one layer (Korthikanti et al., 2022, whose 34 + 5as/h
    bytes these are for their model: two-matrix networks, dropout, as many keys as queries)."""
    element, mask = PRECISIONS[model.precision][0], int(model.dropout)
    whole = model.width * (4 * element + 2 * mask)  # inputs and outputs of two norms
    divided = layout.tp if layout.sequence_parallel else 1
    if layout.recompute == "full":
        return model.width * element / divided
    active = model.top_k if model.experts else 1
    network = element * model.inner * (3 if model.gated else 2) * active
    attention = element * 2 * (model.query_width + model.key_width)
    scores = 0.0
    if model.plain_attention and layout.recompute == "none":
        scores = model.heads * model.positions * (element * (2 if mask else 1) + mask)
    return whole / divided + (network + attention + scores) / layout.tp
