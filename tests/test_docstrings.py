"""Every public name explains itself: its arguments, what it raises, and an example that runs.

Examples run on each of two ranks, with `comm` (their world), `torch`, `numpy`, `unisono` and `port`
(a free one) defined; if one imports torch.distributed, that is initialised, too. Those that begin
with `init` or `launch` run in one process.
"""

from __future__ import annotations

import doctest
import inspect
import os
import re
import socket
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, get_overloads

import numpy
import pytest
import torch

import unisono
import unisono.plan
import unisono.plan.layouts
import unisono.training
from unisono.cases.primitives import PRIMITIVES

MODULES = ("bench", "differentiable", "math", "watch", "plan", "plan.layouts", "training")
METHODS = (property, staticmethod, classmethod, FunctionType)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def public() -> Iterator[tuple[str, Any]]:
    """Functions, classes and their methods, and the names in `__all__` of the public modules."""
    for name in (*unisono.__all__, "training"):
        value = getattr(unisono, name)
        if isinstance(value, ModuleType):
            assert value.__doc__
            for inner in value.__all__:
                yield from with_methods(f"{name}.{inner}", getattr(value, inner))
        else:
            yield from with_methods(name, value)
    for module in (unisono.plan, unisono.plan.layouts):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                yield f"{module.__name__.removeprefix('unisono.')}.{name}", value


