"""Start ranks on this machine from a Python program."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from unisono import world
from unisono.errors import UnisonoError


def launch(fn: Callable[..., Any], ranks: int, args: Sequence[Any] = ()) -> list[Any]:
    """Run `fn(*args)` in `ranks` new processes and return their results in rank order.

    Inside, `unisono.init()` needs no arguments. `fn` must be importable (a module's function).
    If a rank fails, the others are ended and UnisonoError shows its traceback.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="unisono-") as folder:
        pipes: list[Connection] = []
        processes = []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                place = (rank, ranks, os.path.join(folder, "rendezvous"))
                process = context.Process(
                    target=_run_rank, args=(theirs, place, fn, tuple(args)), daemon=True
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            results = _collect(pipes)
            for process in processes:
                process.join(10)  # let it flush what it printed
            return results
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
                process.close()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Connection]) -> list[Any]:
    """Wait for every rank's result, or for the first failure."""
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        for ready in multiprocessing.connection.wait(list(waiting)):
            assert isinstance(ready, Connection)
            rank = waiting.pop(ready)
            try:
                failed, value = ready.recv()
            except EOFError:
                raise UnisonoError(f"rank {rank} ended without a result") from None
            if failed:
                raise UnisonoError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _run_rank(
    pipe: Connection, place: tuple[int, int, str], fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    rank, size, path = place
    os.environ.update(UNISONO_RANK=str(rank), UNISONO_SIZE=str(size), UNISONO_RENDEZVOUS=path)
    try:
        result = fn(*args)
        world.shutdown()
        pipe.send((False, result))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
        raise SystemExit(1) from None
