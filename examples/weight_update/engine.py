"""A small inference engine: a language model of letters, split over worker processes.

Each worker is a process with a part of the vocabulary (tensor parallelism); calls come from
outside, as Ray or vLLM's `collective_rpc` bring them. The model's `load_weights` takes whole
tensors by name, as vLLM's models do, and keeps the part that this worker serves.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import uuid
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import torch

from unisono import Communicator
from unisono.training import WeightUpdateWorker

LETTERS = "abcdefghijklmnopqrstuvwxyz ,.\n"
CONTEXT = 6
WIDTH = 32


class LetterModel(torch.nn.Module):
    """The next letter by the last six. Worker `part` of `parts` has that part of the output."""

    def __init__(self, part: int = 0, parts: int = 1, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.part, self.parts = part, parts
        self.embedding = torch.nn.Embedding(len(LETTERS), WIDTH)
        self.mix = torch.nn.Linear(CONTEXT * WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, len(LETTERS) // parts)

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        """The scores of this part's letters after each context."""
        hidden = torch.tanh(self.mix(self.embedding(context).flatten(-2)))
        scores: torch.Tensor = self.head(hidden)
        return scores

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load whole tensors by name; of the head's, this part's rows."""
        own = dict(self.named_parameters())
        loaded = set()
        for name, weight in weights:
            if name not in own:
                raise KeyError(f"this model has no weight {name!r}")
            if name.startswith("head."):
                weight = weight.chunk(self.parts)[self.part]
            if weight.shape != own[name].shape:
                raise ValueError(f"{name!r} is {tuple(own[name].shape)}, not {tuple(weight.shape)}")
            own[name].copy_(weight)
            loaded.add(name)
        return loaded


@torch.no_grad()
def generate(
    model: LetterModel, prompt: str, letters: int, comm: Communicator | None = None
) -> str:
    """The prompt and the most likely letters after it; `comm` is that of the engine's workers."""
    text = prompt
    for _ in range(letters):
        recent = text[-CONTEXT:].rjust(CONTEXT)
        scores = model(encode(recent))
        if comm is not None and comm.size > 1:
            everyone = torch.empty(comm.size, len(scores))
            comm.all_gather(everyone, scores)
            scores = everyone.flatten()
        text += LETTERS[int(scores.argmax())]
    return text


def encode(text: str) -> torch.Tensor:
    """Letters as numbers."""
    return torch.tensor([LETTERS.index(letter) for letter in text])


# -- workers and calls from outside ----------------------------------------------------------------


class Worker(WeightUpdateWorker):
    """What runs in each process of an engine. Its methods are called from outside."""

    def __init__(self, engine: str, rank: int, workers: int) -> None:
        self.comm = Communicator.join(engine, rank, workers, join_timeout_s=60)
        self.model = LetterModel(rank, workers, seed=7)
        super().__init__(self.model, rank)

    def generate(self, prompt: str, letters: int) -> str:
        """Generate, together with the engine's other workers."""
        return generate(self.model, prompt, letters, self.comm)


def serve(calls: Connection, engine: str, rank: int, workers: int) -> None:
    """A worker process: do what is asked, until the other side closes."""
    torch.set_num_threads(1)
    worker = Worker(engine, rank, workers)
    while True:
        try:
            method, arguments = calls.recv()
        except EOFError:
            break
        try:
            calls.send((True, getattr(worker, method)(*arguments)))
        except Exception as error:
            calls.send((False, f"{type(error).__name__}: {error}"))
    worker.close_weight_update_group()
    worker.comm.close()


class Engine:
    """An engine of several worker processes, as a trainer sees it."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        name, context = f"engine-{uuid.uuid4()}", multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._is_called = False
        for rank in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, name, rank, workers))
            process.start()
            there.close()
            self.processes.append(process)
            self._pipes.append(here)

    def begin(self, method: str, *arguments: Any) -> None:
        """Call a method on every worker, without waiting for it. Results of an earlier call that
        were never collected are dropped."""
        if self._is_called:
            self._answers()
        self._is_called = True
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # its end is reported with the results
                pipe.send((method, arguments))

    def results(self) -> list[Any]:
        """What the workers returned from the call that was begun. Raises RuntimeError if one
        raised or died."""
        answers = self._answers()
        problems = [str(value) for fine, value in answers if not fine]
        if problems:
            raise RuntimeError("; ".join(problems))
        return [value for _, value in answers]

    def _answers(self) -> list[tuple[bool, Any]]:
        self._is_called = False
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answers.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                answers.append((False, f"worker {rank} has ended"))
        return answers

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every worker; what they returned."""
        self.begin(method, *arguments)
        return self.results()

    def close(self) -> None:
        """End the workers."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            process.kill()
