"""vLLM engines in processes that are forked from one which has loaded vLLM, and their client.

An engine of several workers is as many processes (vLLM's `external_launcher`); each answers calls
one after another, at a socket of its own, and outlives those who call it.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from models import NEW_TOKENS, PROMPTS
from servers import environment, free_port

from weight_kills import arm

_processes = multiprocessing.get_context("fork")
START_S = 400
POLL_S = 0.05
LOADED_BEFORE_DEATH = 5


def start(job: Any, *arguments: Any) -> Any:
    """A process that runs this."""
    process = _processes.Process(target=job, args=arguments, daemon=True)
    process.start()
    return process


class Engine:
    """An engine of `size` workers, and the client of it that vLLM's trainer side takes."""

    def __init__(self, folder: Path, size: int, model: Path, **options: Any) -> None:
        self.size = size
        self.addresses = [str(folder / f"worker-{rank}-{free_port()}") for rank in range(size)]
        rendezvous = free_port()
        self.processes = [
            start(_serve, address, rank, size, rendezvous, model, options)
            for rank, address in enumerate(self.addresses)
        ]

    def wait(self) -> None:
        end_s = time.monotonic() + START_S
        while not all(map(os.path.exists, self.addresses)):
            assert time.monotonic() < end_s
            assert self.is_whole, Path(f"{self.addresses[0]}.log").read_text()[-4000:]
            time.sleep(POLL_S)

    @property
    def is_whole(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def ask(self, worker: int, method: str, *arguments: Any) -> Any:
        """What one worker answers; its error is raised here."""
        with Client(self.addresses[worker]) as connection:
            connection.send((method, arguments))
            answer = connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answers(self, adapter: int | None = None, path: str = "none") -> list[list[int]]:
        """What it generates for the prompts, with an adapter that it has or finds at `path`."""
        return self._ask_all("answers", adapter, path)

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self._ask_all("init_weight_transfer_engine", info)

    def start_weight_update(self) -> None:
        self._ask_all("start_weight_update")

    def update_weights(self, info: dict[str, Any]) -> None:
        self._ask_all("update_weights", info)

    def finish_weight_update(self, version: str | None = None) -> None:
        self._ask_all("finish_weight_update", version)

    def _ask_all(self, method: str, *arguments: Any) -> Any:
        """All workers run the same."""
        answers: list[Any] = [EOFError("no answer")] * self.size

        def ask(worker: int) -> None:
            try:
                answers[worker] = self.ask(worker, method, *arguments)
            except (EOFError, OSError, RuntimeError) as error:
                answers[worker] = error

        threads = [threading.Thread(target=ask, args=(worker,)) for worker in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers[0]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


class _Worker:
    """What can be asked of a process of an engine."""

    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        import vllm
        from vllm.config import WeightTransferConfig

        from unisono.training.weights.vllm_engine import _InProcess

        size = int(os.environ["WORLD_SIZE"])
        self.llm = vllm.LLM(
            str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=128,
            seed=0,
            tensor_parallel_size=size,
            distributed_executor_backend="external_launcher" if size > 1 else "uni",
            weight_transfer_config=WeightTransferConfig(backend="unisono"),
            **options,
        )
        self._client = _InProcess(self.llm)
        found: list[Any] = []
        self.llm.collective_rpc(lambda worker: found.append(worker.weight_transfer_engine))
        (self._engine,) = found
        self._errors: list[tuple[float, str]] = []
        errors = logging.Handler(logging.ERROR)
        errors.emit = lambda record: self._errors.append((time.monotonic(), record.getMessage()))
        logging.getLogger("unisono").addHandler(errors)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._client, method)

    def start_weight_update(self) -> None:
        self._errors.clear()
        self._client.start_weight_update()

    def arm(self, kill: Any, path: str) -> None:
        """Die in the next update."""
        if kill.phase != "load":
            arm(self._party(kill.kind), kill, path, 0.0)
            return
        load = self._engine.model.load_weights

        def load_some(pairs: Any) -> None:
            for number, pair in enumerate(pairs):
                if number == LOADED_BEFORE_DEATH:
                    Path(f"{path}-died").write_text(str(time.monotonic()))
                    os.kill(os.getpid(), signal.SIGKILL)
                load([pair])

        self._engine.model.load_weights = load_some

    def told(self, kind: str) -> tuple[int, list[tuple[float, str]]]:
        """The version that it says it serves, and the errors of the last update."""
        return self._party(kind).version, self._errors

    def _party(self, kind: str) -> Any:
        return self._engine._adapters if kind == "adapter" else self._engine._receiver

    def adapters(self) -> list[int]:
        """The numbers of those that it has."""
        return list(self._engine.model.lora_manager.list_adapters())

    def answers(self, adapter: int | None, path: str) -> list[list[int]]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self.llm.reset_prefix_cache()
        given = SamplingParams(
            temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        lora = None if adapter is None else LoRARequest(f"adapter {adapter}", adapter, path)
        outputs = self.llm.generate(prompts, given, use_tqdm=False, lora_request=lora)
        return [list(each.outputs[0].token_ids) for each in outputs]


def _serve(
    address: str, rank: int, size: int, rendezvous: int, model: Path, options: dict[str, Any]
) -> None:
    log = os.open(f"{address}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= environment() | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rendezvous),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "UNISONO_VLLM": "1",  # a killed worker leaves the shared memory of vLLM's own kernel
    }
    worker = _Worker(model, options)
    listener = Listener(f"{address}.new")
    os.rename(f"{address}.new", address)  # it can be called
    while True:
        with listener.accept() as connection:
            method, arguments = connection.recv()
            try:
                answer = getattr(worker, method)(*arguments)
            except Exception as error:
                traceback.print_exc()
                answer = RuntimeError(repr(error))
            with contextlib.suppress(OSError):  # who asked may be dead
                connection.send(answer)
