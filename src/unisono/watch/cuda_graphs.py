"""CUDA graphs: while one is captured, asking the GPU how far it is would break the capture."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

_lock = threading.Lock()
_under_way = 0


@contextlib.contextmanager
def may_query_gpu() -> Iterator[bool]:
    """Whether the GPU may be asked; no capture begins meanwhile."""
    with _lock:
        yield _under_way == 0


def are_being_captured() -> bool:
    """Whether any thread captures a graph."""
    return _under_way > 0


def notice_captures() -> None:
    """Count the captures of graphs from now on."""
    graph: Any = torch.cuda.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end
    if hasattr(begin, "is_noticed"):
        return

    @functools.wraps(begin)
    def capture_begin(*args: Any, **named: Any) -> Any:
        _count(1)
        try:
            return begin(*args, **named)
        except BaseException:
            _count(-1)
            raise

    @functools.wraps(end)
    def capture_end(*args: Any, **named: Any) -> Any:
        try:
            return end(*args, **named)
        finally:
            _count(-1)

    capture_begin.is_noticed = True  # type: ignore[attr-defined]
    graph.capture_begin, graph.capture_end = capture_begin, capture_end


def _count(change: int) -> None:
    global _under_way
    with _lock:
        _under_way += change
