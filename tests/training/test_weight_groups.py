"""Weight updates parameter by parameter, as OpenRLHF and vLLM make them: with real processes, on
every backend that runs here, and what happens if something goes wrong."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import unisono
from ranks import RankPool, attempt, raised
from unisono import Communicator, RendezvousError, UnisonoError, WeightMismatch, WeightUpdateError
from unisono.training import (
    WeightReceiver,
    WeightSender,
    WeightUpdateExtension,
    WeightUpdateGroup,
    WeightUpdateWorker,
    init_weight_update_group,
)
from unisono.training.weights import meeting
from user_programs import eventually, run_python

TRAINER, FIRST, SECOND = 0, 1, 2
EXAMPLES = Path(__file__).parents[2] / "examples" / "weight_update"
BACKENDS = ["unisono", "gloo"]
LIMIT_S = 60.0
SOON_S = 20.0
"""Errors are detected long before the limit."""


class Layer(torch.nn.Module):
    """A model with `load_weights`: strict about names, shapes and types; accepts a part of the
    weights."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 6), float(value)))
        self.bias = torch.nn.Parameter(torch.full((6,), value, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.full((), int(value)))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        own = self.state_dict()
        for name, weight in weights:
            if own[name].shape != weight.shape:
                raise ValueError(f"{name} is {tuple(own[name].shape)}")
            own[name].copy_(weight)
        return set(own)

    def serves(self, value: float) -> bool:
        return all(bool(tensor.eq(value).all()) for tensor in self.state_dict().values())


class Table:
    """An engine that is not a module."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.weights |= dict(weights)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(rank: int, size: int, port: int, **options: Any) -> WeightUpdateGroup:
    options = {"timeout_s": LIMIT_S, "group_name": "test"} | options
    return init_weight_update_group("127.0.0.1", port, rank, size, **options)


def worker_of(model: Any, rank: int, size: int, port: int, **options: Any) -> WeightUpdateWorker:
    """A worker that has joined; `rank` is an offset plus its number in an engine of two."""
    worker = WeightUpdateWorker(model, (rank - 1) % 2)
    options = {"timeout_s": LIMIT_S, "group_name": "test"} | options
    offset = rank - (rank - 1) % 2
    worker.init_weight_update_group("127.0.0.1", port, offset, size, **options)
    return worker


def send(group: WeightUpdateGroup, model: torch.nn.Module) -> None:
    for tensor in model.state_dict().values():
        group.broadcast(tensor, src=0)


def receive(worker: WeightUpdateWorker, names: Iterable[str] = ()) -> None:
    for name, tensor in Layer(0).state_dict().items():
        worker.update_weight(name, tensor.dtype, tensor.shape)


def run(pool: RankPool, function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    return pool.run(function, ranks, free_port(), *args, connected=False)


# -- that it arrives -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_workers_load_what_the_trainer_broadcasts(pool: RankPool, backend: str) -> None:
    assert run(pool, update_twice, 3, backend) == [backend] * 3


def update_twice(rank: int, size: int, _: str, port: int, backend: str) -> str:
    if rank == TRAINER:
        with join(rank, size, port, backend=backend) as group:
            for value in (1, 2):
                send(group, Layer(value))
            return group.comm.backend
    model = Layer(0)
    worker = worker_of(model, rank, size, port, backend=backend)
    for value in (1, 2):
        receive(worker)
        assert model.serves(value)
    name = worker._joined_weights_group().comm.backend
    worker.close_weight_update_group()
    return name


def test_auto_is_shared_memory_on_one_machine_and_types_have_names(pool: RankPool) -> None:
    assert run(pool, update_a_table, 2) == ["unisono", "unisono"]


def update_a_table(rank: int, size: int, _: str, port: int) -> str:
    if rank == TRAINER:
        with join(rank, size, port) as group:
            group.broadcast(torch.arange(6.0).reshape(2, 3).T)  # any layout
            group.broadcast(torch.arange(3, dtype=torch.int32))
            return group.comm.backend
    table = Table()
    worker = worker_of(table, rank, size, port)
    worker.update_weight("a", "float32", [3, 2])
    assert list(table.weights) == ["a"]
    worker.update_weight("b", "torch.int32", torch.Size([3]))
    assert torch.equal(table.weights["a"], torch.tensor([[0.0, 3], [1, 4], [2, 5]]))
    assert table.weights["b"].tolist() == [0, 1, 2]
    backend = worker._joined_weights_group().comm.backend
    worker.close_weight_update_group()
    return backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_senders_and_receivers_work_over_the_same_group(pool: RankPool, backend: str) -> None:
    run(pool, update_by_endpoints, 3, backend)


def update_by_endpoints(rank: int, size: int, _: str, port: int, backend: str) -> None:
    with join(rank, size, port, backend=backend) as group:
        if rank == TRAINER:
            WeightSender(group.comm, Layer(5)).update()
            return
        model = Layer(0)
        WeightReceiver(group.comm, model).update()
        assert model.serves(5)


def test_vllms_worker_with_the_extension(pool: RankPool) -> None:
    run(pool, update_an_extended_worker, 3)


def update_an_extended_worker(rank: int, size: int, _: str, port: int) -> None:
    if rank == TRAINER:
        with join(rank, size, port, group_name="openrlhf") as group:
            send(group, Layer(3))
        return

    class Worker:
        """What vLLM's has."""

        def __init__(self) -> None:
            self.rank = rank - 1
            self.model_runner = self
            self.model = Layer(0)

    class ExtendedWorker(WeightUpdateExtension, Worker):
        pass

    worker = ExtendedWorker()
    with pytest.raises(ValueError, match="Ray"):
        worker.init_process_group("127.0.0.1", port, 1, size, "openrlhf", use_ray=True)
    worker.init_process_group("127.0.0.1", port, 1, size, "openrlhf")
    receive(worker)  # type: ignore[arg-type]
    assert worker.model.serves(3)
    worker.close_weight_update_group()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_of_two_workers_generates_as_the_trainer_does(
    pool: RankPool, backend: str
) -> None:
    expected, before, after, *_ = run(pool, generate_before_and_after, 3, backend)[0]
    assert before != expected == after


def generate_before_and_after(rank: int, size: int, path: str, port: int, backend: str) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    from engine import LetterModel, generate
    from trainer import train

    name = f"{path}-letters"
    everyone = Communicator.join(name, rank, size, timeout_s=LIMIT_S)
    workers = everyone.split([FIRST, SECOND])
    texts = []
    if rank == TRAINER:
        model = LetterModel(seed=1)
        train(model, 25)
        expected = generate(model, "the ranks ", 30)
        with join(rank, size, port, backend=backend) as group:
            for parameter in model.parameters():
                group.broadcast(parameter)
        texts = unisono.gather_object(None, 0, everyone)
        everyone.close()
        return expected, *texts[FIRST]
    part = LetterModel(rank - FIRST, 2, seed=7)
    texts.append(generate(part, "the ranks ", 30, workers))
    worker = worker_of(part, rank, size, port, backend=backend)
    for key, parameter in LetterModel().named_parameters():
        worker.update_weight(key, parameter.dtype, parameter.shape)
    texts.append(generate(part, "the ranks ", 30, workers))
    worker.close_weight_update_group()
    unisono.gather_object(texts, 0, everyone)
    everyone.close()
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("example", ["as_openrlhf", "as_vllm"])
def test_the_examples(example: str, backend: str) -> None:
    """They check that an engine's output changes with an update and then equals the trainer's."""
    result = run_python(EXAMPLES / f"{example}.py", backend)
    assert result.returncode == 0, result.stderr
    assert f"by {backend}: " in result.stdout


# -- that does not fit -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_hear_of_what_does_not_fit_and_the_group_goes_on(pool: RankPool, backend: str) -> None:
    for errors in run(pool, try_misfits, 3, backend):
        shape, dtype, name, unknown = errors
        assert "weight  trainer         engine" in shape
        assert "rank 2: float32 (6, 4)" in shape
        assert "rank 1: float64 (4, 6)" in dtype
        assert "rank 2: float64 (4, 6)" in dtype
        assert "rank 2: it was told to receive 'bias', and rank 1 'weight'" in name
        assert "rank 1: ValueError: torch has no dtype 'float33'" in unknown


def try_misfits(rank: int, size: int, _: str, port: int, backend: str) -> list[str]:
    tensor = Layer(1).weight
    if rank == TRAINER:
        with join(rank, size, port, backend=backend) as group:
            errors = [attempt(group.broadcast, tensor) for _ in range(4)]
            send(group, Layer(1))
    else:
        model = Layer(0)
        worker = worker_of(model, rank, size, port, backend=backend)
        told: list[tuple[Any, ...]] = [
            ("weight", "float32", (4, 6) if rank == FIRST else (6, 4)),
            ("weight", "float64", (4, 6)),
            ("weight" if rank == FIRST else "bias", "float32", (4, 6)),
            ("weight", "float33" if rank == FIRST else "float32", (4, 6)),
        ]
        errors = [attempt(worker.update_weight, *arguments) for arguments in told]
        assert model.serves(0)
        receive(worker)
        assert model.serves(1)
        worker.close_weight_update_group()
    assert isinstance(errors[0], WeightMismatch)
    assert isinstance(errors[1], WeightMismatch)
    assert all(isinstance(error, WeightUpdateError) for error in errors)
    assert not any(error.group_ended for error in errors)  # type: ignore[union-attr]
    return list(map(str, errors))


def test_a_model_that_cannot_load(pool: RankPool) -> None:
    run(pool, fail_to_load, 3)


def fail_to_load(rank: int, size: int, _: str, port: int) -> None:
    if rank == TRAINER:
        with join(rank, size, port) as group:
            group.broadcast(torch.ones(5))  # it arrives: one model rejects it
            send(group, Layer(2))
        return
    model = Layer(0)
    if rank == FIRST:
        model.bias = torch.nn.Parameter(torch.zeros(5))
    worker = worker_of(model, rank, size, port)
    error = attempt(worker.update_weight, "bias", "float32", (5,))
    assert (error is None) == (rank == FIRST)
    if isinstance(error, WeightUpdateError):
        assert "rank 2 could not load 'bias', and may hold parts of two versions" in str(error)
        assert list(error.failed) == [SECOND]
    model.bias = torch.nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
    receive(worker)  # the group goes on
    assert model.serves(2)
    worker.close_weight_update_group()


@pytest.fixture
def short_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other rank will join that would have to learn of a failure."""
    monkeypatch.setattr(meeting, "_FAREWELL_S", 0.05)


@pytest.mark.usefixtures("short_farewell")
def test_misuse_is_answered() -> None:
    with pytest.raises(TypeError, match="Tensor has no load_weights"):
        WeightUpdateWorker(torch.ones(1))  # type: ignore[arg-type]
    worker = WeightUpdateWorker(Table())
    with pytest.raises(WeightUpdateError, match="call init_weight_update_group first"):
        worker.update_weight("a", "float32", ())
    for wrong in ({"backend": "mpi"}, {"rank": -1}, {"group_name": ""}):
        with pytest.raises(ValueError, match=r"mpi|-1|''"):
            join(**({"rank": 0, "size": 2, "port": free_port()} | wrong))  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(UnisonoError, match="a GPU for every rank"):
            join(0, 2, free_port(), backend="nccl")


# -- that somebody dies, or does not come ----------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_that_is_killed_in_the_middle(fresh_pool: RankPool, backend: str) -> None:
    outcomes = fresh_pool.outcomes(lose_a_worker, 3, free_port(), backend, connected=False)
    trainer, dead, other = outcomes
    assert dead.exit_code == -signal.SIGKILL
    for survivor in (trainer, other):
        assert survivor.error is None, survivor.error
        assert "may hold parts of two versions" in survivor.value, survivor.value
        if backend == "unisono":
            assert "rank 1" in survivor.value
            assert re.search("killed by SIGKILL|has ended", survivor.value)


def lose_a_worker(rank: int, size: int, _: str, port: int, backend: str) -> str:
    if rank == TRAINER:
        with join(rank, size, port, backend=backend) as group:
            group.broadcast(Layer(1).weight)
            begin_s = time.monotonic()
            error = attempt(send, group, Layer(1))
            assert time.monotonic() - begin_s < SOON_S
        connection = socket.create_server(("127.0.0.1", port))  # the port is free again
        connection.close()
        return str(error)
    model = Layer(0)
    worker = worker_of(model, rank, size, port, backend=backend)
    worker.update_weight("weight", "float32", (4, 6))
    if rank == FIRST:
        os.kill(os.getpid(), signal.SIGKILL)
    error = attempt(receive, worker)
    assert isinstance(error, WeightUpdateError)
    assert list(error.failed) == ([FIRST] if backend == "unisono" else [])  # gloo names no rank
    assert error.group_ended
    assert bool(model.weight.eq(1).all())  # it had arrived
    worker.close_weight_update_group()
    return str(error)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_that_was_not_told_is_waited_for_no_longer_than_said(
    pool: RankPool, backend: str
) -> None:
    error, _ = run(pool, never_tell, 2, backend)
    assert "may hold parts of two versions" in error
    assert "deadline" in error


def never_tell(rank: int, size: int, path: str, port: int, backend: str) -> str:
    given_up = Path(path).with_suffix(".given-up")
    with join(rank, size, port, backend=backend, timeout_s=0.5, join_timeout_s=LIMIT_S) as group:
        if rank == TRAINER:
            begin_s = time.monotonic()
            error = raised(WeightUpdateError, group.broadcast, torch.ones(3))
            assert time.monotonic() - begin_s < SOON_S
            assert error.group_ended
            given_up.touch()
            return str(error)
        eventually(given_up.exists)
        return ""


@pytest.mark.parametrize("late", [1, 2])
def test_ranks_that_were_told_different_sizes_all_say_so_at_once(pool: RankPool, late: int) -> None:
    begin_s = time.monotonic()
    for text in run(pool, disagree_on_the_size, 3, late):
        assert "the weight update group 'test' at 127.0.0.1:" in text
        assert "was given world_size=" in text
        assert "all ranks need the same" in text
    assert time.monotonic() - begin_s < SOON_S


def disagree_on_the_size(rank: int, size: int, path: str, port: int, late: int) -> str:
    """Only the trainer was given the smaller size; the late worker joins once the other one has
    left."""
    gone = Path(f"{path}.gone")
    if rank == late:
        assert eventually(gone.exists)
    told = size - 1 if rank == TRAINER else size
    text = str(raised(RendezvousError, join, rank, told, port))
    if rank not in (TRAINER, late):
        gone.touch()
    return text


def test_a_worker_beyond_the_size_tells_the_trainer(pool: RankPool) -> None:
    for text in run(pool, offset_too_far, 2):
        assert "rank 3 is not below world_size=2" in text


def offset_too_far(rank: int, size: int, _: str, port: int) -> str:
    return str(raised(RendezvousError, join, 3 if rank else 0, size, port))


def test_two_workers_of_one_rank(pool: RankPool) -> None:
    for text in run(pool, same_rank, 3):
        assert "rank 1 is process" in text
        assert "is rank_offset right" in text


def same_rank(rank: int, size: int, _: str, port: int) -> str:
    return str(raised(RendezvousError, join, min(rank, 1), size, port))


@pytest.mark.usefixtures("short_farewell")
def test_nobody_comes_or_the_port_is_taken() -> None:
    port = free_port()
    begin_s = time.monotonic()
    with pytest.raises(RendezvousError, match=f"the store at 127.0.0.1:{port}"):
        join(1, 2, port, join_timeout_s=0.3)  # the trainer never joins
    with pytest.raises(RendezvousError, match=r"rank 1 did not join within 0.3 s"):
        join(0, 2, port, join_timeout_s=0.3)  # the worker never joins
    taken = pytest.raises(RendezvousError, match=f"cannot host torch's store at 127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", port)), taken:
        join(0, 2, port, join_timeout_s=5)
    assert time.monotonic() - begin_s < SOON_S
