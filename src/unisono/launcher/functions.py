"""`unisono.launch`: run a function on several ranks and return their results."""

from __future__ import annotations

import inspect
import linecache
import os
import pickle
import signal
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from reprlib import repr as shorten
from typing import Any, NoReturn, TypeVar

from unisono.comm.forms import refused_by
from unisono.errors import UnisonoError
from unisono.launcher import share
from unisono.launcher.crew import Crew
from unisono.launcher.interrupts import Interrupts
from unisono.launcher.output import Callback, Listener, OnLine, Terminal
from unisono.launcher.process import RankProcess, check_not_nested, ranks_here
from unisono.launcher.protocol import Instructions, above_the_streams, dumps
from unisono.torch_habits import name_type

Result = TypeVar("Result")

_PATIENCE_S = 2.0
"""How long a rank may take to end before it is killed."""


def _refuse_form(why: str, given: Any, named: Any) -> NoReturn:
    raise TypeError(f"{why}. Arguments of the function go into args: launch(fn, 2, args=(5,))")


@refused_by(_refuse_form, "unisono")
def launch(
    fn: Callable[..., Result],
    ranks: int,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    timeout: float | None = None,
    threads: int | None = None,
    pin: bool = False,
    capture: bool = False,
    on_line: OnLine | None = None,
    on: str | None = None,
    resources: Mapping[str, float] | None = None,
    spread: bool = False,
) -> list[Result]:
    """Run `fn(*args, **kwargs)` in `ranks` new processes; returns their results, in rank order.

    Inside, `unisono.init()` needs no arguments, and neither does torch's `init_process_group`: it
    finds RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE and, unless MASTER_ADDR and MASTER_PORT
    are set, a store without a port. `fn` may be any function: of a module, of the program itself,
    of a notebook, a lambda, a closure; it is called with `args` and `kwargs` on every rank.

    The ranks' output appears line by line, prefixed with the rank's name. With `capture` it is kept
    for the exception instead, and with `on_line` every line goes to `on_line(rank, "stdout" or
    "stderr", line)`. Each rank gets `threads` threads; by default the cores divided by the ranks,
    unless OMP_NUM_THREADS is set. `pin` binds each rank to its share of the cores.

    `on`="ray" starts the ranks on the nodes of a Ray cluster: the one to which this process is
    connected, a running one, or a local one of its own. Each rank gets these `resources`, by
    default {"CPU": 1}. As few nodes as possible are used, or with `spread` as many as possible;
    ranks of one node have consecutive numbers. Needs `unisono[ray]`.

    Raises RanksFailed, with every rank's traceback, if a rank fails, and RanksTimedOut, with every
    rank's stack, if they do not finish within `timeout` seconds. No process is left behind in any
    case.
    See also `init`, `RanksFailed`.

    >>> def work(base):
    ...     return base + unisono.get_rank()
    >>> unisono.launch(work, ranks=2, args=(10,))
    [10, 11]
    """
    check_not_nested()
    _check(fn, ranks, timeout, threads)
    _check_place(on, pin, resources, spread)
    given, named = _checked_arguments(fn, args, kwargs)
    job = _pickle(fn, "the function") + _pickle((given, named), "its arguments")
    instructions = Instructions(
        sys_path=tuple(sys.path),
        argv=tuple(sys.argv),
        pins=share.pins(ranks) if pin else (),
        sources=_sources(fn),
    )
    begun = time.monotonic()
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts([signal.SIGINT]))
        hosts: list[str] = []
        processes: Iterable[RankProcess]
        if on == "ray":
            from unisono.launcher.on_ray import Request, ranks_on_ray

            deadline = None if timeout is None else begun + timeout
            request = Request(ranks, resources or {"CPU": 1}, spread, threads, deadline)
            placed = stack.enter_context(ranks_on_ray(instructions, job, request, interrupts))
            hosts = [process.host for process in placed]
            processes = placed
        else:
            share.check_room(ranks)
            stack.enter_context(above_the_streams())
            variables = share.thread_variables(ranks, threads, os.environ)
            variables |= share.memory_variables(os.environ)
            here = ranks_here(instructions, ranks, variables, job=job)
            processes = stack.enter_context(here)
        del job
        listener: Listener = Terminal(hosts=hosts)
        if capture or on_line is not None:
            listener = Callback(on_line)
        crew = stack.enter_context(Crew(listener, interrupts, values=True, captured=capture))
        crew.add(processes)
        crew.run(timeout, _PATIENCE_S, begun)
    return [_unpickle_result(rank.number, rank.value) for rank in crew.ranks]


