"""What keeps torch.compile out of our classes."""

from __future__ import annotations

import types
from typing import Any, TypeVar

import torch

_Class = TypeVar("_Class", bound=type)


def never_compiled(cls: _Class) -> _Class:
    """Let torch.compile leave the methods of a class, and what they call, as they are.

    What `torch.compiler.disable` does, but that imports the compiler, which takes seconds.
    """
    dynamo: Any = torch._C._dynamo.eval_frame
    skip = dynamo._FrameAction.SKIP
    for method in vars(cls).values():
        if isinstance(method, types.FunctionType):
            dynamo.set_code_exec_strategy(method.__code__, dynamo._FrameExecStrategy(skip, skip))
    return cls
