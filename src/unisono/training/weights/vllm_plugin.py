"""vLLM's plug-in: `WeightTransferConfig(backend="unisono")` finds unisono's engine.

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). The engines are
imported on first use, and only with a vLLM version that they fit.
"""

from typing import Any

from unisono.errors import UnisonoError

_KNOWN = ("0.32.",)
_WORKER, _TRAINER = "UnisonoWeightTransferEngine", "UnisonoTrainerWeightTransferEngine"


def register() -> None:
    """Register the engines with vLLM's factories. Does nothing with a vLLM without them."""
    try:
        from vllm.distributed.weight_transfer import factory
    except ImportError:
        return
    for known, name in (
        ("WeightTransferEngineFactory", _WORKER),
        ("WeightTransferTrainerFactory", _TRAINER),
    ):
        registry = getattr(factory, known, None)
        if registry is not None and "unisono" not in registry._registry:
            registry.register_engine("unisono", __name__, name)


def __getattr__(name: str) -> Any:
    if name not in (_WORKER, _TRAINER, "UnisonoTrainerInitInfo", "ShardSource"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.version import __version__

    if not __version__.startswith(_KNOWN):
        raise UnisonoError(
            f"unisono's weight transfer engine does not support vLLM {__version__}: it was tested "
            f"with {', '.join(version + 'x' for version in _KNOWN)}"
        )
    from unisono.training.weights import vllm_engine

    return getattr(vllm_engine, name)