def _check(fn: Any, ranks: Any, timeout: float | None, threads: int | None) -> None:
    if not callable(fn):
        raise TypeError(f"launch needs a function, not a {type(fn).__name__}")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        order = ": launch(fn, ranks, args)" if isinstance(ranks, (tuple, list)) else ""
        raise ValueError(f"ranks must be a whole number and at least 1, not {ranks!r}{order}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be more than 0, not {timeout!r}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads!r}")


def _check_place(on: Any, pin: bool, resources: Mapping[str, float] | None, spread: bool) -> None:
    if on not in (None, "ray"):
        raise ValueError(f'on must be "ray", or None for this machine, not {on!r}')
    if on is None and (resources is not None or spread):
        raise ValueError('resources and spread are for ranks on a cluster: launch(..., on="ray")')
    if on is not None and pin:
        raise ValueError("pin binds ranks to cores of this machine: Ray's ranks cannot be pinned")
    for name, amount in (resources or {}).items():
        if not isinstance(amount, (int, float)) or not amount > 0:
            raise ValueError(f"resources must be positive amounts per rank, not {name}={amount!r}")


def _checked_arguments(fn: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check that `fn` can be called with `args` and `kwargs`, before any process starts."""
    name = getattr(fn, "__name__", "fn")
    name = name if name.isidentifier() else "fn"
    if not isinstance(args, Iterable) or isinstance(args, (str, bytes)):
        right = f"launch({name}, ranks, ({shorten(args)},))"
        raise TypeError(f"args must be a list or tuple, not {shorten(args)}: {right}")
    if not isinstance(kwargs or {}, Mapping):
        right = f"launch({name}, ranks, args, {{'name': value}})"
        raise TypeError(f"kwargs must be a dict, not {shorten(kwargs)}: {right}")
    given, named = tuple(args), dict(kwargs or {})
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # perhaps a C function
        return given, named
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        raise TypeError(
            f"{name}{signature} cannot be called with {shorten(given)}, {shorten(named)}: "
            f"{error}. launch does not pass the rank (torch's spawn does): call "
            "unisono.get_rank() after unisono.init()"
        ) from None
    return given, named


def _pickle(value: Any, what: str) -> bytes:
    import cloudpickle

    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is not None and (module.__name__ == "__main__" or _can_be_imported(module)):
        module = None
    if module is not None:
        cloudpickle.register_pickle_by_value(module)
    try:
        return dumps(value)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if found := _find_unsendable(value):
            what += f" ({found})"
        raise TypeError(f"launch cannot send {what} to other processes: {reason}") from error
    finally:
        if module is not None:
            cloudpickle.unregister_pickle_by_value(module)


def _find_unsendable(value: Any) -> str:
    """Which argument, or which variable that a function uses, cannot be pickled; "" if unknown."""
    named: dict[str, Any] = {}
    if isinstance(value, types.FunctionType):
        used = inspect.getclosurevars(value)
        variables = {**used.globals, **used.nonlocals}
        named = {f"its variable {name}": each for name, each in variables.items()}
    elif isinstance(value, tuple):
        given, keywords = value
        named = {f"args[{place}]": each for place, each in enumerate(given)}
        named |= {f"kwargs[{name!r}]": each for name, each in keywords.items()}
    for name, each in named.items():
        try:
            dumps(each)
        except Exception:
            return f"{name}, {name_type(each)}"
    return ""


def _can_be_imported(module: types.ModuleType) -> bool:
    """Whether a rank can import the module by its name, which a module that was loaded by hand may
    lack."""
    package = module.__name__.partition(".")[0]
    return any(finder.find_spec(package, None) is not None for finder in sys.meta_path)


def _sources(fn: Any) -> dict[str, list[str]]:
    """The source of code that is in no file, as in a notebook, for tracebacks on ranks."""
    values = [fn, *getattr(fn, "__globals__", {}).values()]
    codes = [value.__code__ for value in values if isinstance(value, types.FunctionType)]
    names = {code.co_filename for code in codes if not os.path.exists(code.co_filename)}
    return {name: linecache.getlines(name) for name in names if name != "<string>"}


def _unpickle_result(rank: int, value: bytearray | None) -> Any:
    assert value is not None
    try:
        return pickle.loads(value)
    except Exception as error:
        raise UnisonoError(
            f"the return value of rank {rank} cannot be read here: {type(error).__name__}: {error}"
        ) from error
