"""Calls in torch's form, with outputs among their arguments: taken where they can mean one thing
only, and otherwise refused with the right call, on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from unisono.collectives.arguments import is_tensor, refuse_type
from unisono.errors import UnisonoError
from unisono.torch_habits import describe_output_first, may_be_output_first, name_type
from unisono.world.world import resolve

Function = TypeVar("Function", bound=Callable[..., Any])
_LISTS = (list, tuple)
_KEYWORDS = {
    "gather_list": "out",
    "input_list": "tensors",
    "output": "out",
    "scatter_list": "tensors",
    "tensor_list": "out",
}
"""What torch calls these arguments, and our names for them."""


def understands_torch(*order: str) -> Callable[[Function], Function]:
    """Let a function take torch's call as well: `order` has torch's arguments by our names for
    them. To be taken, the one that torch wants a list for is a list of tensors, and the other is a
    tensor: then nothing of ours can be meant. Without an order no such call is taken."""

    def decorate(function: Function) -> Function:
        name, second = function.__name__, function.__code__.co_varnames[1]

        @functools.wraps(function)
        def called(*given: Any, **named: Any) -> Any:
            if len(given) > 1 or not _KEYWORDS.keys().isdisjoint(named):
                value = given[1] if len(given) > 1 else None
                if value is None or _is_foreign(name, second, value):
                    call = _in_our_words(order, given, named)
                    if call is not None:
                        _check_rank(name, call)
                        return function(**call)
                    if value is not None:
                        _refuse(name, second, given, named)
            return function(*given, **named)

        return called  # type: ignore[return-value]

    return decorate


def _is_foreign(function: str, second: str, value: Any) -> bool:
    """Whether this cannot be the second argument of our function, which is called `second`."""
    if second == "group":
        is_object = function.endswith("_object") and isinstance(value, (str, dict, set))
        return is_object or may_be_output_first(value)
    return isinstance(value, _LISTS) or is_tensor(value)


def _in_our_words(order: Any, given: Any, named: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of torch's call by our names; None if it is not one."""
    call = dict(zip(order, given, strict=False))
    many, one = ("out", "tensor") if "tensor" in order else ("tensors", "out")
    for name, value in named.items():
        ours = one if name == "tensor" else _KEYWORDS.get(name, name)
        if ours in call:
            return None
        call[ours] = value
    parts = call.get(many)
    is_torchs = isinstance(parts, _LISTS) and all(map(is_tensor, parts))
    if parts is None or (is_torchs and not parts):  # as on ranks that neither gather nor scatter
        is_torchs = "src" in order or "dst" in order
        if "src" in order:
            call[many] = None
    return call if is_torchs and is_tensor(call.get(one)) and len(given) <= len(order) else None


def _check_rank(function: str, call: dict[str, Any]) -> None:
    """torch's `src` and `dst` are ranks of the world: refuse one that is another in the group."""
    comm = resolve(call.get("group"))
    rank, known = call.get("src", call.get("dst")), comm.global_ranks
    if rank is None or known is None or known == tuple(range(comm.size)):
        return
    if not 0 <= rank < comm.size or known[rank] != rank:
        comm.refuse(
            function,
            f"{rank} is a rank of the world to torch and one of the group to unisono, and this "
            f"group's members are global ranks {list(known)}: pass root=, a rank of the group",
        )


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
