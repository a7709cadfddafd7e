"""How the ranks of a self-test share what they found."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from unisono.comm.base import Communicator
from unisono.doctor.selftest.results import Check
from unisono.errors import GroupError
from unisono.wording import name_ranks

if TYPE_CHECKING:
    import torch

VERDICT_BYTES = 2048
"""How much of what it found wrong a rank can tell the others."""


def collect_verdicts(
    comm: Communicator, checks: Sequence[Check], device: torch.device
) -> tuple[Check, ...]:
    """The checks with every rank's verdict in them. The group that carries the verdicts is the one
    under test, so each has a checksum; one that does not arrive intact is a failure too."""
    import torch

    if comm.size == 1 or comm.errored is not None:
        return tuple(checks)
    mine = {check.primitive: check.message[:300] for check in checks if not check.ok}
    row = torch.zeros(VERDICT_BYTES, dtype=torch.uint8)
    encoded = _encode(mine)
    row[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    rows = torch.zeros(comm.size * VERDICT_BYTES, dtype=torch.uint8, device=device)
    try:
        comm.all_gather(rows, row.to(device))
    except (GroupError, RuntimeError, ValueError, TypeError) as error:
        lost = Check("the ranks' verdicts", False, math.nan, f"{type(error).__name__}: {error}")
        return (*checks, lost)
    verdicts = [_decode(bytes(verdict.tolist())) for verdict in rows.cpu().chunk(comm.size)]
    lost_ranks = [rank for rank, verdict in enumerate(verdicts) if verdict is None]
    merged = [_with_verdicts(check, verdicts) for check in checks]
    if lost_ranks:
        problem = f"none that is intact came from {name_ranks(lost_ranks)}"
        merged.append(Check("the ranks' verdicts", False, math.nan, problem))
    return tuple(merged)


def _with_verdicts(check: Check, verdicts: Sequence[dict[str, str] | None]) -> Check:
    found = {
        rank: verdict[check.primitive]
        for rank, verdict in enumerate(verdicts)
        if verdict is not None and check.primitive in verdict
    }
    if not found:
        return check
    texts = [f"rank {rank}: {text}" for rank, text in found.items()]
    return replace(check, ok=False, message="; ".join(texts))


def _encode(verdict: dict[str, str]) -> bytes:
    """A rank's verdict in at most VERDICT_BYTES: checksum, length, JSON. Texts give way first."""
    room = VERDICT_BYTES - 8
    for kept in (300, 100, 40, 0):
        body = json.dumps({name: text[:kept] for name, text in verdict.items()}).encode()
        if len(body) <= room:
            break
    return zlib.crc32(body).to_bytes(4, "little") + len(body).to_bytes(4, "little") + body


def _decode(row: bytes) -> dict[str, str] | None:
    length = int.from_bytes(row[4:8], "little")
    body = row[8 : 8 + length]
    if zlib.crc32(body) != int.from_bytes(row[:4], "little") or not body:
        return None
    verdict: dict[str, str] = json.loads(body)
    return verdict
