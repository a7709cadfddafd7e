"""Write docs/communicator.md: every method of the Communicator, of Work and Message, as they say.

python tools/write_communicator_page.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from unisono.comm import communicator
from unisono.comm.communicator import Communicator
from unisono.comm.shared_tensors import SharedTensors
from unisono.comm.work import Message, Work

PAGE = Path(__file__).parent.parent / "docs/communicator.md"

INTRODUCTION = """# The Communicator

<!-- Written by tools/write_communicator_page.py from the docstrings. -->

`unisono.init()` returns a Communicator. `comm.split(ranks)` makes a smaller one, and `manager.tp`
is one too. The [functions](collectives.md) are built on it. Every example on this page runs on two
ranks, after `comm = unisono.init()`.

"""

UNEVEN = """### Uneven parts: variable sizes, split sizes

To exchange parts of different sizes, pass lists: `comm.all_to_all(outputs, inputs)` with one tensor
per rank in each. So do `all_gather`, `gather`, `scatter` and `reduce_scatter`. There are no split
sizes: `torch.split(x, sizes)` makes the list. The functions exchange the sizes themselves and need
no output buffers; see [uneven all_to_all](%s).

"""
UNEVEN_LINK = "collectives.md#uneven-all_to_all-variable-sizes-and-split-sizes"

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
    text += "## Collectives\n\n" + conventions + UNEVEN % UNEVEN_LINK
    text += section(Communicator, COLLECTIVES)
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
    """A heading for each, its signature, and what its docstring says."""
    return "".join(
        f"### {name}\n\n{signature(owner, name)}"
        + in_markdown(inspect.getdoc(getattr(owner, name)) or "")
        for name in names
    )


def signature(owner: type, name: str) -> str:
    """A block of code, `reduce(tensor, root=0, op="sum", *, async_op=False)`; "" for a property."""
    method = getattr(owner, name)
    if isinstance(method, property):
        return ""
    found = inspect.signature(method)
    shown = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
        if parameter.name != "self"
    ]
    call = name + str(inspect.Signature(shown)).replace("'", '"')
    return f"```python\n{call}\n```\n\n"


def in_markdown(docstring: str) -> str:
    """Its text, with links where it names pages, and its example as code."""
    text = "\n".join(_blocks(inspect.cleandoc(docstring))) + "\n"
    return re.sub(r"docs/([\w-]+\.md)", _link, text)


def _link(named: re.Match[str]) -> str:
    """A page by its title."""
    title, *_ = PAGE.with_name(named[1]).read_text().removeprefix("# ").splitlines()
    return f"[{title}]({named[1]})"


def _blocks(text: str) -> Iterator[str]:
    told, prompt, example = text.partition(">>>")
    yield told.rstrip() + "\n"
    if prompt:
        yield f"```python\n{prompt}{example.rstrip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page_text())
