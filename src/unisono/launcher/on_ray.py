"""`launch(..., on="ray")`: each rank's process is started by a Ray actor, on any node of a cluster.

The crew that manages ranks of this machine also manages these, through their actors. A rank is a
process of its own, as on one machine: it can be asked for its stack, interrupted and killed with
its children, and it can crash, while its actor lives on to report it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import queue
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from unisono.errors import RanksTimedOut, UnisonoError, name_number, name_ranks
from unisono.launcher import share
from unisono.launcher.guardian import Guardian
from unisono.launcher.interrupts import Interrupts
from unisono.launcher.process import LocalProcess, RankProcess, rank_variables, start_process
from unisono.launcher.protocol import Instructions, write_instructions
from unisono.launcher.store import LazyStore
from unisono.variables import HOSTID, JOB_SECRET, JOB_SECRET_FILE

WAIT_S = 300.0
"""How long Ray may take to place the ranks and start their actors."""

_SAY_AFTER_S = 5.0
_TICK_S = 0.1
_CARRIED = ("UNISONO_", "GLOO_", "UCX_", "NCCL_", "TORCH_", "OMP_", "MKL_", "OPENBLAS_")
"""Variables of the launching process that ranks on other machines get, too."""
_OF_ONE_MACHINE = ("UNISONO_HOSTID", "UNISONO_RENDEZVOUS", "UNISONO_RECORD_KEEPER")
END = -1
"""In place of a stream's number: the process has ended, with this status."""

Event = tuple[int, bytes]
"""Which of the process's streams (0 to 3), or END, and the data."""

_PIECES = 64
"""How much output a rank may have pending before its writes block."""

_log = logging.getLogger("unisono")


class RankActor:
    """Starts and manages a rank's process on its node. The launching process calls it, several
    calls at a time."""

    def __init__(self) -> None:
        self._events: queue.Queue[Event] = queue.Queue(_PIECES)
        self._process: LocalProcess | None = None
        self._store: LazyStore | None = None

    def find_host(self) -> str:
        """This node's name, or what UNISONO_HOSTID calls it."""
        return HOSTID.read() or socket.gethostname()

    def open_store(self, address: str) -> dict[str, str]:
        """Start a torch store at this address of the node; returns the variables by which ranks
        find it."""
        self._store = LazyStore(address)
        return self._store.variables()

    def start(
        self, rank: int, given: Mapping[str, str], instructions: Instructions, job: bytes
    ) -> None:
        """Start the rank's process, with the node's environment and these variables. It finds
        modules where this actor, like the program's other actors, finds them."""
        instructions = dataclasses.replace(instructions, sys_path=tuple(sys.path))
        begun: Future[None] = Future()
        # The kernel kills a child when the thread that started it ends: so one of ours starts it.
        args = (begun, rank, os.environ | dict(given), instructions, job)
        threading.Thread(target=self._look_after, args=args, daemon=True).start()
        begun.result()

    def read(self) -> list[Event]:
        """The output since the last call; waits until there is some."""
        events = [self._events.get()]
        with contextlib.suppress(queue.Empty):
            while len(events) < _PIECES:
                events.append(self._events.get_nowait())
        return events

    def send_signal(self, number: int) -> None:
        """Send a signal to the rank, if it lives."""
        if self._process is not None:
            self._process.send_signal(number)

    def ask_for_stack(self) -> None:
        """Have the rank write its stacks, if it lives."""
        if self._process is not None:
            self._process.ask_for_stack()

    def _look_after(
        self,
        begun: Future[None],
        rank: int,
        environment: Mapping[str, str],
        instructions: Instructions,
        job: bytes,
    ) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks SIGINT, which is inherited
        try:
            with write_instructions(instructions, job) as file:
                del job
                process = start_process(rank, environment, file.fileno())
            self._process = process
        except BaseException as error:
            begun.set_exception(error)
            return
        begun.set_result(None)
        guardian = Guardian()
        guardian.guard([process.group])

        def end(status: int) -> None:
            process.send_signal(signal.SIGKILL)  # its children: nothing stays on a cluster
            guardian.close()
            process.forget()
            self._events.put((END, str(status).encode()))

        with selectors.DefaultSelector() as selector:
            if self._store is not None:
                self._store.listen(selector)
            process.listen(selector, [partial(self._pass_on, number) for number in range(4)], end)
            # the store needs this thread, and other ranks may need the store until their end
            while self._store is not None or selector.get_map():
                for key, _ in selector.select():
                    key.data()

    def _pass_on(self, number: int, data: bytes) -> None:
        self._events.put((number, data))


