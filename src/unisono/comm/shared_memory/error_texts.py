"""The text of errors: what the ranks of a group posted or wait for, and how it ended."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from unisono.cases.primitives import primitive_of
from unisono.comm.engine import (
    ABOUT_MESSAGES,
    ENDING_KNOWN,
    ENDING_SILENT,
    GPU_MARK,
    Note,
    Operation,
    Status,
)
from unisono.comm.on_rows.mismatches import PairwiseSizes, algorithm_of, describe_collective
from unisono.comm.reductions import REDUCTIONS, describe_reduction
from unisono.processes import describe_exit

if TYPE_CHECKING:
    from unisono.comm.engine.group_types import Group

_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_FLOAT8 = {
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
    17: "float4_e2m1fn_x2",
}
_GOLDEN = 0x9E3779B97F4A7C15


def _posted_hash(word: int) -> int:
    """The part of a hash that a descriptor holds."""
    return word * _GOLDEN >> 32 & 0xFFFFFFFF


_RAGGED = _posted_hash(0x68656164)
"""The hash that a ragged gather posts: HEADS in csrc/local/ragged.c."""


class AwaitedMessage(NamedTuple):
    """A message that a rank waits for. `is_started`: the rank could also have waited later
    (isend, irecv); `unmatched` is how many messages of the peer have arrived with other tags,
    the oldest with `unmatched_tag`."""

    sends: int
    is_started: int
    peer: int
    tag: int
    unmatched: int
    unmatched_tag: int


def dtype_name(dtype: int) -> str:
    """The name of an element type that the engine wrote as DLPack code, bits and lanes; "" if it
    wrote none, as for a call whose arguments were refused."""
    if not dtype:
        return ""
    code, bits = dtype & 0xFF, dtype >> 8 & 0xFF
    if code == 6:
        return "bool"
    if code in _FLOAT8:
        return _FLOAT8[code]
    return f"{_KINDS.get(code, f'type{code}_')}{bits or 256}"


@functools.lru_cache(maxsize=64)
def dtype_code(name: str) -> int:
    """The reverse; for an unknown type, the code of unnamed bytes."""
    if name == "bool":
        return _dtype(6, 8)
    for code, known in _FLOAT8.items():
        if name == known:
            return _dtype(code, 8)
    for code, kind in _KINDS.items():
        bits = name.removeprefix(kind)
        if bits != name and bits.isdigit():
            return _dtype(code, int(bits))
    return _dtype(0xFF, 8)


def _item_bytes(dtype: int) -> int:
    return max(1, (dtype >> 8 & 0xFF) // 8)


def _dtype(code: int, bits: int) -> int:
    return code | (bits & 0xFF) << 8 | 1 << 16


_REFUSED = dtype_code("float128")
"""The type of a message that its rank refused: torch has no such tensors."""


def describe_post(group: Group, rank: int, call: int) -> str | None:
    """What `rank` posted for this call, in words; None if it has not arrived. Without the sizes
    of a gather, scatter or all_to_all, which may differ."""
    posted = group.state(rank, call)["posted"]
    if call == 0 or posted[0] != call:
        return None
    operation = Operation(posted[1])
    _, _, reduction, dtype, root, refused, size_bytes, shape_hash = posted
    text = operation.name.lower()
    primitive = primitive_of(text)
    if refused == Status.NO_MEMORY:
        return f"{text}, for which it has no room in shared memory"
    if refused:
        why = group.read_note(rank, Note.REFUSAL, 0)
        return f"{text} with arguments that it refused" + (f": {why}" if why else "")
    if operation is Operation.BARRIER:
        return text
    if operation is Operation.ALL_GATHER and root == GPU_MARK:
        return "a call on CUDA tensors"
    others = shape_hash >> 32  # the rest is the hash of the shapes
    if others == _RAGGED and operation in (Operation.ALL_GATHER, Operation.GATHER):
        to = "" if operation is Operation.ALL_GATHER else f", root {root}"
        return f"{text} of tensors of any shapes{to}"
    more, with_hash = "", f"with hash {others:08x}"
    if root == GPU_MARK and not primitive.is_rooted:
        more = "on a GPU"
    elif operation is Operation.ALL_REDUCE and root:
        more = f"by {algorithm_of(text, root)}, schedule {with_hash}"
    elif operation is Operation.BROADCAST and reduction:
        more = f"by {algorithm_of(text, reduction, 255)}, schedule {with_hash}"
    elif others and not primitive.is_pairwise:
        more = f"{'factor' if reduction & 15 == len(REDUCTIONS) else 'sizes'} {with_hash}"
    return describe_collective(
        text,
        dtype_name(dtype),
        None if primitive.is_pairwise else size_bytes // _item_bytes(dtype),
        describe_reduction(reduction) if primitive.reduces else None,
        root if primitive.is_rooted else None,
        more,
    )


def describe_shape(group: Group, rank: int, call: int) -> tuple[str | None, str]:
    """A mark of the shape that `rank` posted for this call, None if it posted none; and the
    shape for the end of a line, if known."""
    posted = group.state(rank, call)["posted"]
    mark = posted[7] & 0xFFFFFFFF if posted[0] == call else 0
    shape = group.read_note(rank, Note.SHAPE, call) if mark else None
    return str(mark) if mark else None, f", shape {shape}" if shape else ""


def read_pairwise_sizes(group: Group, size: int, call: int) -> PairwiseSizes | None:
    """The sizes of a gather, scatter or all_to_all as all ranks posted it; None for other calls."""
    _, operation, _, dtype, root, *_ = group.state(0, call)["posted"]
    primitive = primitive_of(Operation(operation).name.lower())
    if not primitive.is_pairwise:
        return None

    def counts(giver: int, taker: int) -> bool:
        """In a gather only what the root receives counts, in a scatter only what it sends."""
        return root == (taker if primitive.is_to_root else giver) or not primitive.is_rooted

    gives, wants = [], []
    for rank in range(size):
        sizes = [
            size_bytes // _item_bytes(dtype) for size_bytes in group.state(rank, call)["sizes"]
        ]
        gives.append([sizes[to] if counts(rank, to) else None for to in range(size)])
        wants.append([sizes[size + of] if counts(of, rank) else None for of in range(size)])
    return PairwiseSizes(gives, wants)


def stalled_ranks(progress: Sequence[int]) -> list[int]:
    """The ranks that have finished fewer steps than the others, all in the same call."""
    behind = [rank for rank, turns in enumerate(progress) if turns == min(progress)]
    return behind if len(behind) < len(progress) else []


def describe_ending(detail: int) -> str:
    if detail & ENDING_SILENT:
        return "no longer answers: its host, or the network to it, is down"
    if not detail & ENDING_KNOWN:
        return "has ended"
    return describe_exit(os.waitstatus_to_exitcode(detail & 0xFFFF))


# -- messages: what ranks wait for, and what arrived instead -------------------------------------


def read_waiting(group: Group, rank: int) -> AwaitedMessage | None:
    """The message that a rank waits for, or waited for when the group ended; None: it waits for no
    message, or has not waited for long."""
    waits, *message = group.state(rank)["waiting"]
    return AwaitedMessage(*message) if waits else None


def describe_message(sends: bool, peer: int, tag: int) -> str:
    return f"{'send to' if sends else 'recv from'} rank {peer if peer >= 0 else 'any'} (tag {tag})"


def describe_unmatched(count: int, tag: int, source: int) -> str:
    """Messages that have arrived, but with other tags than the awaited one."""
    of = f"from rank {source} " if source >= 0 else ""
    if count == 1:
        return f"a message {of}has arrived with tag {tag}"
    return f"{count} messages {of}have arrived with other tags, the oldest with tag {tag}"


def describe_waiting(waiting: AwaitedMessage) -> str:
    """What a rank waits for, and which messages of that peer have arrived instead."""
    text = describe_message(bool(waiting.sends), waiting.peer, waiting.tag)
    if not waiting.unmatched:
        return text
    instead = describe_unmatched(waiting.unmatched, waiting.unmatched_tag, waiting.peer)
    return f"{text}, but {instead}"


def describe_side(dtype: str, size_bytes: object, shape: object, site: str | None) -> str:
    text = f"{dtype}, {size_bytes} bytes" + (f", shape {shape}" if shape != "" else "")
    return f"{text} at {site}" if site else text


def unfit_text(name: str, tag: object, sender: int, sent: str, receiver: int, wanted: str) -> str:
    where = f"(tag {tag}, group {name})"
    return "\n".join(
        [
            f"a message from rank {sender} does not match its receive on rank {receiver} {where}",
            f"  rank {sender} sends {sent}",
            f"  rank {receiver} receives {wanted}",
            "Both need the same dtype and number of elements. Messages of one tag are received in "
            "the order in which they were sent: use different tags to tell them apart.",
        ]
    )


def read_unfit(
    group: Group, name: str, sender: int, receiver: int, sites: Sequence[str | None]
) -> str:
    """The same, from the notes of the two ranks."""
    given, taken = (
        group.read_note(rank, Note.SHAPE, ABOUT_MESSAGES) for rank in (sender, receiver)
    )
    tag, size_bytes, dtype, sent_bytes, sent_dtype, shape = (taken or "? ? 0 ? 0 ").split(" ", 5)
    for rank, sends, its in ((sender, True, sent_dtype), (receiver, False, dtype)):
        why = group.read_note(rank, Note.REFUSAL, 0) if int(its) == _REFUSED else None
        if why:
            return f"rank {rank} refused its {'send' if sends else 'recv'} (tag {tag}): {why}"
    is_own = sender == receiver  # it leaves one note for both sides
    sent_shape = "" if given is None or is_own else given.split(" ", 5)[5]
    sent = describe_side(dtype_name(int(sent_dtype)), sent_bytes, sent_shape, sites[0])
    site = None if is_own else sites[1]
    wanted = describe_side(dtype_name(int(dtype)), size_bytes, shape, site)
    return unfit_text(name, tag, sender, sent, receiver, wanted)


def timeout_details(group: Group, sends: bool, peer: int) -> list[str]:
    """Why a message of this rank may not have been matched: what arrived from the peer instead,
    and what the peer itself waits for."""
    details = []
    count, tag = (0, 0) if sends else group.unmatched(peer)
    if count:
        details.append(f"  {describe_unmatched(count, tag, peer)}")
    waiting = read_waiting(group, peer) if peer >= 0 else None
    if waiting is not None:
        details.append(f"  rank {peer} is waiting in {describe_waiting(waiting)}")
    return details


def deadlock_circle(group: Group, first: int) -> list[int]:
    """The ranks that wait for each other, from `first` on."""
    circle: list[int] = []
    rank = first
    while rank not in circle:
        circle.append(rank)
        waiting = read_waiting(group, rank)
        if waiting is None or waiting.peer < 0:
            break
        rank = waiting.peer
    return circle


def deadlock_text(
    group: Group, name: str, circle: Sequence[int], sites: Sequence[str | None]
) -> str:
    waits = [read_waiting(group, rank) for rank in circle]
    lines = []
    for rank, waiting, site in zip(circle, waits, sites, strict=True):
        doing = "continued" if waiting is None else describe_waiting(waiting)
        lines.append(f"  rank {rank}: {doing}{f' at {site}' if site else ''}")
    verdict = " -> ".join(map(str, [*circle, circle[0]]))
    advice = _advice([waiting for waiting in waits if waiting is not None])
    return "\n".join(
        [f"deadlock in group {name}: ranks {verdict} wait for each other", *lines, advice]
    )


def _advice(waits: Sequence[AwaitedMessage]) -> str:
    if any(waiting.unmatched for waiting in waits):
        return "A recv takes only messages with its own tag: use the same tag on both sides."
    if not any(waiting.sends for waiting in waits):
        return "All ranks receive and none has sent: let one side send first."
    if any(waiting.sends and not waiting.is_started for waiting in waits):
        return "A send waits until it is received: let one side receive first, or use isend."
    return "A send is over once it is received: start the receives before you wait for it."


# -- ranks in messages ---------------------------------------------------------------------------

_RANKS = re.compile(r"\branks? (\d+(?:-\d+)?(?:(?:, | -> | and )\d+(?:-\d+)?\b(?! more))*)")


def with_global_ranks(text: str, global_ranks: Sequence[int] | None) -> str:
    """A text about ranks of a group, with their global ranks if they differ: "rank 1 (global
    3)". In the first line all ranks, in the others, which may quote, the first."""
    if global_ranks is None or list(global_ranks) == list(range(len(global_ranks))):
        return text

    def with_global(found: re.Match[str]) -> str:
        spans = re.findall(r"(\d+)(?:-(\d+))?", found[1])
        ranks = list(
            dict.fromkeys(
                rank for first, last in spans for rank in range(int(first), int(last or first) + 1)
            )
        )
        if any(rank >= len(global_ranks) for rank in ranks):
            return found[0]
        return f"{found[0]} (global {', '.join(str(global_ranks[rank]) for rank in ranks)})"

    first, *others = text.split("\n")
    return "\n".join(
        [
            _RANKS.sub(with_global, first),
            *(_RANKS.sub(with_global, line, count=1) for line in others),
        ]
    )
