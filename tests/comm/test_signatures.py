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
import unisono.comm.shared_memory.communicator  # noqa: F401 - __subclasses__ lists what is imported

from unisono.comm.base import Communicator
from unisono.comm.solo import Solo


def kinds() -> list[type[Communicator]]:
    found = list(Communicator.__subclasses__())
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if kind.__module__.startswith("unisono.")]


def methods() -> Iterator[tuple[type[Communicator], str]]:
    for kind in kinds():
        for name in sorted(Communicator.__abstractmethods__):
            if inspect.isfunction(getattr(kind, name)):
                yield kind, name


def test_what_is_behind_a_collective_takes_the_same_everywhere() -> None:
    for name in (name for name in vars(Solo) if name.startswith("_run_")):
        public = list(inspect.signature(getattr(Communicator, name[5:])).parameters)
        wanted = [each for each in public if each not in ("src", "dst", "splits")]
        for kind in kinds():
            if inspect.isfunction(found := getattr(kind, name, None)):
                assert list(inspect.signature(found).parameters) == wanted, (kind, name)


@pytest.mark.parametrize(("kind", "name"), list(methods()))
def test_an_implementation_takes_the_same_arguments(kind: type[Communicator], name: str) -> None:
    def arguments(owner: type[Communicator]) -> list[tuple[str, object, object]]:
        found = inspect.signature(getattr(owner, name)).parameters.values()
        return [(each.name, each.kind, each.default) for each in found]

    said = arguments(Communicator)
    assert arguments(kind)[: len(said)] == said
    more = arguments(kind)[len(said) :]
    assert all(default is not inspect.Parameter.empty for _, _, default in more)
