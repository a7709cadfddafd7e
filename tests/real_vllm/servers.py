"""vLLM's HTTP servers on a CPU, and the requests that tests make."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import requests
from models import NEW_TOKENS, PROMPTS

START_S = 400
ANSWER_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment() -> dict[str, str]:
    """Ours, with what a small engine needs: routes for weights, little memory."""
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # more workers than cores
    return {**os.environ, **settings, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def plug_in(folder: Path, source: str) -> str:
    """A folder for PYTHONPATH with a plug-in that runs `source` in every vLLM process."""
    about = folder / "of_a_test-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: of_a_test\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nof_a_test = of_a_test:register\n"
    )
    lines = textwrap.indent(textwrap.dedent(source), "    ")
    (folder / "of_a_test.py").write_text(f"def register():\n{lines}")
    return str(folder)


class Server:
    """An engine of several workers behind a port."""

    health = "health"

    def __init__(self, model: Path, workers: int, log: Path, *more: str, **settings: str) -> None:
        self.port, self.workers, self.log = free_port(), workers, log
        self.url = f"http://127.0.0.1:{self.port}"
        options = {
            "--model": str(model),
            "--port": str(self.port),
            "--dtype": "float32",
            "--max-model-len": "128",
            "--tensor-parallel-size": str(workers),
            "--weight-transfer-config": json.dumps({"backend": "unisono"}),
        }
        given = [text for pair in options.items() for text in pair]
        given += ["--enforce-eager", *more]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given],
                env=environment() | settings,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        end_s = time.monotonic() + START_S
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < end_s, self.log.read_text()[-4000:]
            try:
                if requests.get(f"{self.url}/{self.health}", timeout=5).ok:
                    return
            except requests.ConnectionError:
                time.sleep(1)

    def answers(self, **more: str) -> list[list[int]]:
        """What it generates for the prompts, without its cache from older weights."""
        requests.post(f"{self.url}/reset_prefix_cache", timeout=ANSWER_S).raise_for_status()
        return [self.answer(prompt, **more) for prompt in PROMPTS]

    def answer(self, prompt: list[int], **more: str) -> list[int]:
        asked = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        asked |= more
        answer = requests.post(
            f"{self.url}/v1/completions", json=asked | {"return_token_ids": True}, timeout=ANSWER_S
        )
        answer.raise_for_status()
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    def worker_pids(self) -> list[int]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [process.pid for process in below if "Worker" in _title(process)]

    def close(self) -> None:
        below = psutil.Process(self.process.pid).children(recursive=True) if self.alive else []
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for process in below:
            if process.is_running():
                process.kill()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


def _title(process: psutil.Process) -> Any:
    return process.name() + " ".join(process.cmdline())
