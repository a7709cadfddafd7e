"""TRL's GRPO and OpenRLHF's worker, with engines of vLLM; SGLang's helper.

Their sources are the published ones; TRL's trainer is given another client, and OpenRLHF imports
PyNcclCommunicator from unisono (Makefile, docs/weights-in-frameworks.md).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from models import NEW_TOKENS, PROMPTS, greedy, make_model, save, train
from servers import START_S, Server, environment, free_port, plug_in

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


def test_grpo_with_trl(tmp_path: Path) -> None:
    """Every step generates what it generates if the server loads a checkpoint after each step."""
    page = Path(__file__).parents[2] / "docs" / "weights-in-frameworks.md"
    client = page.read_text().split("## TRL")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "client_of_the_page.py").write_text(client)
    save(tmp_path)
    options = ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    server = Server(tmp_path, 1, tmp_path / "vllm.log", *options, "--enable-scale-out")
    told = {}
    try:
        server.wait()
        before = server.answers()
        for how in ("unisono", "checkpoint"):
            given = [server.url, str(free_port()), str(tmp_path), how]
            ended = subprocess.run(
                [sys.executable, str(HERE / "trl_grpo.py"), *given],
                env=environment() | {"PYTHONPATH": str(tmp_path), "VLLM_HOST_IP": "127.0.0.1"},
                capture_output=True,
                text=True,
                timeout=START_S,
            )
            assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
            told[how] = json.loads(ended.stdout.split("TOLD ")[1].splitlines()[0]), server.answers()
    finally:
        server.close()
    assert told["unisono"] == told["checkpoint"]
    assert told["unisono"][1] != before


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
