"""`launch(..., on="ray")`: each rank's process is started by a Ray actor, on any node of a cluster.

What a rank writes and says comes through its actor into pipes of this process, so that the crew
that looks after ranks of this machine looks after these, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.errors import RanksTimedOut, UnisonoError, name_number, name_ranks
from unisono.launcher import share
from unisono.launcher.interrupts import Interrupts
from unisono.launcher.protocol import Instructions
from unisono.launcher.ray_actor import END, RankActor

WAIT_S = 300.0
"""How long Ray has to find room for the ranks and to start their actors."""

_SAY_AFTER_S = 5.0
_TICK_S = 0.1
_CARRIED = ("UNISONO_", "GLOO_", "NCCL_", "TORCH_", "OMP_", "MKL_", "OPENBLAS_")
"""Variables of the launching process that ranks on other machines get, too."""
_OF_ONE_MACHINE = ("UNISONO_HOSTID", "UNISONO_RENDEZVOUS", "UNISONO_RECORD_KEEPER")

_log = logging.getLogger("unisono")


class RemoteProcess:
    """A RankProcess whose rank is on a node of the cluster."""

    group = None

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.lost = ""
        self._status: int | None = None
        pipes = [os.pipe() for _ in range(5)]
        *self.readers, self.end_fd = (reader for reader, _ in pipes)
        self._writers = [writer for _, writer in pipes]

    def send_signal(self, number: int) -> None:
        """It is on its way when this returns."""
        if self._status is None:
            self.actor.send_signal.remote(int(number))

    def ask_for_stack(self) -> bool:
        """Whether the program lets it, only the actor knows."""
        if self._status is None:
            self.actor.ask_for_stack.remote()
        return self._status is None

    def find_status(self) -> int | None:
        """As the actor has told us."""
        return self._status

    def forget(self) -> None:
        """Close what only this side uses; readers are closed by whoever reads."""
        os.close(self.end_fd)

    def take(self, events: Sequence[tuple[int, bytes]]) -> bool:
        """Pass on what the actor has read. Whether more may come."""
        for number, data in events:
            if number == END:
                self.end(int(data))
                return False
            with contextlib.suppress(BrokenPipeError):  # nobody listens any more
                view = memoryview(data)
                while view:
                    view = view[os.write(self._writers[number], view) :]
        return True

    def end(self, status: int, lost: str = "") -> None:
        """The process has ended. Readers, the last of them `end_fd`, become readable to the end."""
        self._status = status
        self.lost = lost
        for writer in self._writers:
            os.close(writer)
        self._writers.clear()

    def close(self) -> None:
        """Nobody will hear of it any more."""
        if self._writers:
            self.end(1)


class Relay:
    """A thread that brings what the actors have read to their ranks' pipes."""

    def __init__(self, ray: Any, processes: Sequence[RemoteProcess]) -> None:
        self._ray = ray
        self._stop = False
        self._processes = processes
        self._thread = threading.Thread(target=self._run, name="unisono ray relay", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()
        for process in self._processes:
            process.close()

    def _run(self) -> None:
        waiting = {process.actor.read.remote(): process for process in self._processes}
        while waiting and not self._stop:
            for ready in self._ray.wait(list(waiting), timeout=_TICK_S)[0]:
                process = waiting.pop(ready)
                try:
                    goes_on = process.take(self._ray.get(ready))
                except Exception as error:  # of Ray: the actor or its node has died
                    process.end(1, f"was lost with its Ray actor: {_last_line(error)}")
                else:
                    if goes_on:
                        waiting[process.actor.read.remote()] = process


@dataclass(frozen=True)
class Placed:
    """Ranks that run: their processes in rank order, and the names of their hosts."""

    processes: list[RemoteProcess]
    hosts: list[str]


@contextlib.contextmanager
def ranks_on_ray(
    instructions: Instructions,
    job: bytes,
    ranks: int,
    resources: Mapping[str, float],
    spread: bool,
    threads: int | None,
    deadline: float | None,
    interrupts: Interrupts,
) -> Iterator[Placed]:
    """Ranks in actors of Ray; afterwards neither these nor their room on the cluster are left."""
    ray = import_ray()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_cluster(ray, ranks, resources))
        wait = _Wait(ray, interrupts, deadline)
        room = stack.enter_context(_room(ray, ranks, resources, spread, wait))
        actors = stack.enter_context(_actors(ray, ranks, resources, room, wait))
        hosts = wait.until([actor.find_host.remote() for _, actor in actors], _starting)
        nodes = [node for node, _ in actors]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        address = addresses[nodes[0]]
        (port,) = wait.until([actors[0][1].open_store.remote(address)], _starting)
        common = {name: text for name, text in os.environ.items() if name.startswith(_CARRIED)}
        for name in _OF_ONE_MACHINE:
            common.pop(name, None)
        common |= {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        }
        if threads is not None:
            common |= share.thread_variables(ranks, threads, {})
        arguments = ray.put(instructions), ray.put(job)
        starts = [
            actor.start.remote(rank, common | variables, *arguments)
            for rank, ((_, actor), variables) in enumerate(
                zip(actors, rank_variables(nodes), strict=True)
            )
        ]
        wait.until(starts, _starting)
        processes = [RemoteProcess(actor) for _, actor in actors]
        stack.enter_context(Relay(ray, processes))
        yield Placed(processes, hosts)


