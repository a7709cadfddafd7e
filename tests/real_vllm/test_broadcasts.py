"""TRL's server, worker and client and OpenRLHF's worker, with engines of vLLM; SGLang's helper.

Their sources are the published ones, except for one line each, which imports PyNcclCommunicator
from unisono (Makefile, docs/weights-in-frameworks.md).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from models import NEW_TOKENS, PROMPTS, greedy, make_model, save, train
from servers import START_S, Server, environment, free_port, plug_in

from unisono import PeerLost

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
SOON_S = 10.0

UNPACKED = """
    import vllm._custom_ops as operators
    import vllm.model_executor.layers.utils as layers
    operators._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
"""
"""TRL and OpenRLHF load into a model as it is: impossible where vLLM packs weights for CPUs."""


class TrlServer(Server):
    """`trl vllm-serve`."""

    def __init__(self, model: Path, workers: int, log: Path) -> None:
        self.port, self.workers, self.log = free_port(), workers, log
        self.url = f"http://127.0.0.1:{self.port}"
        given = ["--model", str(model), "--port", str(self.port), "--dtype", "float32"]
        given += ["--max_model_len", "128", "--tensor_parallel_size", str(workers)]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trl.scripts.vllm_serve", *given, "--enforce_eager", "true"],
                env=environment() | {"PYTHONPATH": plug_in(model / "plugin", UNPACKED)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    health = "health/"


def test_trl(tmp_path: Path) -> None:
    from trl.generation.vllm_client import VLLMClient

    save(tmp_path)
    model = make_model(1)
    server = TrlServer(tmp_path, 2, tmp_path / "trl.log")
    try:
        server.wait()
        client = VLLMClient(server.url, group_port=free_port(), connection_timeout=START_S)
        a_gpu = SimpleNamespace(uuid="of another GPU")  # TRL asks before it connects
        with mock.patch("torch.cuda.get_device_properties", return_value=a_gpu):
            client.init_communicator(device="cpu")
        assert client.communicator.rank == 2  # the last one sends
        for _ in range(2):
            train(model)
            client.update_model_params(model)
            client.reset_prefix_cache()
            answers = client.generate(
                PROMPTS,
                temperature=0,
                max_tokens=NEW_TOKENS,
                generation_kwargs={"ignore_eos": True},
            )
            assert answers["completion_ids"] == greedy(model)
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        begin_s = time.monotonic()
        with pytest.raises(PeerLost):  # TRL's own would wait forever
            client.update_named_param("model.norm.weight", model.model.norm.weight.data)
        assert time.monotonic() - begin_s < SOON_S
        client.communicator = None
    finally:
        server.close()


def test_sglangs_helper() -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "sglang_group.py"), str(rank), "3", str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    for rank in ranks:
        output, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors[-3000:]
        assert output == "unisono\n"


def test_openrlhf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf.utils.distributed_util import stateless_init_process_group
    from vllm import LLM, SamplingParams

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(plug_in(tmp_path / "plugin", UNPACKED))  # spawned ones have it too
    save(tmp_path)
    model = make_model(2)
    llm = LLM(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=128,
        worker_extension_cls="openrlhf_on_cpu.OnCpu",
    )

    def call(method: str, *args: Any) -> threading.Thread:
        """As OpenRLHF does with Ray: the worker's call runs while the trainer makes its own."""
        thread = threading.Thread(target=llm.collective_rpc, args=(method,), kwargs={"args": args})
        thread.start()
        return thread

    port = free_port()
    worker = call("init_process_group", "127.0.0.1", port, 1, 2, "openrlhf")
    group = stateless_init_process_group("127.0.0.1", port, 0, 2, torch.device("cpu"))
    worker.join()
    for _ in range(2):
        train(model)
        for name, parameter in model.named_parameters():
            worker = call("update_weight", name, str(parameter.dtype), list(parameter.shape))
            group.broadcast(parameter.data, src=0, stream=None)
            worker.join()
        llm.reset_prefix_cache()
        answers = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True),
            use_tqdm=False,
        )
        assert [list(each.outputs[0].token_ids) for each in answers] == greedy(model)
