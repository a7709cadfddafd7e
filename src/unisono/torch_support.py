"""What the package needs to know about torch: is it installed, which version, is it imported.

Every `import torch` imports this module, so it imports next to nothing, and never torch.
"""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from itertools import takewhile
from typing import Any, TypeVar

OLDEST_TORCH = "2.11"
NEWEST_TRIED_TORCH = "2.15"
"""The newest version that `make test-torch` was run with."""

listener: Callable[[], None] | None = None
"""Called by torch_backend/autoload.py at the end of `import torch`; set by the watch."""

_Class = TypeVar("_Class", bound=type)


def require_torch(what: str) -> None:
    """Raise TorchMissing unless torch is installed; `what` is the thing that needs it. Imports
    nothing."""
    if importlib.util.find_spec("torch") is None:
        from unisono.errors import TorchMissing  # would slow down every `import torch` above

        raise TorchMissing(what)


def is_newer(version: str, than: str) -> bool:
    """Whether a version like "2.13.0+cpu" is newer, by its first two numbers."""
    first, second = (
        (int(major), int("".join(takewhile(str.isdigit, minor))))
        for major, minor in (text.split(".")[:2] for text in (version, than))
    )
    return first > second


def never_compiled(cls: _Class) -> _Class:
    """Keep torch.compile from compiling the methods of a class, and what they call.

    As `torch.compiler.disable`, which imports the compiler and so takes seconds.
    """
    import torch

    dynamo: Any = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    for method in vars(cls).values():
        if isinstance(method, types.FunctionType):
            dynamo.set_code_exec_strategy(method.__code__, dynamo._FrameExecStrategy(skip, skip))
    return cls
