"""The self-test: every primitive once on the group at hand, its results checked, its time taken."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from unisono.comm.base import Communicator, Message
from unisono.errors import GroupError
from unisono.world import resolve

if TYPE_CHECKING:
    import torch

VERDICT_BYTES = 2048
"""How much of what it found wrong a rank can tell the others."""


@dataclass(frozen=True)
class Check:
    """One primitive: whether it did what it promises, how long a call took, what went wrong."""

    primitive: str
    ok: bool
    microseconds: float
    message: str = ""


@dataclass(frozen=True)
class SelfTest:
    """What `debug_communication` found: the same verdicts on every rank, times of this one."""

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
        """The same as plain values, for JSON."""
        return {**asdict(self), "ok": self.ok}

    def __str__(self) -> str:
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        lines = [f"group {self.group}: {ranks} on {self.backend}"]
        for check in self.checks:
            verdict = "ok   " if check.ok else "WRONG"
            took = "" if math.isnan(check.microseconds) else f"{check.microseconds:10.1f} us"
            lines.append(f"  {verdict} {check.primitive:<22}{took:>13}  {check.message}".rstrip())
        wrong = sum(not check.ok for check in self.checks)
        lines.append("  all right" if self.ok else f"  {wrong} of {len(self.checks)} are wrong")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Trial:
    """One call, ready to be made: what to call, where the result will lie, and what it must be."""

    call: Callable[[], object]
    result: Sequence[torch.Tensor]
    expected: Sequence[torch.Tensor]


class _Wrong(Exception):
    """A result that is not what it must be."""


def debug_communication(
    group: Any = None,
    *,
    device: Any = None,
    elements: int = 1000,
    repeats: int = 5,
    show: bool = True,
) -> SelfTest:
    """Run every primitive on this group and compare the results with what they must be.

    Call it on every rank of `group` (a Communicator, a torch process group, or None for the
    world). Tensors lie on `device`: without, on the CPU, or this rank's GPU under nccl; each
    rank's part has `elements` of them. Every rank gets the same verdicts, and rank 0 prints them
    unless `show` is False. A primitive that is wrong or raises is a check that is not `ok`; this
    function itself raises only if there is no such group. After a fault that ended the group the
    rest is not run.
    """
    import torch

    comm = resolve(group)
    backend = getattr(comm, "backend", "unisono")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else "cpu"
    checks: list[Check] = []
    for primitive, prepare in _trials(comm, elements, torch.device(device)):
        if comm.errored is not None:
            checks.append(Check(primitive, False, math.nan, "not run: the group has ended"))
        else:
            checks.append(_check(comm, primitive, prepare, repeats))
    told = _heard_from_all(comm, checks, torch.device(device))
    report = SelfTest(comm.name, backend, comm.rank, comm.size, told)
    if show and (comm.rank == 0 or (comm.errored is not None and not report.ok)):
        print(report, file=sys.stderr if comm.rank else sys.stdout, flush=True)
    return report


def _check(
    comm: Communicator, primitive: str, prepare: Callable[[], _Trial], repeats: int
) -> Check:
    times_us: list[float] = []
    try:
        for _ in range(max(1, repeats)):
            trial = prepare()
            comm.barrier()  # else the time of a call would be the lateness of the others
            start = time.perf_counter()
            trial.call()
            first = [one.cpu() for one in trial.result]  # a GPU's work is over when it is here
            times_us.append((time.perf_counter() - start) * 1e6)
            _compare(first, trial.expected)
    except Exception as error:
        text = str(error) if isinstance(error, _Wrong) else f"{type(error).__name__}: {error}"
        median_us = statistics.median(times_us) if times_us else math.nan
        return Check(primitive, False, median_us, text)
    return Check(primitive, True, statistics.median(times_us))


def _compare(result: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    import torch

    for mine, right in zip(result, expected, strict=True):
        far = ~torch.isclose(mine, right, rtol=1e-6, atol=0)  # a mean may be rounded twice
        if not far.any():
            continue
        place = int(far.nonzero()[0])
        raise _Wrong(
            f"element {place} is {mine[place].item():g} and must be {right[place].item():g}"
        )


# -- what is tried ---------------------------------------------------------------------------------


def _values(rank: int, part: int, elements: int) -> torch.Tensor:
    """Rank `rank`'s part for rank `part`: whole numbers, so that every order of adding is exact."""
    import torch

    return (torch.arange(elements) * 3 + 17 * rank + 5 * part).remainder(97).float()


