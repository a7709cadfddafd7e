"""The world: the Communicator of all ranks of this program, and this process's rank in it."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from unisono import variables
from unisono.comm.communicator import Communicator, Group
from unisono.comm.engine import works
from unisono.comm.forms import Function, refused_by
from unisono.comm.transport import check_seconds
from unisono.comm.work import FinishedWork, Work
from unisono.errors import UnisonoError
from unisono.torch_habits import describe_no_group
from unisono.torch_support import require_torch
from unisono.world.environment import RankInfo, read_local_rank, read_rank_info, read_size
from unisono.world.start import StartedWorld, device_index, start, start_over

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store  # torch.distributed does not declare it

_log = logging.getLogger("unisono")
_world: Communicator | None = None
_start: StartedWorld | None = None

_OPERATION_OF = {
    "reduce_tensor": "all_reduce",
    "monitored_barrier": "barrier",
    "share_module": "allocate",
    "share_tensor": "allocate",
}
"""The collective that a function begins with, if it has another name."""


def init(
    backend: str = "auto",
    *,
    rank: int | None = None,
    size: int | None = None,
    rendezvous: str | os.PathLike[str] | int | Store | None = None,
    timeout_s: float | None = None,
    with_torch: bool | None = None,
) -> Communicator:
    """Join the ranks of this program and return the Communicator of all of them.

    Without arguments, rank and size come from the environment that `unisono.launch`, `unisono run`,
    torchrun, srun or mpirun has set; a program started without a launcher is a world of one
    process, and says so at a terminal. A program that starts its ranks itself, as
    torch.multiprocessing.spawn does, passes `rank` and `size` in each. `rendezvous` is where such
    ranks meet: a path that all of them can write to, an inherited file descriptor, or a torch
    Store; by default the store at MASTER_ADDR and MASTER_PORT where these are set, else a file that
    belongs to their common parent process.

    `backend` is "unisono", "gloo", "nccl", "mpi", or "auto": what UNISONO_BACKEND says (`unisono
    run --backend`), else nccl if every rank has its own GPU, else unisono, on one host or several.
    On nccl the rank's GPU becomes torch's current device.

    init also makes torch's default process group, over the same Communicator, if any rank has
    imported torch; `with_torch` overrides this: True always, False never. If a default process
    group exists, init uses it.

    `timeout_s` limits how long each call waits for the other ranks, and how long the ranks may take
    to meet; the defaults are 30 minutes and 300 s. After 5 s a waiting rank logs a warning that
    names the missing ranks (logger `unisono`).

    Raises RendezvousError if the ranks do not find each other; UnisonoError if a world exists or
    the backend is not available; ValueError if `rank` is not in a world of `size`, or differs from
    what the launcher set.
    See also `launch`, `shutdown`, `get_world`.

    >>> def work():
    ...     with unisono.init() as comm:
    ...         return comm.rank, comm.size
    >>> unisono.launch(work, ranks=2)
    [(0, 2), (1, 2)]
    """
    if _world is not None:
        raise UnisonoError(
            f"unisono is already initialised: this process is rank {_world.rank} of {_world.size} "
            f"on {_world.backend}. unisono.get_world() returns that world; to start another one, "
            "call unisono.shutdown() first"
        )
    variables.mention_misspelt()
    if timeout_s is not None:
        check_seconds(timeout_s)
    if (rank is None) != (size is None):
        raise ValueError("pass both rank and size, or neither")
    existing = None if with_torch is False else _default_group()
    if existing is not None:
        return _enter(_adopt(existing, backend, rank, size))
    info = read_rank_info()
    if info is None:
        info = RankInfo(0, 1)
        if rank is None:
            _mention_one_rank()
    if rank is not None and size is not None:
        _check_rank(rank, size)
        launched = variables.RANK.read(), variables.SIZE.read()
        if rendezvous is not None or launched[0] is None:
            info = RankInfo(rank, size, read_local_rank() if "LOCAL_RANK" in os.environ else rank)
        elif launched != (rank, size):
            raise ValueError(
                f"this process was launched as rank {launched[0]} of {launched[1]}, and cannot be "
                f"rank {rank} of {size}"
            )
    if info.launcher == "unisono" and rendezvous is None:
        rendezvous = variables.RENDEZVOUS.read()
    return _enter(_start_world(info, rendezvous, backend, timeout_s, with_torch))


@functools.cache
def _mention_one_rank() -> None:
    """Tell a user at a terminal that no launcher has started this script, and how to start several
    ranks of it. Tests, notebooks and prompts mean one."""
    main = sys.modules["__main__"]
    module = main.__spec__.name if main.__spec__ else ""  # of python -m
    is_test = "PYTEST_VERSION" in os.environ or module.startswith("unittest")
    is_script = hasattr(main, "__file__") and "ipykernel" not in sys.modules
    if is_test or not is_script or not os.isatty(2):
        return
    program = ["-m", module.removesuffix(".__main__")] if module else sys.argv[:1]
    _log.warning(
        "unisono: no launcher started this program, so it is a world of one rank; "
        "unisono run -n 2 %s starts two (init(rank=0, size=1) means one)",
        shlex.join([*program, *sys.argv[1:]]),
    )


def setup(
    rank: int, world_size: int, backend: str = "auto", *, timeout_s: float | None = None
) -> Communicator:
    """`init` by the name that course notes use: `init(backend, rank=rank, size=world_size)`."""
    return init(backend, rank=rank, size=world_size, timeout_s=timeout_s)


def set_world(comm: Communicator) -> Communicator:
    """Make `comm`, which a world has shrunk to or grown into, the new world: its ranks become the
    global ranks, and `group=None` means it. All its ranks call, newcomers too. The old world is
    shut down with torch's groups; a new default process group of torch's is made over `comm` if any
    rank has imported torch. Create DDP and all other groups again.

    Raises a GroupError if a rank does not call, UnisonoError on any backend but unisono.
    See also `get_world`, `init`.

    >>> def work():
    ...     world = unisono.init()
    ...     world.abort("an example")  # in place of a death
    ...     return unisono.set_world(world.shrink()).name, unisono.get_world_size()
    >>> unisono.launch(work, ranks=2)
    [('world~1', 2), ('world~1', 2)]
    """
    if not isinstance(comm, Communicator):
        raise TypeError(f"set_world needs a Communicator, not {comm!r}")
    exchange = comm.transport.exchange_integers
    if comm.backend != "unisono" or exchange is None:
        raise UnisonoError(f"a group on {comm.backend} cannot become the world")
    with_torch = any(has_torch for (has_torch,) in exchange((int("torch" in sys.modules),)))
    shutdown()
    if _default_group() is not None:
        sys.modules["torch.distributed"].destroy_process_group()
    comm.global_ranks = comm.transport.global_ranks = tuple(range(comm.size))
    store = comm.transport.open_store() if with_torch else None
    return _enter(start_over(comm, "it continues the previous world", with_torch, store))


def shutdown() -> None:
    """Leave the world: destroy the torch groups that `init` made, then close the Communicator. Does
    nothing if there is no world.
    See also `init`.

    >>> comm = unisono.init()  # in a program of one process
    >>> unisono.shutdown()
    >>> unisono.get_backend_reason()
    'no world has started'
    """
    global _world, _start
    ending, _world, _start = _start, None, None
    if ending is not None:
        ending.end()


cleanup = shutdown
"""The name that course notes use."""


def _enter(started: StartedWorld) -> Communicator:
    global _world, _start
    _world, _start = started.comm, started
    _end_with_the_process()
    return _world


def _start_world(
    info: RankInfo, rendezvous: Any, backend: str, timeout_s: float | None, with_torch: bool | None
) -> StartedWorld:
    _check_rank(info.rank, info.size)
    if not isinstance(backend, str) or not backend:
        raise ValueError(
            f"{backend!r} is not a known backend: use auto, unisono, gloo, nccl or mpi"
        )
    if backend == "auto":
        backend = variables.BACKEND.read() or backend
    return start(info, rendezvous, backend.lower(), timeout_s, with_torch)


def _check_rank(rank: int, size: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a world of {size}")


def _adopt(group: Any, backend: str, rank: int | None, size: int | None) -> StartedWorld:
    """torch's default group, which the program made and will destroy."""
    comm = _communicator_of(group)
    assert comm is not None
    if backend.lower() not in ("auto", comm.backend):
        raise UnisonoError(
            f"torch.distributed already runs on {comm.backend}: {backend} cannot also be started"
        )
    if rank is not None and (rank, size) != (comm.rank, comm.size):
        raise UnisonoError(
            f"this process is rank {comm.rank} of {comm.size} in torch.distributed, and cannot be "
            f"rank {rank} of {size}"
        )
    return StartedWorld(comm, _reason_of(group), lambda: None)


