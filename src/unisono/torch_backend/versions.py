"""Which versions of torch the backend works with. torch itself is not imported here."""

from __future__ import annotations

import re

OLDEST_TORCH = (2, 11)
NEWEST_TRIED_TORCH = (2, 15)
"""The newest that `make test-torch` was run with."""


def torch_version(text: str) -> tuple[int, int]:
    """The first two numbers of a version like "2.13.0+cpu"."""
    numbers = re.findall(r"\d+", text)[:2]
    return int(numbers[0]), int(numbers[1])


def is_too_old(text: str) -> bool:
    """Whether the backend cannot work with this version."""
    return torch_version(text) < OLDEST_TORCH


def is_untried(text: str) -> bool:
    """Whether this version is newer than any that the backend was tried with."""
    return torch_version(text) > NEWEST_TRIED_TORCH


def format_version(version: tuple[int, int]) -> str:
    """As people write it."""
    return ".".join(map(str, version))
