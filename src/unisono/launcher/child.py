"""What runs in a rank's process around the program."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import importlib.util
import linecache
import os
import pickle
import re
import signal
import sys
import traceback
import types
from typing import IO, Any

from unisono import variables
from unisono.errors import GroupAborted, GroupError, PeerLost, UnisonoError
from unisono.failures import causes, shorten
from unisono.launcher.protocol import (
    FAILED,
    FINISHED,
    STARTED,
    VALUE,
    Failure,
    Instructions,
    dumps,
    pack,
)
from unisono.processes import end_with_parent, let_siblings_read, write_stacks_to
from unisono.torch_backend.autoload import inherit_store
from unisono.world import world

_LINE_BUFFERED = 1  # _IOLBF


def main() -> None:
    """Run as this rank; the numbers are on the command line."""
    rank, parent_pid, instructions_fd, results_fd, stacks_fd = map(int, sys.argv[1:6])
    end_with_parent(parent_pid)
    if variables.READ_PEERS.read_or_warn() is not False:
        let_siblings_read(parent_pid)
    for descriptor in (results_fd, stacks_fd, *_rendezvous_descriptor()):
        os.set_inheritable(descriptor, False)  # our children must not inherit them
    _connect_to_record_keeper()
    write_stacks_to(stacks_fd)
    results = _ResultPipe(results_fd)
    results.send(STARTED)
    # reopened because all ranks share the offset of an inherited descriptor
    with open(f"/proc/self/fd/{instructions_fd}", "rb") as file:
        os.close(instructions_fd)
        instructions: Instructions = pickle.load(file)
        if instructions.store_fd >= 0:
            os.set_inheritable(instructions.store_fd, False)
            inherit_store(instructions.store_fd)
        _refuse_breakpoints(rank)
        if instructions.pins:
            os.sched_setaffinity(0, instructions.pins[rank])
        _write_in_lines()
        _look_like_the_parent(instructions)
        if variables.watch_is_wanted():
            from unisono import watch

            watch.start_if_asked()
        if not instructions.program:
            sys.exit(_call_function(file, results))
    sys.exit(_run_program(instructions.program, instructions.is_module, results))


def _refuse_breakpoints(rank: int) -> None:
    """A rank has no standard input, from which pdb would read. PYTHONBREAKPOINT still wins."""

    def hook(*args: Any, **keywords: Any) -> Any:
        if os.environ.get("PYTHONBREAKPOINT"):
            return sys.__breakpointhook__(*args, **keywords)
        code = sys._getframe(1)
        raise UnisonoError(
            f"breakpoint() in rank {rank}, {code.f_code.co_filename}:{code.f_lineno}: a rank has "
            "no terminal. Debug the program as one process, without a launcher, or skip "
            "breakpoints with PYTHONBREAKPOINT=0"
        )

    sys.breakpointhook = hook


class _ResultPipe:
    """The pipe for this rank's messages to the launching process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        if os.getpid() != self._pid:
            return  # a forked child that returned from the program into our code
        for part in pack(kind, payload):
            view = memoryview(part)
            while view:
                view = view[os.write(self._descriptor, view) :]

    def send_failure(self, error: BaseException, exit_code: int) -> None:
        shorten(error)
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename in (__file__, "<string>"):  # ours
            frames = frames.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        follows = any(isinstance(link, (PeerLost, GroupAborted)) for link in causes(error))
        from unisono.watch.stacks import describe_error  # only now: a start must be fast

        is_own = not any(hasattr(link, "report") for link in causes(error))
        how = describe_error(error, with_text=is_own)
        failure = Failure(exit_code, _summary(error), text, follows, is_own, how)
        self.send(FAILED, pickle.dumps(failure))


def _call_function(file: IO[bytes], results: _ResultPipe) -> int:
    try:
        function = pickle.load(file)
        args, kwargs = pickle.load(file)
        file.close()
        _fill_main(function)
        value = _pickle(function(*args, **kwargs))
        world.shutdown()
    except BaseException as error:
        sys.last_value = error
        results.send_failure(error, 1)
        return 1
    results.send(VALUE, value)
    return 0


