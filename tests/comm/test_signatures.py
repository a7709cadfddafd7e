"""Transports have the signatures of Transport, and class hierarchies stay shallow."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import pytest

import unisono.comm
from unisono.comm.transport import Transport

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(unisono.comm.__path__, "unisono.comm.")
    if not found.ispkg
]


def transports() -> list[type[Transport]]:
    found = list(Transport.__subclasses__())
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if not inspect.isabstract(kind)]


def methods() -> Iterator[tuple[type[Transport], str]]:
    for kind in transports():
        for name, said in vars(Transport).items():
            if inspect.isfunction(said) and not name.startswith("_"):
                yield kind, name


def test_there_are_five() -> None:
    known = {"SharedMemory", "HostsTransport", "Cuda", "OverTorch"}
    assert {kind.__name__ for kind in transports()} == known


@pytest.mark.parametrize(("kind", "name"), list(methods()))
def test_a_transport_takes_the_same_arguments(kind: type[Transport], name: str) -> None:
    said = list(inspect.signature(getattr(Transport, name)).parameters)
    assert len(inspect.signature(getattr(kind, name)).parameters) == len(said)


def test_no_class_is_more_than_three_levels_deep() -> None:
    for module in MODULES:
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == module.__name__:
                ours = [base for base in kind.__mro__ if base.__module__.startswith("unisono.")]
                assert len(ours) <= 3, ours