def _trials(
    comm: Communicator, elements: int, device: torch.device
) -> Iterator[tuple[str, Callable[[], _Trial]]]:
    """Every primitive's name and how to make one call of it ready.

    What must come out is computed here from all ranks' inputs, without any communication.
    """
    import torch

    rank, size = comm.rank, comm.size
    ranks, root = range(size), size - 1
    inputs = [[_values(source, part, elements) for part in ranks] for source in ranks]
    narrow = [inputs[source][0] for source in ranks]
    total = torch.stack(narrow).sum(0)

    own, wide = narrow[rank].to(device), torch.cat(inputs[rank]).to(device)

    def blank(parts: int = 1) -> torch.Tensor:
        return torch.full((parts * elements,), -1.0, device=device)

    def in_place(call: Callable[[torch.Tensor], object], expected: torch.Tensor) -> _Trial:
        tensor = own.clone()
        return _Trial(lambda: call(tensor), [tensor], [expected])

    def into(call: Callable[[torch.Tensor], object], parts: int, expected: torch.Tensor) -> _Trial:
        output = blank(parts)
        return _Trial(lambda: call(output), [output], [expected])

    def waited(tensor: torch.Tensor) -> None:
        work = comm.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()

    def whole(tensor: torch.Tensor) -> None:
        part = blank()
        comm.reduce_scatter(part, wide)
        comm.all_gather(tensor, part)

    yield "barrier", lambda: _Trial(lambda: comm.barrier(), [], [])
    yield "broadcast", lambda: in_place(lambda t: comm.broadcast(t, root), narrow[root])
    reduced = total if rank == root else narrow[rank]
    yield "reduce", lambda: in_place(lambda t: comm.reduce(t, root), reduced)
    yield "all_reduce sum", lambda: in_place(lambda t: comm.all_reduce(t), total)
    yield "all_reduce mean", lambda: in_place(lambda t: comm.all_reduce(t, "mean"), total / size)
    largest = torch.stack(narrow).amax(0)
    yield "all_reduce max", lambda: in_place(lambda t: comm.all_reduce(t, "max"), largest)
    yield "all_reduce async", lambda: in_place(waited, total)
    everything = torch.cat(narrow)
    is_root = rank == root
    yield (
        "gather",
        lambda: into(
            lambda t: comm.gather(t if is_root else None, own, root),
            size,
            everything if is_root else blank(size).cpu(),
        ),
    )
    yield (
        "scatter",
        lambda: into(
            lambda t: comm.scatter(t, wide if is_root else None, root), 1, inputs[root][rank]
        ),
    )
    yield "all_gather", lambda: into(lambda t: comm.all_gather(t, own), size, everything)
    combined = [torch.stack([inputs[source][part] for source in ranks]).sum(0) for part in ranks]
    yield (
        "reduce_scatter",
        lambda: into(lambda t: comm.reduce_scatter(t, wide), 1, combined[rank]),
    )
    yield "reduce_scatter, gather", lambda: into(whole, size, torch.cat(combined))
    mine = torch.cat([inputs[source][rank] for source in ranks])
    yield "all_to_all", lambda: into(lambda t: comm.all_to_all(t, wide), size, mine)
    if size > 1:  # alone there is nobody to write to
        yield from _messages(comm, own, blank, narrow)