def rank_variables(nodes: Sequence[str]) -> list[dict[str, str]]:
    """What torchrun sets, for ranks on these nodes."""
    sizes = Counter(nodes)
    order = list(sizes)
    seen: Counter[str] = Counter()
    found = []
    for rank, node in enumerate(nodes):
        variables = {
            "RANK": rank,
            "WORLD_SIZE": len(nodes),
            "LOCAL_RANK": seen[node],
            "LOCAL_WORLD_SIZE": sizes[node],
            "GROUP_RANK": order.index(node),
            "GROUP_WORLD_SIZE": len(order),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": len(nodes),
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
        }
        seen[node] += 1
        texts = {name: str(value) for name, value in variables.items()}
        # nobody but the first actor hosts the store
        found.append(texts | {"ROLE_NAME": "default", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    return found


def import_ray() -> Any:
    """The module. Raises UnisonoError where it is not installed."""
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
def _cluster(ray: Any, ranks: int, resources: Mapping[str, float]) -> Iterator[None]:
    """The cluster to which this process is connected, or a running one, or one of our own with
    room for these ranks, however few cores there are."""
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    try:
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:
            cpus = max(share.core_count(), int(ranks * resources.get("CPU", 0) + 0.999))
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _room(
    ray: Any, ranks: int, resources: Mapping[str, float], spread: bool, wait: _Wait
) -> Iterator[Any]:
    """A placement group with a bundle for each rank."""
    from ray.util.placement_group import placement_group, remove_placement_group

    strategy = "SPREAD" if spread else "PACK"
    group = placement_group([dict(resources)] * ranks, strategy=strategy)

    def describe(_: Sequence[int]) -> str:
        return _wanting(ranks, resources, ray.cluster_resources(), ray.available_resources())

    try:
        wait.until([group.ready()], describe)
        yield group
    finally:
        remove_placement_group(group)


@contextlib.contextmanager
def _actors(
    ray: Any, ranks: int, resources: Mapping[str, float], room: Any, wait: _Wait
) -> Iterator[list[tuple[str, Any]]]:
    """An actor per rank with its node, those of one node side by side, the fullest node first."""
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    places = placement_group_table(room)["bundles_to_node_id"]
    nodes = [places[bundle] for bundle in range(ranks)]
    count = Counter(nodes)
    order = sorted(range(ranks), key=lambda bundle: (-count[nodes[bundle]], nodes[bundle], bundle))
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
    """Waits for Ray, until its deadline or an interrupt, and says for what if it takes long."""

    def __init__(self, ray: Any, interrupts: Interrupts, deadline: float | None) -> None:
        self._ray = ray
        self._interrupts = interrupts
        self._begun = time.monotonic()
        limit = self._begun + WAIT_S
        self._deadline = limit if deadline is None else min(deadline, limit)
        self._said = False

    def until(self, references: Sequence[Any], describe: Callable[[Sequence[int]], str]) -> Any:
        """What Ray has for the references; `describe` says what is missing by their indices."""
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
                f"Ray could not start the ranks, all nodes of which need unisono: "
                f"{_last_line(error)}"
            ) from error


def _starting(missing: Sequence[int]) -> str:
    return f"Ray is still starting actors for {name_ranks(missing)}"


def _wanting(
    ranks: int,
    resources: Mapping[str, float],
    there: Mapping[str, float],
    free: Mapping[str, float],
) -> str:
    """Who waits for what."""
    each = " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
    have = " and ".join(
        f"{there.get(name, 0):g} {name}, {free.get(name, 0):g} of them free" for name in resources
    )
    verb = "waits" if ranks == 1 else "wait"
    return (
        f"{name_number(ranks, 'rank')} {verb} for Ray to give {each} to each: its nodes have {have}"
    )


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
