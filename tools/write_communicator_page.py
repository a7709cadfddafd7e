"""Write docs/communicator.md: every method of the Communicator, of Work and Message, as they say.

python tools/write_communicator_page.py
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

from unisono.comm import communicator
from unisono.comm.communicator import Communicator
from unisono.comm.shared_tensors import SharedTensors
from unisono.comm.work import Message, Work

PAGE = Path(__file__).parent.parent / "docs/communicator.md"

INTRODUCTION = """# The Communicator

`unisono.init()` returns one, `comm.split(ranks)` makes smaller ones, `manager.tp` is one. The
functions of [collectives.md](collectives.md) stand above it. Every example runs on each of two
ranks, after `comm = unisono.init()`.

This page is written by `tools/write_communicator_page.py` from the docstrings.

"""

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
MESSAGES = ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def page_text() -> str:
    """The page."""
    own = public_names(Communicator)
    conventions = in_markdown((communicator.__doc__ or "").partition("\n\n")[2])
    groups = [name for name in own if name not in (*COLLECTIVES, *MESSAGES)]
    text = INTRODUCTION + in_markdown(Communicator.__doc__ or "")
    text += "## Collectives\n\n" + conventions + section(Communicator, COLLECTIVES)
    text += "## Messages\n\n" + section(Communicator, MESSAGES)
    text += "## Message\n\n" + in_markdown(Message.__doc__ or "")
    text += "## Shared tensors\n\n" + section(SharedTensors, public_names(SharedTensors))
    text += "## Groups\n\n" + section(Communicator, groups)
    text += "## Work\n\n" + in_markdown(Work.__doc__ or "") + section(Work, public_names(Work))
    return text.rstrip() + "\n"


def public_names(owner: type) -> list[str]:
    """Its methods and properties, in the order in which they are written down."""
    return [
        name
        for name, value in vars(owner).items()
        if not name.startswith("_")
        and (isinstance(value, (property, staticmethod)) or inspect.isfunction(value))
    ]


def section(owner: type, names: Iterable[str]) -> str:
    """A heading with the signature for each, and what its docstring says."""
    return "".join(
        f"### {signature(owner, name)}\n\n{in_markdown(inspect.getdoc(getattr(owner, name)) or '')}"
        for name in names
    )


def signature(owner: type, name: str) -> str:
    """ "reduce(tensor, root=0, op='sum', *, async_op=False)"."""
    method = getattr(owner, name)
    if isinstance(method, property):
        return name
    found = inspect.signature(method)
    shown = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
        if parameter.name != "self"
    ]
    return name + str(inspect.Signature(shown)).replace("'", '"')


def in_markdown(docstring: str) -> str:
    """Its text, and its example as code."""
    return "\n".join(_blocks(inspect.cleandoc(docstring))) + "\n"


def _blocks(text: str) -> Iterator[str]:
    told, prompt, example = text.partition(">>>")
    yield told.rstrip() + "\n"
    if prompt:
        yield f"```python\n{prompt}{example.rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page_text())
