"""Weights in real engines of vLLM, by its own registry and clients (`make real-vllm`).

Two HTTP servers, one of which is split over two workers. After every update both must generate
exactly the tokens of the trainer's own model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from models import PROMPTS, greedy, make_model, save, train
from servers import START_S, Server, free_port, plug_in
from trainer import SEED, connect, sent_by_the_trainer
from vllm.distributed.weight_transfer import ModuleSource

from unisono import WeightUpdateError

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
SIZES = [1, 2]
SOON_S = 10.0
"""Detected long before the limit of a minute, even on a busy machine."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("llama")
    save(folder)
    started = [Server(folder, size, folder / f"{size}.log") for size in SIZES]
    try:
        for server in started:
            server.wait()
        yield started
    finally:
        for server in started:
            server.close()


def connected(servers: list[Server], model: Any) -> Any:
    sizes = [server.workers for server in servers]
    return connect([server.url for server in servers], free_port(), sizes, model)


def check(servers: list[Server], model: Any) -> None:
    expected = greedy(model)
    for server in servers:
        assert server.answers() == expected


def test_every_version_is_served_while_requests_run(servers: list[Server]) -> None:
    model = make_model(1)
    engine = connected(servers, model)
    answered, done = [0] * len(servers), threading.Event()

    def ask(number: int) -> None:
        while not done.is_set():
            servers[number].answer(PROMPTS[0])
            answered[number] += 1

    for version in (1, 2, 3):
        done.clear()
        asking = [threading.Thread(target=ask, args=(n,)) for n in range(len(servers))]
        for thread in asking:
            thread.start()
        train(model)
        update = engine.send_weights()
        done.set()
        for thread in asking:
            thread.join()
        assert update.version == version
        # the engine of one worker has the model, those of the other a half each
        whole = sum(each.nbytes for each in model.parameters())
        assert update.bytes == pytest.approx(len(servers) * whole, rel=0.02)
        check(servers, model)
    assert min(answered) >= 3
    engine.shutdown()


def test_what_a_model_cannot_load_is_noticed_before_the_vote(servers: list[Server]) -> None:
    model = make_model(2)
    engine = connected(servers, model)
    engine.send_weights()

    class More(ModuleSource):
        def __init__(self, module: torch.nn.Module, extra: str) -> None:
            super().__init__(module)
            self.extra = extra

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from super().__iter__()
            yield self.extra, torch.ones(3)

    for extra, why in {
        "model.layers.0.no_such.weight": "no module or parameter named 'layers.0.no_such'",
        "model.norm.weight": "Attempted to load weight",
    }.items():
        engine.source = More(make_model(3), extra)
        begin_s = time.monotonic()
        with pytest.raises(WeightUpdateError, match=why) as caught:
            engine.send_weights()
        assert time.monotonic() - begin_s < SOON_S
        assert not caught.value.committed
        assert not caught.value.group_ended
        check(servers, model)  # of the version before
    train(model)
    engine.source = ModuleSource(model)
    engine.send_weights()
    check(servers, model)
    engine.shutdown()


@pytest.mark.parametrize("layout", ["fsdp", "tp x pp"])
def test_trainers_send_shards(servers: list[Server], layout: str) -> None:
    """Four trainers with FSDP2's shards, or with rows and columns of half of the layers each."""
    told = [f"{server.url}={server.workers}" for server in servers]
    command = ["-m", "unisono", "run", "-n", "4", str(HERE / "sharded_trainer.py")]
    ended = subprocess.run(
        [sys.executable, *command, str(free_port()), layout, *told],
        capture_output=True,
        text=True,
        timeout=START_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    model = make_model(SEED)
    whole = sum(each.nbytes for each in model.parameters())
    sent = int(ended.stdout.split("sent ")[1].split()[0])
    # what two engines take of the same trainer in the same part is sent once
    assert whole <= sent <= 1.02 * len(servers) * whole
    check(servers, model)


@pytest.mark.parametrize("when", ["while it sends", "after the vote"])
def test_a_trainer_that_is_killed(servers: list[Server], when: str) -> None:
    """All engines serve one version, and accept the next one from another trainer."""
    before = make_model(4)
    engine = connected(servers, before)
    engine.send_weights()
    engine.shutdown()
    told = [f"{server.url}={server.workers}" for server in servers]
    ended = subprocess.run(
        [sys.executable, str(HERE / "trainer.py"), str(free_port()), when, *told],
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-3000:]
    assert "the trainer ends" in ended.stdout
    check(servers, before if when == "while it sends" else sent_by_the_trainer())
    engine = connected(servers, before)
    train(before)
    engine.send_weights()
    check(servers, before)
    engine.shutdown()


def test_a_worker_that_is_killed(servers: list[Server]) -> None:
    """The last one here: vLLM ends an engine that has lost a worker."""
    one, two = servers
    model = make_model(6)
    engine = connected(servers, model)
    engine.send_weights()
    victim = two.worker_pids()[1]
    killed_s = []

    def kill(*_: int) -> None:
        if not killed_s:
            killed_s.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

    engine._sender._progress = kill
    served = greedy(model)
    train(model)
    with pytest.raises(WeightUpdateError) as caught:
        engine.send_weights()
    took_s = time.monotonic() - killed_s[0]
    print(f"{took_s:.2f} s after the worker's death")
    assert took_s < SOON_S
    assert caught.value.group_ended
    assert not caught.value.committed
    assert list(caught.value.failed) == [3]
    assert one.answers() == served
    engine.shutdown()
    engine = connected([one], model)
    engine.send_weights()
    check([one], model)
    engine.shutdown()


def test_a_load_that_fails_after_the_vote(tmp_path: Path) -> None:
    """That engine ends, rather than serve parts of two versions."""
    save(tmp_path)
    fails = tmp_path / "fails"
    source = f"""
        from pathlib import Path
        from vllm.model_executor.models.llama import LlamaForCausalLM
        load = LlamaForCausalLM.load_weights
        def load_some(self, weights):
            def some():
                for name, tensor in weights:
                    if "layers.1" in name and Path({str(fails)!r}).exists():
                        raise MemoryError("in the middle")
                    yield name, tensor
            return load(self, some())
        LlamaForCausalLM.load_weights = load_some
    """
    path = plug_in(tmp_path / "plugin", source)
    server = Server(tmp_path, 1, tmp_path / "server.log", PYTHONPATH=path)
    try:
        server.wait()
        model = make_model(7)
        engine = connected([server], model)
        engine.send_weights()
        check([server], model)
        fails.touch()
        with pytest.raises(WeightUpdateError) as caught:
            engine.send_weights()
        assert caught.value.committed
        assert caught.value.group_ended
        with pytest.raises(requests.RequestException):
            server.answer(PROMPTS[0])
        engine.shutdown()
        assert "this worker exits instead of serving them" in server.log.read_text()
    finally:
        server.close()