def _pickle(value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        try:
            return dumps(value)
        except Exception as error:
            raise TypeError(
                f"the function's return value, a {type(value).__name__}, cannot be sent back: "
                f"{_summary(error)}"
            ) from None


def _fill_main(function: Any) -> None:
    """Fill __main__ with the launching program's names, so that its classes can be unpickled."""
    names = getattr(function, "__globals__", {})
    if names.get("__name__") == "__main__":
        mine = sys.modules["__main__"].__dict__
        mine.update({name: value for name, value in names.items() if not name.startswith("__")})


def _run_program(name: str, is_module: bool, results: _ResultPipe) -> int:
    """Run it as `python program.py` or `python -m module` would."""
    try:
        main, code = _load_module(name) if is_module else _load_file(name)
        sys.argv[0] = str(main.__file__) if is_module else name
        sys.modules["__main__"] = main
        exec(code, main.__dict__)
        results.send(FINISHED)
    except SystemExit as error:
        sys.exit(error.code)  # again, by the function, which the watch follows
    except BaseException as error:
        sys.last_value = error  # as Python does, for code that looks at it on exit
        exit_code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        results.send_failure(error, exit_code)
        _show_in_the_programs_own_way(error)
        return exit_code
    return 0


def _show_in_the_programs_own_way(error: BaseException) -> None:
    """Call the program's excepthook; torch.distributed's would only print the error again."""
    hook = getattr(sys.excepthook, "__wrapped__", sys.excepthook)  # our own hook has already run
    by_torch = str(getattr(hook, "__module__", "")).startswith("torch.distributed")
    if hook is not sys.__excepthook__ and not by_torch:
        hook(type(error), error, error.__traceback__)


def _load_file(name: str) -> tuple[types.ModuleType, types.CodeType]:
    path = os.path.abspath(name)
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__builtins__=__builtins__, __file__=path, __loader__=loader)
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    with open(path, "rb") as file:
        return main, compile(file.read(), path, "exec")


def _load_module(name: str) -> tuple[types.ModuleType, types.CodeType]:
    _first_on_path(os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    get_code = getattr(spec and spec.loader, "get_code", None)
    code = get_code(spec.name) if spec is not None and get_code is not None else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"there is no module {name} to run")
    main = importlib.util.module_from_spec(spec)
    main.__name__ = "__main__"
    return main, code


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _look_like_the_parent(instructions: Instructions) -> None:
    sys.path[:] = instructions.sys_path
    sys.argv[:] = instructions.argv
    for name, lines in instructions.sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _write_in_lines() -> None:
    """Flush after each line, in Python and in C."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    with contextlib.suppress(ValueError):  # a C library with another name for it
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINE_BUFFERED, 0)


def _rendezvous_descriptor() -> list[int]:
    where = os.environ.get("UNISONO_RENDEZVOUS", "")
    return [int(where.removeprefix("fd:"))] if where.startswith("fd:") else []


def _connect_to_record_keeper() -> None:
    """Send the records of our groups to the launcher if it keeps them. Child processes do not get
    the variable because they do not inherit the descriptor."""
    descriptor = os.environ.pop(variables.RECORD_KEEPER.name, "")
    if descriptor:
        from unisono.comm.shared_memory.segment_listeners import use_launcher_socket

        use_launcher_socket(int(descriptor))


def _summary(error: BaseException) -> str:
    """The first line of an error, or all lines of one of ours, which say what the ranks did and
    what to do. The watch's verdict says more unless it only repeats this."""
    text = str(error).strip().split("\n", 0 if isinstance(error, UnisonoError) else 1)[0]
    name = type(error).__name__
    report = getattr(error, "report", None)
    if report is not None and (report.kind != "mismatch" or not isinstance(error, UnisonoError)):
        return f"{report.verdict} ({name})"
    if isinstance(error, GroupError):
        return re.sub("$", f" ({name})", text, count=1, flags=re.MULTILINE)
    return f"{name}: {text}" if text else name