class RemoteProcess(RankProcess):
    """On a node of the cluster: a thread copies what its actor reads there into pipes."""

    def __init__(self, ray: Any, actor: Any, host: str) -> None:
        pipes = [os.pipe() for _ in range(5)]
        readers, writers = zip(*pipes, strict=True)
        super().__init__(readers[:4], readers[4], host)
        self._actor = actor
        self._ended = False
        threading.Thread(target=self._bring, args=(ray, writers), daemon=True).start()

    def _bring(self, ray: Any, writers: Sequence[int]) -> None:
        """Until the process has ended, or is forgotten."""
        *streams, end = writers
        with contextlib.ExitStack() as stack, contextlib.suppress(BrokenPipeError):
            for writer in writers:
                stack.callback(os.close, writer)
            while True:
                try:
                    events: list[Event] = ray.get(self._actor.read.remote())
                except Exception as error:  # from Ray: the actor or its node has died
                    self.lost = f"was lost with its Ray actor: {_last_line(error)}"
                    events = [(END, b"1")]
                for number, data in events:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(end if number == END else streams[number], view) :]
                    if number == END:
                        return

    def _exit_code(self) -> int:
        self._ended = True
        return int(os.read(self._end_fd, 16))

    def send_signal(self, number: int) -> None:
        if not self._ended:
            self._actor.send_signal.remote(int(number))  # not awaited

    def ask_for_stack(self) -> bool:
        if not self._ended:  # only the actor knows whether the program handles it
            self._actor.ask_for_stack.remote()
        return not self._ended

    def forget(self) -> None:
        self._ended = True
        super().forget()


@dataclass(frozen=True)
class Request:
    """The request to Ray: `resources` for each rank, on as many nodes as possible with `spread`,
    otherwise on as few."""

    ranks: int
    resources: Mapping[str, float]
    spread: bool
    threads: int | None
    deadline: float | None


@contextlib.contextmanager
def ranks_on_ray(
    instructions: Instructions, job: bytes, request: Request, interrupts: Interrupts
) -> Iterator[list[RemoteProcess]]:
    """Ranks in Ray actors; the actors and their resources are released afterwards."""
    ray = import_ray()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_cluster(ray, request))
        wait = _Wait(ray, interrupts, request.deadline)
        room = stack.enter_context(_room(ray, request, wait))
        placed = stack.enter_context(_actors(ray, request, room))
        nodes, actors = [node for node, _ in placed], [actor for _, actor in placed]
        hosts = wait.until([actor.find_host.remote() for actor in actors], _starting)
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        (found,) = wait.until([actors[0].open_store.remote(addresses[nodes[0]])], _starting)
        common = {name: text for name, text in os.environ.items() if name.startswith(_CARRIED)}
        for name in _OF_ONE_MACHINE:
            common.pop(name, None)
        secret = JOB_SECRET.read() or JOB_SECRET_FILE.read() or secrets.token_hex(32).encode()
        common[JOB_SECRET.name] = secret.decode()
        common |= found | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        if request.threads is not None:
            common |= share.thread_variables(request.ranks, request.threads, {})
        arguments = ray.put(instructions), ray.put(job)
        starts = [
            actor.start.remote(rank, common | variables, *arguments)
            for rank, (actor, variables) in enumerate(zip(actors, _variables(nodes), strict=True))
        ]
        wait.until(starts, _starting)
        yield [RemoteProcess(ray, actor, host) for actor, host in zip(actors, hosts, strict=True)]


def _variables(nodes: Sequence[str]) -> list[dict[str, str]]:
    """What torchrun sets for ranks on these nodes."""
    sizes = Counter(nodes)
    order = list(sizes)
    seen: Counter[str] = Counter()
    found = []
    for rank, node in enumerate(nodes):
        local, of_nodes = (seen[node], sizes[node]), (order.index(node), len(order))
        found.append(rank_variables(rank, len(nodes), local, of_nodes))
        seen[node] += 1
    return found


