"""A call as a program makes it, and calls of the wrong form: an argument too many, missing,
unknown, or passed twice.

Python refuses a wrong form before the function runs, so no peer would hear of it: here it is
refused as any invalid argument is, with the right form.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, MethodType
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

        quick, most = _by_position(function)
        form: Function = native.form(quick, answer, MethodType, most)
        functools.update_wrapper(form, function)
        return form

    return decorate


def _by_position(function: Any) -> tuple[Any, int]:
    """The same function, to which arguments that must be named can also be passed by position, and
    how many need no name. Python looks up each default of the former in a dictionary, for 40 ns."""
    code, named = function.__code__, function.__kwdefaults__ or {}
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        return function, sys.maxsize
    if len(named) < code.co_kwonlyargcount:
        return function, code.co_argcount
    last = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[code.co_argcount : last]
    quick = FunctionType(
        code.replace(co_argcount=last, co_kwonlyargcount=0),
        function.__globals__,
        function.__name__,
        (*(function.__defaults__ or ()), *(named[name] for name in names)),
        function.__closure__,
    )
    return quick, code.co_argcount


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
