"""`unisono.self_test`, the self-test: call every primitive, check every result."""

from __future__ import annotations

import json
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from unisono.comm.communicator import Communicator, Group
from unisono.comm.work import Message
from unisono.errors import GroupError, name_number, name_ranks
from unisono.torch_support import require_torch
from unisono.world.world import resolve

if TYPE_CHECKING:
    import torch

    from unisono.plan.expectations import Array, Origin

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
    and nothing else.

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


@dataclass(frozen=True)
class _Primitive:
    """The argument of `call`, and what it must contain afterwards."""

    name: str
    call: Callable[[torch.Tensor], object]
    before: torch.Tensor
    after: torch.Tensor


def _primitives(comm: Communicator, elements: int, device: torch.device) -> Iterator[_Primitive]:
    """Every primitive with its correct result, computed here without communication."""
    import numpy
    import torch

    from unisono.plan.expectations import Origin, compute, origins

    rank, size = comm.rank, comm.size
    root = size - 1

    def brought(source: int, part: int) -> Array:
        """One rank's data for another: whole numbers, so that sums are exact in any order."""
        index = numpy.arange(elements)
        return ((index * 3 + 17 * source + 5 * part) % 97).astype(numpy.float32)

    def primitive(
        name: str,
        before: torch.Tensor,
        call: Callable[[torch.Tensor], object],
        op: str = "sum",
        parts: Sequence[Origin] | None = None,
    ) -> _Primitive:
        parts = parts or origins(name.split()[0], rank, size, root)
        if parts is None:
            return _Primitive(name, call, before, before.cpu())
        after = numpy.concatenate([compute(part, brought, op) for part in parts])
        return _Primitive(name, call, before, torch.from_numpy(after))

    own = torch.from_numpy(brought(rank, 0)).to(device)
    wide = torch.from_numpy(numpy.concatenate([brought(rank, to) for to in range(size)])).to(device)
    one, all_parts = torch.full_like(own, -1), torch.full_like(wide, -1)
    at_root = rank == root

    def all_reduce_async(tensor: torch.Tensor) -> None:
        work = comm.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    def reduce_scatter_and_gather(whole: torch.Tensor) -> None:
        part = one.clone()
        comm.reduce_scatter(part, wide)
        comm.all_gather(whole, part)

    sums = [Origin(part, range(size)) for part in range(size)]
    yield _Primitive("barrier", lambda _: comm.barrier(), own, own.cpu())
    yield primitive("broadcast", own, lambda t: comm.broadcast(t, root))
    yield primitive("reduce", own, lambda t: comm.reduce(t, root))
    yield primitive("all_reduce sum", own, lambda t: comm.all_reduce(t))
    yield primitive("all_reduce mean", own, lambda t: comm.all_reduce(t, "mean"), "avg")
    yield primitive("all_reduce max", own, lambda t: comm.all_reduce(t, "max"), "max")
    yield primitive("all_reduce async", own, all_reduce_async)
    yield primitive("gather", all_parts, lambda t: comm.gather(t if at_root else None, own, root))
    yield primitive("scatter", one, lambda t: comm.scatter(t, wide if at_root else None, root))
    yield primitive("all_gather", all_parts, lambda t: comm.all_gather(t, own))
    yield primitive("reduce_scatter", one, lambda t: comm.reduce_scatter(t, wide))
    yield primitive("reduce_scatter, gather", all_parts, reduce_scatter_and_gather, parts=sums)
    yield primitive("all_to_all", all_parts, lambda t: comm.all_to_all(t, wide))
    if size > 1:  # a single rank has no peer to send to
        from_previous = [Origin(0, [comm.prev])]
        for name, pass_on in _rings(comm, own):
            yield primitive(name, one, pass_on, parts=from_previous)


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
            comm.barrier()  # otherwise a call's time would include the lateness of others
            start = time.perf_counter()
            primitive.call(tensor)
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