def _reason_of(group: Any) -> str:
    """Why torch's default group runs on its backend."""
    from unisono.torch_backend.process_group import our_group

    ours = our_group(group)
    if ours is not None and ours.shown_name != "unisono":
        name = ours.shown_name
        return f"the program asked torch for {name}, and UNISONO_REPLACE={name} gives it unisono"
    return "torch.distributed already runs on it"


@functools.cache
def _end_with_the_process() -> None:
    """A native world ends with its process, and its peers learn how. torch's groups are destroyed
    first because nccl would complain."""
    atexit.register(_at_exit)


def _at_exit() -> None:
    if _start is not None and _start.comm.backend != "unisono":
        if getattr(sys, "last_value", None) is not None:
            _start.comm.abort("the program failed")  # otherwise nccl would wait for the other ranks
        shutdown()


def get_world() -> Communicator:
    """The Communicator of all ranks: the world of `init`, else torch's default group, else, in a
    program of one process, a Communicator of one rank.

    Raises UnisonoError in a process that was launched as one of several and has not met the others.
    See also `init`, `set_world`, `Communicator`.

    >>> unisono.get_world().size == unisono.get_world_size()
    True
    """
    return resolve(None)


def is_begun() -> bool:
    return _world is not None or _default_group() is not None


def resolve(group: Group = None) -> Communicator:
    """The Communicator of `group`: a Communicator (itself), a torch process group, or None for what
    `get_world` returns. Raises what that raises."""
    if group is None and _world is not None:
        return _world
    if isinstance(group, Communicator):
        return group
    if "torch" in sys.modules:
        comm = _communicator_of(_default_group() if group is None else group)
        if comm is not None:
            return comm
    if group is not None:
        raise UnisonoError(describe_no_group(group))
    _check_launched_alone()
    return _alone(os.getpid())


