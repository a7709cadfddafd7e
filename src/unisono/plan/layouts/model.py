"""A transformer as a planner sees it: sizes, from which parameters and work follow."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

PRECISIONS = {"bf16": (2, 2, 12), "float32": (4, 4, 8)}
"""Bytes of a weight, of its gradient, and of its optimizer state: for bf16 a float32 copy and
Adam's two moments (Rajbhandari et al., ZeRO, 2020)."""


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer of `layers` of a `width`, for sequences of `positions` tokens of a
    `vocabulary`.

    `heads` share `key_heads` (all their own by default), each of `head_width`. A layer's network
    has `inner` units, 4 x `width` by default, with two matrices or, if `gated`, three. With
    `experts` a layer has that many networks, and a token goes through `top_k`. `tied` says whether
    the input's embedding is also the output's, `plain_attention` whether scores are kept in memory
    (without a fused kernel), `dropout` whether masks are. `precision` is "bf16" or "float32".

    Raises ValueError for sizes that do not fit together. See also `read_model`, `Layout`.

    >>> from unisono.plan import layouts
    >>> gpt3 = layouts.Model(layers=96, width=12288, heads=96, positions=2048, vocabulary=51200)
    >>> round(gpt3.parameters / 1e9)
    175
    """

    layers: int
    width: int
    heads: int
    positions: int
    vocabulary: int
    key_heads: int = 0
    head_width: int = 0
    inner: int = 0
    gated: bool = False
    experts: int = 0
    top_k: int = 2
    tied: bool = True
    plain_attention: bool = False
    dropout: bool = False
    precision: str = "bf16"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("layers", "width", "heads", "positions", "vocabulary", "top_k"):
                is_wrong, wanted = type(value) is not int or value < 1, "a whole number >= 1"
            else:
                is_wrong = field.type == "int" and (type(value) is not int or value < 0)
                wanted = "a whole number >= 0"
            if is_wrong:
                raise ValueError(f"{field.name} of a model must be {wanted}, not {value!r}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {' or '.join(PRECISIONS)}, not {self.precision!r}")
        if not self.head_width and self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}")
        if self.heads % (self.key_heads or self.heads):
            raise ValueError(f"{self.key_heads} key heads do not divide {self.heads} heads")
        if self.experts and self.top_k > self.experts:
            raise ValueError(f"a token cannot go through {self.top_k} of {self.experts} experts")
        defaults = {
            "key_heads": self.heads,
            "head_width": self.width // self.heads,
            "inner": 4 * self.width,
        }
        for name, value in defaults.items():
            object.__setattr__(self, name, getattr(self, name) or value)

    @property
    def query_width(self) -> int:
        """The width of all heads together."""
        return self.heads * self.head_width

    @property
    def key_width(self) -> int:
        """The width of all key heads together."""
        return self.key_heads * self.head_width

    @property
    def attention_parameters(self) -> int:
        """Of one layer: queries, keys, values and output."""
        return 2 * self.width * (self.query_width + self.key_width)

    @property
    def network_parameters(self) -> int:
        """Of one layer's network, or of one expert."""
        return (3 if self.gated else 2) * self.width * self.inner

    @property
    def embedding_parameters(self) -> int:
        """Of the input's embedding; the output's, unless tied, has as many."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All of them, without biases."""
        networks = self.network_parameters * max(1, self.experts) + self.width * self.experts
        layer = self.attention_parameters + networks + 2 * self.width
        return self.layers * layer + self.embedding_parameters * (1 if self.tied else 2)

    @property
    def flops_per_token(self) -> float:
        """Forward and backward, without recomputation: 6 for each parameter that a token meets,
        and the products of attention, of which a causal mask needs half."""
        networks = self.network_parameters * (self.top_k if self.experts else 1)
        met = self.layers * (self.attention_parameters + networks) + self.embedding_parameters
        return 6.0 * met + 6.0 * self.layers * self.positions * self.query_width


_NAMES = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "positions": ("max_position_embeddings", "n_positions"),
    "vocabulary": ("vocab_size",),
    "key_heads": ("num_key_value_heads",),
    "head_width": ("head_dim",),
    "inner": ("moe_intermediate_size", "intermediate_size", "n_inner"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok",),
    "tied": ("tie_word_embeddings",),
}


def read_model(path: str | Path, **changes: int | bool | str) -> Model:
    """The model of the Hugging Face config.json at `path`, with `changes` to fields of `Model`.

    Raises ValueError if the file cannot be read, or lacks a size.

    >>> import json, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "config.json")
    >>> config = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    >>> with open(path, "w") as file:
    ...     json.dump(config | {"vocab_size": 128}, file)
    >>> from unisono.plan import layouts
    >>> layouts.read_model(path, positions=32).inner
    256
    """
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read the model of {path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a config.json: it holds no object")
    config = config.get("text_config") or config
    found: dict[str, Any] = {}
    for field, names in _NAMES.items():
        given = [config[name] for name in names if config.get(name) is not None]
        found |= {field: given[0]} if given else {}
    found["gated"] = config.get("hidden_act", "gelu") in ("silu", "swish", "swiglu")
    found.setdefault("tied", True)  # what transformers assumes
    found |= changes
    missing = [names[0] for field, names in _NAMES.items() if field in list(_NAMES)[:5]
               and field not in found]  # fmt: skip
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    return Model(**found)
