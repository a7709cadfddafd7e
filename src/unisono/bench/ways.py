"""How the engine goes about a call of some size, in words: what csrc/collectives.c computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unisono.plan.sizes import format_size

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
SLOT_BYTES = 256 * 1024
_POST_BYTES = 1536 - 32


@dataclass(frozen=True)
class Way:
    """`kind` is "post" (beside the announcement), "flat" (everybody combines everything), "cut"
    (each rank combines its share) or "turns" (nothing is combined, or each rank's own part);
    `turns` how many pieces, of at most `piece_bytes` of each part."""

    kind: str
    turns: int
    piece_bytes: int

    def __str__(self) -> str:
        if self.kind == "post":
            return "in the post"
        what = "" if self.kind == "turns" else f"{self.kind}, "
        if self.turns == 1:
            return f"{what}1 turn"
        return f"{what}{self.turns:,} turns of {format_size(self.piece_bytes)}"


def way_of(collective: str, size_bytes: int, ranks: int, sizes: Mapping[str, int]) -> Way:
    """The way of a `collective` whose tensor, or wide side, has `size_bytes`, evenly cut."""
    if collective == "all_reduce":
        if size_bytes >= sizes["cut_from"]:
            return _in_turns("cut", size_bytes, sizes["all_reduce_turn"])
        if _fits_post(1, size_bytes):
            return Way("post", 1, size_bytes)
        return _in_turns("flat", size_bytes, sizes["all_reduce_turn"])
    turn = sizes[f"{collective}_turn"]
    if collective == "broadcast":
        if _fits_post(1, size_bytes):
            return Way("post", 1, size_bytes)
        return _in_turns("turns", size_bytes, min(SLOT_BYTES, max(turn, size_bytes // 8)))
    part = size_bytes // ranks
    if _fits_post(1 if collective == "all_gather" else ranks, part):
        return Way("post", 1, part)
    if collective != "all_gather":
        turn = min(turn, SLOT_BYTES // ranks // 64 * 64)
    way = _in_turns("turns", part, turn)
    if collective == "all_to_all":  # its pieces are not made even
        return Way("turns", -(-part // turn), turn)
    return way


def ways_differ(
    collective: str, size_bytes: int, ranks: int, one: Mapping[str, int], other: Mapping[str, int]
) -> bool:
    """Whether two tunings make a difference to calls of this size."""
    past_cache = [size_bytes >= sizes["bypass_from"] for sizes in (one, other)]
    ways = [way_of(collective, size_bytes, ranks, sizes) for sizes in (one, other)]
    return past_cache[0] != past_cache[1] or ways[0] != ways[1]


def _fits_post(parts: int, part_bytes: int) -> bool:
    return parts * (-(-part_bytes // 16) * 16) <= _POST_BYTES


def _in_turns(kind: str, size_bytes: int, most_bytes: int) -> Way:
    turns = -(-size_bytes // most_bytes) if size_bytes > most_bytes else 1
    piece = -(-size_bytes // turns)
    return Way(kind, turns, -(-piece // 64) * 64)