def _check_launched_alone() -> None:
    size = read_size()
    if size > 1:
        raise UnisonoError(
            f"unisono is not initialised: this process was launched as one of {size} ranks, which "
            "have not met: call unisono.init() first"
        )


def needs_no_group(group: Group) -> bool:
    """Whether a helper function has nothing to do: this process is not distributed, and has no
    engine for a group of one."""
    return not works and group is None and _existing() is None and read_size() == 1


def well_formed(function: Function) -> Function:
    """A decorator: a call of the wrong form is refused on the group of the call, or the world."""
    name, module = function.__name__, function.__module__.rpartition(".")[2]
    operation = _OPERATION_OF.get(name, name.removesuffix("_object")).removeprefix("i")
    if module == "math":
        operation = "all_reduce"

    def refuse(why: str, given: tuple[Any, ...], named: dict[str, Any]) -> NoReturn:
        group = next((each for each in (*given, *named.values()) if hasattr(each, "rank")), None)
        error = TypeError(why)
        if operation == "batch_isend_irecv":  # its peers are not known
            raise error
        try:
            comm = resolve(group)
        except UnisonoError:
            raise error from None
        if operation in ("send", "recv"):
            side = "dst" if operation == "send" else "src"
            peer = named.get(side, given[1] if len(given) > 1 else None)
            comm._refuse_message(operation, error, peer, named.get("tag", 0))
        comm._refuse_for(operation, error)

    room = f".{module}" if module in ("differentiable", "math") else ""
    return refused_by(refuse, f"unisono{room}")(function)


def _communicator_of(group: Any) -> Communicator | None:
    """The Communicator of a torch process group; None where this process is in none."""
    if group is None:
        return None
    from unisono.torch_backend.process_group import ProcessGroup, our_group

    ours = our_group(group)
    if ours is not None:
        return ours.comm
    if isinstance(group, ProcessGroup):
        from unisono.comm.factory import wrap

        return wrap(group)
    return None


def _default_group() -> Any:
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD


@functools.lru_cache(maxsize=1)
def _alone(pid: int) -> Communicator:
    """The group of one of a process that is not distributed; a forked child needs its own."""
    from unisono.comm.factory import alone

    return alone()


def get_rank(group: Group = None) -> int:
    """This process's rank in `group`: a Communicator, a torch process group, or None for the world;
    before `init`, what the launcher set. Raises UnisonoError if this process is not in `group`, or
    was launched as one of several ranks without being told which.
    See also `get_world_size`, `get_local_rank`.

    >>> unisono.get_rank() == comm.rank
    True
    """
    comm = _existing(group)
    return _launched().rank if comm is None else comm.rank


def get_world_size(group: Group = None) -> int:
    """How many ranks `group` has, as in `get_rank`. Raises what that raises.
    See also `get_rank`, `is_distributed`.

    >>> unisono.get_world_size()
    2
    """
    comm = _existing(group)
    return _launched().size if comm is None else comm.size