def import_ray() -> Any:
    """The module. Raises UnisonoError if it is not installed."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UnisonoError(
            'launch(..., on="ray") needs Ray, which is not installed: run '
            '`pip install "unisono[ray]"`'
        ) from None
    return ray


@contextlib.contextmanager
def _cluster(ray: Any, request: Request) -> Iterator[None]:
    """Connect to the current cluster, or a running one, or start a local one with room for these
    ranks, however few cores there are."""
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    try:
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:
            wanted = math.ceil(request.ranks * request.resources.get("CPU", 0))
            cpus = max(share.core_count(), wanted)
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _room(ray: Any, request: Request, wait: _Wait) -> Iterator[Any]:
    """A placement group with a bundle for each rank."""
    from ray.util.placement_group import placement_group, remove_placement_group

    strategy = "SPREAD" if request.spread else "PACK"
    group = placement_group([dict(request.resources)] * request.ranks, strategy=strategy)

    def describe(_: Sequence[int]) -> str:
        return _wanting(request, ray.cluster_resources(), ray.available_resources())

    try:
        wait.until([group.ready()], describe)
        yield group
    finally:
        remove_placement_group(group)


@contextlib.contextmanager
def _actors(ray: Any, request: Request, room: Any) -> Iterator[list[tuple[str, Any]]]:
    """An actor per rank with its node, grouped by node, the fullest node first."""
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    places = placement_group_table(room)["bundles_to_node_id"]
    nodes = [places[bundle] for bundle in range(request.ranks)]
    count = Counter(nodes)
    order = sorted(range(len(nodes)), key=lambda place: (-count[nodes[place]], nodes[place], place))
    resources = request.resources
    other = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    actors: list[tuple[str, Any]] = []
    try:
        for bundle in order:
            remote = ray.remote(RankActor).options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                resources=other,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    room, placement_group_bundle_index=bundle
                ),
            )
            actors.append((nodes[bundle], remote.remote()))
        yield actors
    finally:
        for _, actor in actors:
            ray.kill(actor)


class _Wait:
    """Waits for Ray, until its deadline or an interrupt, and logs what it waits for if that takes
    long."""

    def __init__(self, ray: Any, interrupts: Interrupts, deadline: float | None) -> None:
        self._ray = ray
        self._interrupts = interrupts
        self._begun = time.monotonic()
        limit = self._begun + WAIT_S
        self._deadline = limit if deadline is None else min(deadline, limit)
        self._said = False

    def until(self, references: Sequence[Any], describe: Callable[[Sequence[int]], str]) -> Any:
        """The values of Ray's references; `describe` names the missing ones by their indices."""
        missing = list(references)
        while missing:
            _, missing = self._ray.wait(missing, num_returns=len(missing), timeout=_TICK_S)
            if self._interrupts.noted:
                raise KeyboardInterrupt
            now = time.monotonic()
            late, long = now >= self._deadline, now >= self._begun + _SAY_AFTER_S
            if missing and (late or (long and not self._said)):
                what = describe([references.index(reference) for reference in missing])
                if late:
                    waited = self._deadline - self._begun
                    raise RanksTimedOut(f"not started within {waited:.3g} s: {what}")
                self._said = True
                _log.warning("%s (launch gives up in %.0f s)", what, self._deadline - now)
        try:
            return self._ray.get(list(references))
        except self._ray.exceptions.RayError as error:
            raise UnisonoError(
                "Ray could not start the ranks (unisono must be installed on every node): "
                f"{_last_line(error)}"
            ) from error


def _starting(missing: Sequence[int]) -> str:
    return f"Ray is still starting actors for {name_ranks(missing)}"


def _wanting(request: Request, there: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Who waits for what."""
    each = " and ".join(f"{amount:g} {name}" for name, amount in request.resources.items())
    have = " and ".join(
        f"{there.get(name, 0):g} {name}, {free.get(name, 0):g} of them free"
        for name in request.resources
    )
    who = name_number(request.ranks, "rank")
    verb = "waits" if request.ranks == 1 else "wait"
    return f"{who} {verb} for Ray to give {each} to each: its nodes have {have}"


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