def with_methods(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if isinstance(value, type):
        ours = [base for base in value.__mro__ if base.__module__.startswith("unisono.")]
        methods = {
            method: inspect.getattr_static(value, method) for c in ours for method in vars(c)
        }
        for method, found in methods.items():
            if not method.startswith("_") and isinstance(
                found, (property, staticmethod, classmethod, FunctionType)
            ):
                yield f"{name}.{method}", found


PUBLIC = dict(public())


def docstring(name: str) -> str:
    return inspect.getdoc(PUBLIC[name]) or ""


EXAMPLES = {name: docstring(name) for name in PUBLIC if ">>> " in docstring(name)}
DIFFERENT = {text: name for name, text in EXAMPLES.items()}.values()  # some have two names
ALONE = [name for name in DIFFERENT if re.search(r"unisono\.(launch|init)\(", EXAMPLES[name])]
TOGETHER = [name for name in DIFFERENT if name not in ALONE]


def parameters(value: Any) -> list[str]:
    """The parameters that a caller passes, by name. An exception's message is not for callers."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, type) and "__init__" not in vars(value):
        return []  # its base class describes its fields
    names = {"self", "cls"}
    if isinstance(value, type) and issubclass(value, Exception):
        names |= {"message"}
    kinds = (inspect.Parameter.VAR_KEYWORD,)
    return [
        parameter.name
        for parameter in inspect.signature(value).parameters.values()
        if parameter.name not in names
        and parameter.kind not in kinds
        and not parameter.name.startswith("_")
    ]


def problems(name: str) -> Iterator[str]:
    """What is missing in the docstring of a public name."""
    value, text = PUBLIC[name], docstring(name)
    told, _, _ = text.partition(">>>")
    if isinstance(value, property):
        shown = text + docstring(name.rpartition(".")[0])
        if not told:
            yield "it has no docstring"
        if not re.search(rf">>> .*\.{name.rpartition('.')[2]}\b", shown):
            yield "neither its example nor that of its class shows it"
        return
    if not told:
        yield "it has no docstring"
    if name not in EXAMPLES:
        yield "it has no example"
    for parameter in parameters(value):
        if f"`{parameter}`" not in told:
            yield f"it does not explain `{parameter}`"
    if not isinstance(value, type) and parameters(value) and not re.search(r"\bRaises\b", told):
        yield "it does not say what it raises"
    if name not in PAGES:
        return
    short, names = name.rpartition(".")[2], {page.rpartition(".")[2] for page in PAGES}
    names |= set(unisono.__all__)
    words = set(re.findall(r"`(?:\w+\.)*(\w+)(?:\(\))?`", told)) - {short}
    is_error = isinstance(value, type) and issubclass(value, Exception)  # its bases stand beside it
    if not is_error and not words & names:
        yield "it does not say what else to see"
    also = set(re.findall(r"`(\w+)`", re.split(r"See\s+also", told + "See also")[1]))
    if also - names or short in also:
        yield f"{also} are not names of unisono, or its own"
    if "group" in parameters(value) and name not in LOCAL and "Cost:" not in " ".join(told.split()):
        yield "it does not say what it costs"
    examples = doctest.DocTestParser().get_examples(EXAMPLES.get(name, ""))
    shows = any(example.want for example in examples) or "assert " in EXAMPLES.get(name, "")
    if not shows and name not in UNSHOWN:
        yield "its example has no output"


PAGES = {name for name in PUBLIC if name.rpartition(".")[0] in ("", *MODULES)}
"""What has a page of its own in the reference; methods are on that of their class."""
LOCAL = {
    "GroupError",
    "ProcessGroupManager",
    "SelfTest",
    "watch.Report",
    "training.QuantizedWeights",
}
LOCAL |= {"get_rank", "get_world_size", "setup_process_group_manager"}
"""They take a group, or its name, and send nothing themselves."""
UNSHOWN = ("EngineUnavailable", "SegmentError", "TorchMissing", "training.WeightUpdateWorker")
"""What no example can provoke here, and a class that its methods show."""


def test_every_public_name_explains_itself() -> None:
    found = [f"{name}: {problem}" for name in PUBLIC for problem in problems(name)]
    assert not found, "\n".join(found)


OPEN = {
    "broadcast_object": "only the source knows what it sends",
    "bench.measure_run": "what bench.measure takes, as it declares it",
    "SelfTest.as_dict": "plain data of any kind",
}
"""Arguments of any type, and why."""


def signatures(value: Any) -> list[inspect.Signature]:
    """What type checkers go by: the overloads, where there are some."""
    if isinstance(value, property):
        value = value.fget
    function = getattr(value, "__func__", value)
    return [inspect.signature(variant) for variant in get_overloads(function) or [function]]


def test_type_checkers_know_what_goes_in_and_comes_out() -> None:
    found = []
    for name, value in PUBLIC.items():
        if isinstance(value, type) and issubclass(value, Exception):
            continue  # only unisono creates one
        if name.startswith("training."):
            continue  # models, weights and optimizers come in many shapes
        for signature in signatures(value):
            types = {
                parameter.name: parameter.annotation
                for parameter in signature.parameters.values()
                if parameter.name not in ("self", "cls")
            } | {"return": signature.return_annotation}
            if isinstance(value, type):
                del types["return"]
            for what, annotation in types.items():
                untyped = annotation is inspect.Signature.empty
                if untyped or (re.search(r"\bAny\b", str(annotation)) and name not in OPEN):
                    found.append(f"{name}: {what} may be anything")
    assert not found, "\n".join(found)
    assert OPEN.keys() <= PUBLIC.keys()


def run(name: str, names: dict[str, Any]) -> None:
    """Run an example; fails with its output if that differs."""
    said: list[str] = []
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name], names, name, name, 0)
    before = dict(os.environ)
    try:
        result = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert result.attempted
    assert not result.failed, "".join(said)


@pytest.mark.ranks(2, timeout_s=300)
@pytest.mark.provokes
@pytest.mark.parametrize("fixture", ["comm", "process_group"])
def test_the_examples_run_on_two_ranks(fixture: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(fixture)
    comm = unisono.get_world()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = unisono.broadcast_object(probe.getsockname()[1])
    hand = {"comm": comm, "numpy": numpy, "port": port, "torch": torch, "unisono": unisono}
    for name in TOGETHER:
        with_torch = "import torch.distributed as dist" in EXAMPLES[name]
        if with_torch == (fixture == "process_group"):
            run(name, dict(hand))
            comm.barrier()  # still usable


@pytest.mark.parametrize("name", ALONE)
def test_its_example_starts_in_one_process(name: str) -> None:
    run(name, {"__name__": "__main__", "unisono": unisono})


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_costs_are_those_of_the_table_of_collectives(name: str) -> None:
    (shown,) = re.findall(r"Cost: each of n ranks moves (.*?) of the", docstring(name))
    factor = f"({shown.replace('2 (', '2 * (')})"
    for n in (2, 8):
        assert eval(factor, {"n": n}) == float(PRIMITIVES[name].bus_factor(n))
