"""Calls in torch's order, outputs before inputs: refused with the right call, on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from unisono.collectives.arguments import is_tensor, refuse_type
from unisono.errors import UnisonoError
from unisono.torch_habits import describe_output_first, may_be_output_first, name_type
from unisono.world.world import resolve

Function = TypeVar("Function", bound=Callable[..., Any])


def inputs_first(function: Function) -> Function:
    """Have a function refuse torch's outputs before its inputs: what cannot be its second argument,
    or more arguments than it takes by position."""
    name, code = function.__name__, function.__code__
    second, most = code.co_varnames[1], code.co_argcount

    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        if len(given) > 1 and (len(given) > most or _is_foreign(name, second, given[1])):
            _refuse(name, second, given, named)
        return function(*given, **named)

    return called  # type: ignore[return-value]


def _is_foreign(function: str, second: str, value: Any) -> bool:
    """Whether this cannot be the second argument of our function, which is called `second`."""
    if second == "group":
        is_object = function.endswith("_object") and isinstance(value, (str, dict, set))
        return is_object or may_be_output_first(value)
    return isinstance(value, (list, tuple)) or is_tensor(value)


def _refuse(function: str, second: str, given: Any, named: dict[str, Any]) -> NoReturn:
    """Say what was meant, on the group that the call names, or else in the world."""
    what = {"group": "a group", "op": "a reduction"}.get(second, "a rank")
    why = f"{name_type(given[1])} is not {what}: {describe_output_first(function)}"
    group = next((each for each in (*given[2:], *named.values()) if hasattr(each, "rank")), None)
    try:
        comm = resolve(group)
    except UnisonoError:
        raise TypeError(why) from None
    refuse_type(comm, function.removesuffix("_object"), why)