def is_main_process() -> bool:
    """Whether this is rank 0 of the world: True on one rank, and in a program of one process.
    See also `get_rank`.

    >>> unisono.is_main_process() == (comm.rank == 0)
    True
    """
    return get_rank() == 0


def is_distributed() -> bool:
    """Whether this process is one of several ranks; the same on all of them.
    See also `get_world_size`.

    >>> unisono.is_distributed()
    True
    """
    return get_world_size() > 1


def get_local_rank() -> int:
    """This process's number among the ranks of its machine: what its launcher set (LOCAL_RANK and
    the like), else its rank in a world on one machine; 0 in a program of one process.
    See also `get_rank`, `get_device`.

    >>> unisono.get_local_rank() == comm.rank  # all on this machine
    True
    """
    info = read_rank_info()
    if info is not None or "LOCAL_RANK" in os.environ:
        return read_local_rank()
    return get_rank() if get_backend() == "unisono" else 0


def get_backend() -> str:
    """The backend of the world: "unisono", "gloo", "nccl", ...; the same on every rank.
    See also `get_backend_reason`.

    >>> unisono.get_backend()
    'unisono'
    """
    comm = _existing()
    return "unisono" if comm is None else comm.backend


def get_backend_reason() -> str:
    """Why this backend was chosen, in a few words; the same on every rank.
    See also `get_backend`.

    >>> unisono.get_backend_reason()
    'it was asked for'
    """
    if _start is not None:
        return _start.reason
    group = _default_group()
    return "no world has started" if group is None else _reason_of(group)


def get_device(rank: int | None = None) -> torch.device:
    """Where this rank's tensors belong: its GPU where the backend is nccl, else the CPU.

    With `rank`, the device of that local rank. Indices wrap if there are fewer GPUs than ranks.

    Raises ValueError for a negative `rank`, TorchMissing without torch.
    See also `get_local_rank`.

    >>> unisono.get_device(), unisono.get_device(comm.rank)
    (device(type='cpu'), device(type='cpu'))
    """
    require_torch("unisono.get_device")
    import torch

    if rank is not None and rank < 0:
        raise ValueError(f"rank must not be negative: {rank}")
    if get_backend() == "nccl":
        local_rank = get_local_rank() if rank is None else rank
        return torch.device("cuda", device_index(torch, local_rank))
    return torch.device("cpu")


@overload
def barrier(group: Group = None, *, async_op: Literal[False] = False) -> None: ...
@overload
def barrier(group: Group = None, *, async_op: Literal[True]) -> Work: ...
@well_formed
def barrier(group: Group = None, *, async_op: bool = False) -> Work | None:
    """Return once every rank of `group` has called it: a Communicator, a torch process group, or
    None for the world. With `async_op` a Work is returned at once, which is finished when every
    rank has called it. Raises a GroupError if a rank does not call it.
    Cost: the ranks meet once; no data moves. See also `monitored_barrier`.

    >>> work = unisono.barrier(async_op=True)
    >>> work.wait()
    >>> work.is_completed()
    True
    """
    if needs_no_group(group):
        return FinishedWork() if async_op else None
    return resolve(group).barrier(async_op=async_op)


def _launched() -> RankInfo:
    """Which rank of how many the launcher made this process; UnisonoError if unknown."""
    info = read_rank_info()
    if info is None:
        _check_launched_alone()
        return RankInfo(0, 1)
    return info


def _existing(group: Group = None) -> Communicator | None:
    """The Communicator of `group`; None if there is neither a world nor a group."""
    if group is not None:
        return resolve(group)
    if _world is not None:
        return _world
    return _communicator_of(_default_group())


@well_formed
def monitored_barrier(
    group: Group = None, timeout_s: float | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier with its own time limit: `torch.distributed.monitored_barrier`, which torch offers
    on gloo only.

    `group` is a Communicator or a torch process group of ours; None means the world, or torch's
    default group if there is no world. `timeout_s` defaults to the group's limit. `wait_all_ranks`
    exists for compatibility with torch: the error always names every missing rank. A process
    outside the group returns at once.

    Raises CollectiveTimeout, on every rank that called, with `missing` and where those ranks are.
    Cost: that of `barrier`. See also `barrier`.

    >>> print(unisono.monitored_barrier(timeout_s=60))  # every rank has come
    None
    """
    comm = group if isinstance(group, Communicator) else None
    if group is None:
        comm = _existing()
    elif comm is None and "torch" in sys.modules:
        comm = _communicator_of(group)
    if comm is not None:
        comm.barrier(timeout_s=timeout_s)
