"""vLLM's plug-in: `WeightTransferConfig(backend="unisono")` finds unisono's engine.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`); the engine is
imported by whoever asks for it.
"""

from __future__ import annotations

_ENGINES = "unisono.training.weights.vllm_engine"


def register() -> None:
    """Tell vLLM's factories of the engine. A vLLM without them is left alone."""
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError:
        return
    for known, name in (
        ("WeightTransferEngineFactory", "UnisonoWeightTransferEngine"),
        ("WeightTransferTrainerFactory", "UnisonoTrainerWeightTransferEngine"),
    ):
        registry = getattr(factory, known, None)
        if registry is not None and "unisono" not in registry._registry:
            registry.register_engine("unisono", _ENGINES, name)
