"""A call as a program makes it, and calls of the wrong form: an argument too many, missing,
unknown, or passed twice.

Python refuses a wrong form before the function runs, so no peer would hear of it: here it is
refused as any invalid argument is, with the right form.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from unisono.comm.engine import native
from unisono.comm.engine.numbers import Operation

if TYPE_CHECKING:
    from unisono.plan.schedule import Schedule

Function = TypeVar("Function", bound=Callable[..., Any])
Refuse = Callable[[str, tuple[Any, ...], dict[str, Any]], NoReturn]


class GivenCall(NamedTuple):
    """A collective of a program; nobody has checked its arguments yet."""

    operation: Operation
    output: Any
    input: Any
    root: Any
    op: Any
    async_op: bool
    algorithm: str | Schedule | None


def refused_by(refuse: Refuse, owner: str) -> Callable[[Function], Function]:
    """A decorator: `refuse(why, arguments, named_arguments)` answers calls of the wrong form. The
    function is shown as one of `owner`."""

    def decorate(function: Function) -> Function:
        def answer(*given: Any, **named: Any) -> NoReturn:
            refuse(_describe(function, owner, given, named), given, named)

        form: Function = native.form(function, answer, MethodType)
        functools.update_wrapper(form, function)
        return form

    return decorate


def _describe(function: Any, owner: str, given: tuple[Any, ...], named: dict[str, Any]) -> str:
    signature = inspect.signature(function)
    why = "wrong arguments"
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        why = str(error).replace("too many positional arguments", "too many arguments")
    shown = [
        each.replace(annotation=each.empty)
        for each in signature.parameters.values()
        if each.name != "self" and each.kind != each.VAR_POSITIONAL
    ]
    form = signature.replace(parameters=shown, return_annotation=signature.empty)
    return f"{why}: call it as {owner}.{function.__name__}{form}"
