"""What checks are written with: comparisons, and a Communicator that records what it is asked."""

import re
from functools import partial
from typing import Any

import torch

from unisono.comm.communicator import Communicator

MESSAGES = ("send", "recv", "isend", "irecv")


class Wrong(AssertionError):
    """The reader's function has run, and its result is wrong."""


class Missing(AssertionError):
    """The reader's function is not there, or does not return what its signature promises."""


def require(condition: bool, sentence: str) -> None:
    """Raise Wrong with this sentence unless the condition holds."""
    if not condition:
        raise Wrong(sentence)


def require_equal(got: Any, expected: Any, what: str) -> None:
    """Raise Wrong unless both are equal; numbers may be rounded differently."""
    if isinstance(expected, torch.Tensor):
        is_same = isinstance(got, torch.Tensor) and got.shape == expected.shape
        is_same = is_same and torch.allclose(got.double(), expected.double(), rtol=1e-4, atol=1e-5)
        got = getattr(got, "tolist", lambda: got)()
        expected = expected.tolist()
    elif isinstance(expected, float):
        is_same = abs(got - expected) <= 1e-6 * max(abs(expected), 1e-300)
    else:
        is_same = got == expected
    require(is_same, f"{what} should be {_short(expected)}, not {_short(got)}")


def _short(value: Any) -> str:
    text = re.sub(r"-?\d+\.\d+(e[-+]\d+)?", lambda found: f"{float(found[0]):.7g}", str(value))
    return " ".join(text.split())


class Recorder:
    """A Communicator with some of its methods alone, which records what they are given."""

    def __init__(self, comm: Communicator, *methods: str) -> None:
        self.rank, self.size, self.next, self.prev = comm.rank, comm.size, comm.next, comm.prev
        self.calls: list[tuple[str, torch.Tensor, dict[str, Any]]] = []
        self._methods = methods
        for name in methods:
            setattr(self, name, partial(self._call, name, getattr(comm, name)))

    def __getattr__(self, name: str) -> Any:
        allowed = ", comm.".join(self._methods)
        raise Missing(f"comm.{name} may not be used here, only comm.{allowed}")

    def _call(self, name: str, method: Any, x: torch.Tensor, *args: Any, **more: Any) -> Any:
        self.calls.append((name, x, more))
        return method(x, *args, **more)

    def sent(self) -> list[int]:
        """The number of elements of every message sent."""
        return [x.numel() for name, x, _ in self.calls if name in ("send", "isend")]
