"""What parts of the package need, and which versions of torch: what may not be installed is said in
one sentence. torch itself is not imported here."""

from __future__ import annotations

import importlib.util
from itertools import takewhile


def require_torch(what: str) -> None:
    """Raise TorchMissing unless torch is installed; `what` is the thing that needs it. Imports
    nothing."""
    if importlib.util.find_spec("torch") is None:
        from unisono.errors import TorchMissing  # every `import torch` would pay for it above

        raise TorchMissing(what)


OLDEST_TORCH = (2, 11)
NEWEST_TRIED_TORCH = (2, 15)
"""The newest that `make test-torch` was run with."""


def torch_version(text: str) -> tuple[int, int]:
    """The first two numbers of a version like "2.13.0+cpu"."""
    major, minor = text.split(".")[:2]
    return int(major), int("".join(takewhile(str.isdigit, minor)))


def is_too_old(text: str) -> bool:
    """Whether the backend cannot work with this version."""
    return torch_version(text) < OLDEST_TORCH


def is_untried(text: str) -> bool:
    """Whether this version is newer than any that the backend was tried with."""
    return torch_version(text) > NEWEST_TRIED_TORCH


def format_version(version: tuple[int, int]) -> str:
    """As people write it."""
    return ".".join(map(str, version))
