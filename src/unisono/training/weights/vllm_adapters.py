"""Adapters (LoRA) in vLLM's slots: built before the vote, put there after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from unisono.errors import WeightUpdateError
from unisono.training.weights.load_plan import without_writing


class AdapterSlots:
    """The adapters of a worker's `model`. Raises WeightUpdateError if vLLM has none there."""

    def __init__(self, model: torch.nn.Module) -> None:
        manager: Any = getattr(model, "lora_manager", None)
        if manager is None:
            raise WeightUpdateError("this engine takes no adapters: start it with enable_lora")
        self._manager = manager
        self._built: Any = None

    def build(self, number: int, config: Mapping[str, Any], tensors: dict[str, Any]) -> None:
        """Build the adapter with this `number` (vLLM's lora_int_id) from peft's `config` and
        tensors. Raises ValueError for what vLLM does not support, or what does not fit."""
        manager = self._manager
        helper = PEFTHelper.from_dict(dict(config))
        helper.validate_legal(manager.lora_config)
        renames = getattr(manager.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            number,
            tensors,
            helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=manager.vocab_size,
            weights_mapper=renames and renames.get_rename_mapper(),
            skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
        )
        packed = {part for parts in manager.packed_modules.values() for part in parts}
        unknown = adapter.loras.keys() - manager.modules.keys() - packed
        if unknown:
            raise ValueError(f"the model takes no adapter for {', '.join(sorted(unknown))}")
        manager._validate_moe_lora_format(adapter)
        manager._create_merged_loras_inplace(adapter)
        with without_writing():  # it raises for other shapes
            for name, module in manager.modules.items():
                weights = manager._get_lora_layer_weights(adapter, name)
                if weights:
                    module.set_lora(0, weights.lora_a, weights.lora_b)
        if number not in manager.list_adapters() and len(manager) >= manager.capacity:
            raise ValueError(f"all {manager.capacity} places for adapters are taken")
        self._built = adapter

    def replace(self) -> None:
        """Serve what was built last, and keep it there: vLLM would load an older version of an
        adapter that had to leave its slot."""
        adapter, self._built = self._built, None
        self._manager.remove_adapter(adapter.id)
        self._manager._registered_adapters[adapter.id] = adapter
        self._manager.pin_adapter(adapter.id)