def _messages(
    comm: Communicator,
    own: torch.Tensor,
    blank: Callable[[], torch.Tensor],
    narrow: Sequence[torch.Tensor],
) -> Iterator[tuple[str, Callable[[], _Trial]]]:
    """Point to point, each rank to the next one of a ring."""
    rank, size = comm.rank, comm.size
    following, previous = (rank + 1) % size, (rank - 1) % size

    def blocking(tensor: torch.Tensor) -> None:
        if rank == 0:  # one begins by sending, the others by receiving: nobody waits in a circle
            comm.send(own, following)
            comm.recv(tensor, previous)
        else:
            comm.recv(tensor, previous)
            comm.send(own, following)

    def begun(tensor: torch.Tensor) -> None:
        works = [comm.irecv(tensor, previous), comm.isend(own, following)]
        for work in works:
            work.wait()

    def batched(tensor: torch.Tensor) -> None:
        messages = [Message("send", own, following), Message("recv", tensor, previous)]
        for work in comm.batch_isend_irecv(messages):
            work.wait()

    def around(ring: Callable[[torch.Tensor], None]) -> Callable[[], _Trial]:
        def prepare() -> _Trial:
            tensor = blank()
            return _Trial(lambda: ring(tensor), [tensor], [narrow[previous]])

        return prepare

    yield "send, recv", around(blocking)
    yield "isend, irecv", around(begun)
    yield "batch_isend_irecv", around(batched)


# -- what the others found -------------------------------------------------------------------------


def _heard_from_all(
    comm: Communicator, checks: Sequence[Check], device: torch.device
) -> tuple[Check, ...]:
    """The checks with every rank's verdict in them. The group that carries the verdicts is the one
    under test, so each has a checksum; one that does not arrive intact is a failure too."""
    import torch

    if comm.size == 1 or comm.errored is not None:
        return tuple(checks)
    mine = {one.primitive: one.message[:300] for one in checks if not one.ok}
    row = torch.zeros(VERDICT_BYTES, dtype=torch.uint8)
    sealed = _sealed(mine)
    row[: len(sealed)] = torch.frombuffer(bytearray(sealed), dtype=torch.uint8)
    rows = torch.zeros(comm.size * VERDICT_BYTES, dtype=torch.uint8, device=device)
    try:
        comm.all_gather(rows, row.to(device))
    except (GroupError, RuntimeError, ValueError, TypeError) as error:
        lost = Check("the ranks' verdicts", False, math.nan, f"{type(error).__name__}: {error}")
        return (*checks, lost)
    verdicts = [_opened(bytes(one.tolist())) for one in rows.cpu().chunk(comm.size)]
    lost_ranks = [str(rank) for rank, one in enumerate(verdicts) if one is None]
    told = [_joined(check, verdicts) for check in checks]
    if lost_ranks:
        who = ", ".join(lost_ranks)
        told.append(Check("the ranks' verdicts", False, math.nan, f"no intact one of rank {who}"))
    return tuple(told)


def _joined(check: Check, verdicts: Sequence[dict[str, str] | None]) -> Check:
    found = {
        rank: verdict[check.primitive]
        for rank, verdict in enumerate(verdicts)
        if verdict is not None and check.primitive in verdict
    }
    if not found:
        return check
    texts = [f"rank {rank}: {text}" for rank, text in found.items()]
    return replace(check, ok=False, message="; ".join(texts))


def _sealed(verdict: dict[str, str]) -> bytes:
    """A rank's verdict in at most VERDICT_BYTES: checksum, length, JSON. Texts give way first."""
    room = VERDICT_BYTES - 8
    for kept in (300, 100, 40, 0):
        body = json.dumps({name: text[:kept] for name, text in verdict.items()}).encode()
        if len(body) <= room:
            break
    return zlib.crc32(body).to_bytes(4, "little") + len(body).to_bytes(4, "little") + body


def _opened(row: bytes) -> dict[str, str] | None:
    length = int.from_bytes(row[4:8], "little")
    body = row[8 : 8 + length]
    if zlib.crc32(body) != int.from_bytes(row[:4], "little") or not body:
        return None
    verdict: dict[str, str] = json.loads(body)
    return verdict
