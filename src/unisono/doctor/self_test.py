"""`unisono.self_test`, the self-test: call every primitive, check every result."""

from __future__ import annotations

import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from unisono.comm.communicator import Communicator, Group
from unisono.comm.work import Message
from unisono.errors import GroupError, name_number, name_ranks
from unisono.torch_support import require_torch
from unisono.world.world import resolve

if TYPE_CHECKING:
    import torch

_VERDICT_BYTES = 16 << 10
_MESSAGE_LENGTH = 140
"""How much of each problem a rank sends to the others. All of them fit into _VERDICT_BYTES, even if
JSON needs six bytes per character."""


@dataclass(frozen=True)
class Check:
    """One primitive: `ok` or not, the median time of a call, and what went wrong."""

    primitive: str
    ok: bool
    microseconds: float | None = None
    message: str = ""


@dataclass(frozen=True)
class SelfTest:
    """What `self_test` found: the same verdicts on every rank, times of this one.

    `group` is the name of the group, `backend` its backend, `rank` and `size` this rank and the
    number of ranks; `checks` has an entry for each primitive.

    >>> test = unisono.self_test(repeats=1, show=False)
    >>> test.ok, test.size
    (True, 2)
    """

    group: str
    backend: str
    rank: int
    size: int
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether every primitive was right on every rank."""
        return all(check.ok for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON.

        >>> unisono.self_test(repeats=1, show=False).as_dict()["ok"]
        True
        """
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        lines = [f"group {self.group}: {name_number(self.size, 'rank')} on {self.backend}"]
        for check in self.checks:
            verdict = "ok   " if check.ok else "WRONG"
            took = "" if check.microseconds is None else f"{check.microseconds:10.1f} us"
            lines.append(f"  {verdict} {check.primitive:<22}{took:>13}  {check.message}".rstrip())
        wrong = sum(not check.ok for check in self.checks)
        lines.append("  all right" if self.ok else f"  {wrong} of {len(self.checks)} are wrong")
        return "\n".join(lines)


def self_test(
    group: Group = None,
    *,
    device: torch.device | str | None = None,
    elements: int = 1000,
    repeats: int = 5,
    show: bool = True,
) -> SelfTest:
    """Run every primitive on this group and check the results.

    Call it on every rank of `group` (a Communicator, a torch process group, or None for the world).
    Tensors are on `device`, by default the CPU, or this rank's GPU under nccl; each rank's part has
    this many `elements`, and each primitive is called `repeats` times. Every rank gets the same
    verdicts, and rank 0 prints them unless `show` is False. A primitive with a wrong result or an
    exception is a check that is not `ok`; after a failure that ended the group the rest is not run.

    Raises UnisonoError if there is no such group, the group's GroupError if it has ended before,
    and nothing else. Cost: `repeats` calls of every primitive. See also `SelfTest`.

    >>> test = unisono.self_test(show=False)
    >>> [check.primitive for check in test.checks if not check.ok]
    []
    """
    require_torch("unisono.self_test")
    import torch

    comm = resolve(group)
    ending = comm.errored
    if ending is not None:
        raise ending
    backend = getattr(comm, "backend", "unisono")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else "cpu"
    checks = [
        _check(comm, primitive, repeats)
        if comm.errored is None
        else Check(primitive.name, False, message="not run: the group has ended")
        for primitive in _primitives(comm, elements, torch.device(device))
    ]
    agreed = _share_verdicts(comm, checks, torch.device(device))
    result = SelfTest(comm.name, backend, comm.rank, comm.size, agreed)
    if show and (comm.rank == 0 or (comm.errored is not None and not result.ok)):
        print(result, file=sys.stderr if comm.rank else sys.stdout, flush=True)
    return result


debug_communication = self_test
"""The name that course notes use."""


# -- what is called --------------------------------------------------------------------------------

_CALLS = (
    *("barrier", "broadcast", "reduce", "all_reduce sum", "all_reduce mean", "all_reduce max"),
    *("all_reduce async", "gather", "scatter", "all_gather", "reduce_scatter"),
)
_OPS = {"mean": "avg", "max": "max"}


@dataclass(frozen=True)
class _Primitive:
    """The argument of a call, what `bind` makes of it, and what it must contain afterwards."""

    name: str
    bind: Callable[[torch.Tensor], Callable[[], object]]
    before: torch.Tensor
    after: torch.Tensor


def _primitives(comm: Communicator, elements: int, device: torch.device) -> Iterator[_Primitive]:
    """Every primitive with its correct result, computed here without communication."""
    import torch

    from unisono.cases.primitives import PRIMITIVES
    from unisono.cases.results import Array, Example

    def value(source: int, index: Array) -> Array:
        """A rank's data: whole numbers, so that sums are exact in any order."""
        return ((index * 3 + 17 * source) % 97).astype("float32")

    def example(name: str, op: str = "sum", count: int = elements) -> Example:
        return Example(PRIMITIVES[name], comm.size, count, value, comm.size - 1, op)

    def on_device(array: Array | None) -> torch.Tensor:
        return torch.empty(0) if array is None else torch.from_numpy(array).to(device)

    def primitive(title: str) -> _Primitive:
        name, _, how = title.partition(" ")
        this = example(name, _OPS.get(how, "sum"))
        input = on_device(this.input(comm.rank))

        def bind(output: torch.Tensor) -> Callable[[], object]:
            if how != "async":
                return this.bind(comm, output, input)
            start = this.bind(comm, output, input, async_op=True)
            return lambda: start().wait()

        before, after = this.output(comm.rank), this.result(comm.rank)
        return _Primitive(title, bind, on_device(before), on_device(after).cpu())

    def reduce_scatter_and_gather(whole: torch.Tensor) -> Callable[[], object]:
        part = one.clone()
        scatter = halves[0].bind(comm, part, on_device(halves[0].input(comm.rank)))
        gather = halves[1].bind(comm, whole, part)
        return lambda: (scatter(), gather())

    halves = example("reduce_scatter"), example("all_gather")
    one, whole = (on_device(half.output(comm.rank)) for half in halves)
    sums = example("all_reduce", count=comm.size * elements).result(comm.rank)
    yield from map(primitive, _CALLS)
    name = "reduce_scatter, gather"
    yield _Primitive(name, reduce_scatter_and_gather, whole, on_device(sums).cpu())
    yield primitive("all_to_all")
    if comm.size > 1:  # a single rank has no peer to send to
        own, previous = (on_device(halves[1].input(rank)) for rank in (comm.rank, comm.prev))
        for name, pass_on in _rings(comm, own):
            yield _Primitive(name, partial(partial, pass_on), one, previous.cpu())


