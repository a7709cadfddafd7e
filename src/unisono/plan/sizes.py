"""Sizes as people write them: 8, 64K, 64M, 1G, and ranges of them like 8:1G."""

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_EXAMPLES = "sizes are written like 8, 64K, 1.5M or 1G (K = 1,024 bytes, M = 1,024 K, ...)"


def parse_size(text: str) -> int:
    """A size like "64M" in bytes. Raises ValueError, with examples of sizes, for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size: {_EXAMPLES}")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_sizes(text: str, factor: int = 2) -> tuple[int, ...]:
    """The sizes of "8:1G", each `factor` times the one before, or of "8,1K,64M", in bytes. Raises
    ValueError for anything else."""
    if ":" not in text:
        return tuple(parse_size(part) for part in text.split(","))
    first, _, last = text.partition(":")
    smallest, largest = parse_size(first), parse_size(last)
    if not 0 < smallest <= largest:
        raise ValueError(f"{text!r} is not a range of sizes: write the smaller one first, from 1")
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


def format_size(size: float) -> str:
    """64 MiB as "64M", 1,536 bytes as "1.5K", 100 as "100"."""
    for unit, factor in reversed(_UNITS.items()):
        if size >= factor and unit:
            return f"{round(size / factor, 1):g}{unit}"
    return f"{size:g}"


def format_bytes(size: float) -> str:
    """64 MiB as "64 MiB", 100 as "100 B"."""
    short = format_size(size)
    return f"{short[:-1]} {short[-1]}iB" if short[-1].isalpha() else f"{short} B"


def format_seconds(seconds: float) -> str:
    """Three digits and a unit: 12.3 us, 4.56 ms, 1.2 s."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"
