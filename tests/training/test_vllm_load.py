"""A vLLM worker that cannot load what all have agreed on, through the engine's own interface.

vLLM is replaced by the few names that the engine imports, and by a model that fails where vLLM's
would run out of memory: after the vote, halfway. `make real-vllm` tests the real one.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ranks import RankPool, attempt
from unisono.collectives.ragged import all_gather_integers
from unisono.errors import WeightUpdateError
from unisono.training import WeightSender, init_weight_update_group

VLLM = {
    "version": '__version__ = "0.32.0"',
    "distributed/weight_transfer/base": """
        class WeightTransferInitInfo: pass
        class WeightTransferUpdateInfo: pass
        class TrainerInitInfo: pass
        class TrainerWeightTransferEngine: pass
        class ModuleSource: pass
        class ParamMeta: pass
        class WeightTransferEngine:
            def parse_update_info(self, given): return self.update_info_cls(**given)
    """,
    "lora/lora_model": "class LoRAModel: pass",
    "lora/peft_helper": "class PEFTHelper: pass",
    "model_executor/model_loader/mtp_validation": """
        from contextlib import nullcontext as disable_mtp_completeness_check
    """,
    "model_executor/model_loader/reload": """
        def initialize_layerwise_reload(model): pass
        def finalize_layerwise_reload(model, config): pass
    """,
    "model_executor/model_loader/weight_utils": "def default_weight_loader(*_): pass",
}


@pytest.fixture
def vllm(tmp_path: Path) -> str:
    """The folder of the replacement package."""
    for name, text in VLLM.items():
        file = tmp_path / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = text.split("\n")
        file.write_text("\n".join(line.removeprefix(" " * 8) for line in lines))
    return str(tmp_path)


class Model(torch.nn.Module):
    """Fails when version 2 has been loaded halfway: the loader runs three times for its plan."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.loads = fails, 0
        self.first, self.second = (torch.nn.Parameter(torch.zeros(1000)) for _ in range(2))

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for name, tensor in pairs:
            if self.fails and name == "second" and self.loads == 3 + 2:
                raise MemoryError("no room for the layer's kernels")
            self.get_parameter(name).data.copy_(tensor)


def update_twice(rank: int, size: int, path: str, vllm: str, port: int) -> Any:
    """Rank 0 trains; the worker that is rank 2 cannot load version 2."""
    where: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port}
    if rank == 0:
        group = init_weight_update_group(**where, rank_offset=0, world_size=size)
        all_gather_integers(group.comm, (0,), "cpu")  # that no session of vLLM's is open
        weights = {"first": torch.ones(1000), "second": torch.ones(1000)}
        sender = WeightSender(group.comm, weights)
        sender.update()
        for tensor in weights.values():
            tensor += 1
        error = attempt(sender.update)
        assert isinstance(error, WeightUpdateError), error
        return error.committed, error.group_ended, sorted(error.failed), str(error)
    sys.path.insert(0, vllm)
    from unisono.training.weights import vllm_plugin

    engine: Any = vllm_plugin.UnisonoWeightTransferEngine()
    engine.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    engine.model, engine.model_config = Model(fails=rank == 2), None
    engine.device = torch.device("cpu")
    engine.init_transfer_engine(
        engine.init_info_cls(**where, rank_offset=rank, world_size=size, group_name="weights")
    )
    told = {
        "names": ["first", "second"],
        "dtype_names": ["float32"] * 2,
        "shapes": [[1000]] * 2,
    }
    for _ in range(2):
        engine.start_weight_update()
        engine.update_weights(told)
        engine.finish_weight_update()
    return [sorted(set(tensor.tolist())) for tensor in engine.model.parameters()]


def test_a_worker_that_cannot_load_after_the_vote_ends(fresh_pool: RankPool, vllm: str) -> None:
    """It serves no mixture; the others have the new version, and the trainer is told."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    trainer, worker, failed = fresh_pool.outcomes(update_twice, 3, vllm, port, connected=False)
    assert failed.exit_code == -signal.SIGKILL, failed
    assert worker.error is None, worker.error
    assert worker.value == [[2.0], [2.0]]
    assert trainer.error is None, trainer.error
    committed, ended, ranks, text = trainer.value
    assert (committed, ended, ranks) == (True, True, [2]), text
    assert "version 2 had been accepted: every engine that has not failed serves it" in text
