"""The signatures by which a method of torch's process group may be called.

The full one is `group.allreduce([tensor], options)`. torch's own groups, and code like DDP's,
know shorter ones: `group.allreduce(tensor)`, `group.allreduce([tensor], ReduceOp.MAX)`,
`group.broadcast(tensor, 1)`, `group.barrier()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

Method = Callable[..., Any]


def accept_short_signatures(kind: type, *tensors: Method) -> Callable[[Method], Method]:
    """Let a method that takes tensors and options of this kind be called by every signature.

    `tensors` says for each of its arguments how to bring it into the full signature.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def either(self: Any, *given: Any, **named: Any) -> Any:
            if named:
                given = (*given, *named.values())
            if given and type(given[-1]) is kind:
                return method(self, *given)
            wide = [how(value) for how, value in zip(tensors, given, strict=False)]
            return method(self, *wide, _options(kind, given[len(tensors) :]))

        return either

    return decorate


def _options(kind: type, fields: tuple[Any, ...]) -> Any:
    """What was given beside the tensors: options, or what would have stood in them."""
    options = kind()
    for value in fields:
        if type(value) is kind:
            return value
        if isinstance(value, timedelta):
            options.timeout = value
        elif isinstance(value, int):
            options.rootRank = value
        elif value is not None:
            options.reduceOp = value
    return options


def as_list(tensors: Any) -> Any:
    """A list of tensors, also where one was given."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def as_nested_list(tensors: Any) -> Any:
    """A list of one list of tensors, also where that one was given."""
    return [tensors] if len(tensors) and isinstance(tensors[0], torch.Tensor) else tensors


def unchanged(value: Any) -> Any:
    """What is always passed in one way."""
    return value
