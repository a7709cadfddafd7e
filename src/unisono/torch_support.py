"""Whether torch is installed, which version, and whether it has been imported.

Every `import torch` imports this module, so it imports almost nothing, and never torch.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from itertools import takewhile
from typing import Any, TypeVar

OLDEST_TORCH = "2.11"
NEWEST_TRIED_TORCH = "2.15"
"""The newest version that `make test-torch` has run with."""

listener: Callable[[], None] | None = None
"""Called by torch_backend/autoload.py at the end of `import torch`: the watch's, while it is on."""

_Class = TypeVar("_Class", bound=type)


def require_torch(what: str) -> None:
    """Raise TorchMissing unless torch is installed; `what` is the thing that needs it. Imports
    nothing."""
    if importlib.util.find_spec("torch") is None:
        from unisono.errors import (
            TorchMissing,
        )  # not at the top: every `import torch` would pay for it

        raise TorchMissing(what)


def is_newer(version: str, than: str) -> bool:
    """Whether a version like "2.13.0+cpu" is newer, by its first two numbers."""
    first, second = (
        (int(major), int("".join(takewhile(str.isdigit, minor))))
        for major, minor in (text.split(".")[:2] for text in (version, than))
    )
    return first > second


def never_compiled(cls: _Class) -> _Class:
    """Make torch.compile skip the methods of a class and what they call.

    `torch.compiler.disable` does the same but imports the compiler, which takes seconds.
    """
    import torch

    dynamo: Any = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    for method in vars(cls).values():
        if isinstance(method, types.FunctionType):
            dynamo.set_code_exec_strategy(method.__code__, dynamo._FrameExecStrategy(skip, skip))
    return cls