def _rings(
    comm: Communicator, own: torch.Tensor
) -> Iterator[tuple[str, Callable[[torch.Tensor], None]]]:
    """Point to point, each rank to the next one of a ring."""
    following, previous = comm.next, comm.prev

    def blocking(tensor: torch.Tensor) -> None:
        if comm.rank == 0:  # one rank sends first, the others receive first: no deadlock
            comm.send(own, following)
            comm.recv(tensor, previous)
        else:
            comm.recv(tensor, previous)
            comm.send(own, following)

    def begun(tensor: torch.Tensor) -> None:
        for work in (comm.irecv(tensor, previous), comm.isend(own, following)):
            work.wait()

    def batched(tensor: torch.Tensor) -> None:
        messages = [Message("send", own, following), Message("recv", tensor, previous)]
        for work in comm.batch_isend_irecv(messages):
            work.wait()

    yield "send, recv", blocking
    yield "isend, irecv", begun
    yield "batch_isend_irecv", batched


# -- checking --------------------------------------------------------------------------------------


def _check(comm: Communicator, primitive: _Primitive, repeats: int) -> Check:
    """Make all calls even if the first fails: the other ranks make them, too."""
    times_us: list[float] = []
    problem = ""
    for _ in range(max(1, repeats)):
        tensor = primitive.before.clone()
        try:
            call = primitive.bind(tensor)
            comm.barrier()  # otherwise a call's time would include the lateness of others
            start = time.perf_counter()
            call()
            result = tensor.cpu()  # waits for a GPU
            times_us.append((time.perf_counter() - start) * 1e6)
            problem = problem or _difference(result, primitive.after)
        except Exception as error:
            problem = problem or f"{type(error).__name__}: {error}"
        if comm.errored is not None:
            break
    median_us = statistics.median(times_us) if times_us else None
    return Check(primitive.name, not problem, median_us, problem)


def _difference(result: torch.Tensor, right: torch.Tensor) -> str:
    """Where the first wrong number is; "" if there is none."""
    import torch

    far = ~torch.isclose(result, right, rtol=1e-6, atol=0)  # a mean may be rounded twice
    if not far.any():
        return ""
    index = int(far.nonzero()[0])
    return f"element {index} is {result[index].item():g} and must be {right[index].item():g}"


# -- the verdicts of all ranks ---------------------------------------------------------------------


def _share_verdicts(
    comm: Communicator, checks: Sequence[Check], device: torch.device
) -> tuple[Check, ...]:
    """The checks with every rank's verdicts. The group under test carries the verdicts, so each has
    a checksum; a damaged one is a failure, too."""
    import torch

    if comm.size == 1 or comm.errored is not None:
        return tuple(checks)
    mine = {check.primitive: check.message[:_MESSAGE_LENGTH] for check in checks if not check.ok}
    row = torch.frombuffer(bytearray(_encode(mine)), dtype=torch.uint8).to(device)
    rows = torch.zeros(comm.size * _VERDICT_BYTES, dtype=torch.uint8, device=device)
    try:
        comm.all_gather(rows, row)
    except (GroupError, RuntimeError, ValueError, TypeError) as error:
        lost = Check("the ranks' verdicts", False, message=f"{type(error).__name__}: {error}")
        return (*checks, lost)
    verdicts = [_decode(row.numpy().tobytes()) for row in rows.cpu().chunk(comm.size)]
    merged = [_with_verdicts(check, verdicts) for check in checks]
    lost_ranks = [rank for rank, verdict in enumerate(verdicts) if verdict is None]
    if lost_ranks:
        problem = f"no valid verdict arrived from {name_ranks(lost_ranks)}"
        merged.append(Check("the ranks' verdicts", False, message=problem))
    return tuple(merged)


def _with_verdicts(check: Check, verdicts: Sequence[dict[str, str] | None]) -> Check:
    found = [
        f"rank {rank}: {verdict[check.primitive]}"
        for rank, verdict in enumerate(verdicts)
        if verdict is not None and check.primitive in verdict
    ]
    return replace(check, ok=False, message="; ".join(found)) if found else check


def _encode(verdict: dict[str, str]) -> bytes:
    """A checksum, then JSON, padded with spaces."""
    body = json.dumps(verdict).encode().ljust(_VERDICT_BYTES - 4)
    return zlib.crc32(body).to_bytes(4, "little") + body


def _decode(row: bytes) -> dict[str, str] | None:
    intact = zlib.crc32(row[4:]) == int.from_bytes(row[:4], "little")
    verdict: dict[str, str] | None = json.loads(row[4:]) if intact else None
    return verdict
