"""Implementations of the Communicator take what it says they take.

Type checkers leave this to us: its methods are overloaded, and those of the implementations not.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

import unisono.comm.cuda.group
import unisono.comm.hosts.communicator
import unisono.comm.over_torch.communicator
import unisono.comm.shared_memory.communicator
import unisono.comm.solo  # noqa: F401 - Communicator.__subclasses__ lists what is imported
from unisono.comm.base import Communicator


def methods() -> Iterator[tuple[type[Communicator], str]]:
    kinds = list(Communicator.__subclasses__())
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("unisono."):
            for name in sorted(Communicator.__abstractmethods__):
                if inspect.isfunction(getattr(kind, name)):
                    yield kind, name


@pytest.mark.parametrize(("kind", "name"), list(methods()))
def test_an_implementation_takes_the_same_arguments(kind: type[Communicator], name: str) -> None:
    def arguments(owner: type[Communicator]) -> list[tuple[str, object, object]]:
        found = inspect.signature(getattr(owner, name)).parameters.values()
        return [(each.name, each.kind, each.default) for each in found]

    said = arguments(Communicator)
    assert arguments(kind)[: len(said)] == said
    more = arguments(kind)[len(said) :]
    assert all(default is not inspect.Parameter.empty for _, _, default in more)
