"""The table of `unisono tune`, as a group reads it: one small file, every number of it checked.

Every process reads it when it makes a group, so this module imports next to nothing. A table that
cannot be used is a warning, and the group is made as if there were none.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from unisono import variables
from unisono.cache import cache_folder
from unisono.comm import engine

FORMAT = "unisono-tuning/1"
ENGINES_OWN = "engine"
"""In place of an algorithm's name: what the engine does where nobody chooses."""

_MOST_BYTES = 1 << 20
_MOST_ALGORITHMS = 64
_TURN = (4096, 1 << 18, 64)
_FROM = (64, 1 << 40, 1)
LIMITS = {name: _TURN if name.endswith("_turn") else _FROM for name in engine.TUNED}
"""For each number the least, the most, and what it is a multiple of: csrc/tuning.c's bounds."""

_log = logging.getLogger("unisono")
_warned: set[str] = set()

Steps = tuple[tuple[int, str], ...]
"""From how many bytes on which algorithm, the fewest bytes first."""


class Tuning:
    """What the table says for a group of so many ranks.

    `sizes` are the numbers of `engine.TUNED`; `crowded` says whether they are for more ranks than
    cores. `in_order` and `reordered` have the algorithms of each collective: those that combine in
    the order of ranks, and any. Two are the same if their `text` is.
    """

    def __init__(
        self,
        crowded: bool,
        sizes: tuple[int, ...],
        in_order: dict[str, Steps],
        reordered: dict[str, Steps],
    ) -> None:
        self.crowded, self.sizes = crowded, sizes
        self.in_order, self.reordered = in_order, reordered
        everything = [crowded, sizes, in_order, reordered]
        self.text = json.dumps(everything, sort_keys=True, separators=(",", ":"))

    def find_algorithm(self, collective: str, size_bytes: int, reorder: bool) -> str | None:
        """The fastest algorithm for a tensor of so many bytes; None: the engine's own way."""
        found = ENGINES_OWN
        for from_bytes, name in (self.reordered if reorder else self.in_order).get(collective, ()):
            if size_bytes >= from_bytes:
                found = name
        return None if found == ENGINES_OWN else found


def table_path() -> str | None:
    """Where this machine's table is, or would be; None: UNISONO_TUNING is off."""
    chosen = variables.TUNING.read()
    if chosen is not None:
        return chosen or None
    name = f"{engine.processor_model()} {os.cpu_count()} cores".lower()
    words = "".join(letter if letter.isalnum() else " " for letter in name).split()
    return os.path.join(cache_folder(), "tuning", "-".join(words) + ".json")


def read_tuning(ranks: int, rank: int = 0) -> Tuning | None:
    """What the table of this machine says for a group of `ranks` ranks; None where it says nothing,
    or cannot be used. Then rank 0 warns, once."""
    path = table_path()
    if path is None:
        return None
    try:
        document = read_document(path)
        group = find_group(document, ranks)
        return None if group is None else tuning_of(group)
    except (FileNotFoundError, NotADirectoryError) as error:
        if variables.TUNING.read() is None:
            return None
        problem = str(error.strerror)
    except OSError as error:
        problem = str(error.strerror)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        problem = str(error) if type(error) is ValueError else f"it is damaged ({error!r})"
    if rank == 0:
        _warn_once(
            f"the tuning table {path} is left out of account: {problem}. `unisono tune` writes a "
            "new one, UNISONO_TUNING=off asks for none"
        )
    return None


def warn_of_difference(problem: str) -> None:
    """The ranks of a group do not have the same table: what every one of them does about it."""
    _warn_once(
        f"{problem}: none is used. Give all ranks the same cache folder and UNISONO_TUNING",
        "difference",
    )


def _warn_once(text: str, kind: str = "") -> None:
    if (kind or text) not in _warned:
        _warned.add(kind or text)
        _log.warning("%s", text)


def read_document(path: str) -> dict[str, Any]:
    """The table as it was written. Raises OSError, or ValueError where it is not a table of this
    format and processor."""
    with open(path, "rb") as file:
        content = file.read(_MOST_BYTES + 1)
    try:
        document: dict[str, Any] = json.loads(content)
        format, processor = document["format"], document["processor"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError("it is damaged: not a table of `unisono tune`") from None
    if format != FORMAT:
        raise ValueError(f"its format is {str(format)[:40]!r}, and this unisono reads {FORMAT!r}")
    if processor != engine.processor_model():
        raise ValueError(
            f"it was measured on another processor ({str(processor)[:60]!r}, and this is "
            f"{engine.processor_model()!r})"
        )
    return document


def find_group(document: dict[str, Any], ranks: int) -> dict[str, Any] | None:
    """What a table has for groups of so many ranks."""
    found: list[dict[str, Any]] = [group for group in document["groups"] if group["ranks"] == ranks]
    return found[0] if found else None


def tuning_of(group: dict[str, Any]) -> Tuning:
    """What a table's entry for a number of ranks says. Raises ValueError, LookupError, TypeError or
    AttributeError where it is not one."""
    crowded = group["crowded"]
    if type(crowded) is not bool:
        raise ValueError(f"crowded is {crowded!r}, and must be true or false")
    sizes = tuple(check_size(name, group["sizes"][name]) for name in engine.TUNED)
    in_order, reordered = group["algorithms"], group["algorithms_reordered"]
    return Tuning(crowded, sizes, _all_steps(in_order), _all_steps(reordered))


def check_size(name: str, value: Any) -> int:
    """`value` as the number of `name`. Raises ValueError where it is out of bounds."""
    least, most, multiple = LIMITS[name]
    if type(value) is not int or not least <= value <= most or value % multiple:
        parts = f" and a multiple of {multiple}" if multiple > 1 else ""
        raise ValueError(f"{name} is {value!r}, and must be from {least} to {most}{parts}")
    return value


def _all_steps(by_collective: Any) -> dict[str, Steps]:
    return {str(name): _steps(entries) for name, entries in by_collective.items()}


def _steps(entries: Any) -> Steps:
    steps = []
    for entry in entries:
        from_bytes, name = entry["from_bytes"], entry["algorithm"]
        is_name = isinstance(name, str) and name.isidentifier() and len(name) <= 64
        if type(from_bytes) is not int or from_bytes < 0 or not is_name:
            raise ValueError(f"{entry!r} is not a step from one algorithm to another")
        steps.append((from_bytes, name))
    if len(steps) > _MOST_ALGORITHMS or steps != sorted(steps):
        raise ValueError("the steps of an algorithm are too many, or not in order")
    return tuple(steps)
