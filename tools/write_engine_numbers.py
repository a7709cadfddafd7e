"""Write src/unisono/comm/engine/numbers.py: the engine's numbers, as csrc/unisono.h has them.

python tools/write_engine_numbers.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NUMBERS = ROOT / "src/unisono/comm/engine/numbers.py"
HEADERS = ("csrc/unisono.h", "csrc/python/binding.h")
HEAD = '''"""The engine's numbers. Written by tools/write_engine_numbers.py from csrc/unisono.h."""

from __future__ import annotations

from enum import IntEnum
'''
CLASSES = {
    "un_status": (
        "class Status:",
        "How a call ended. A plain class: an enumeration would slow down the start of a process.",
    ),
    "un_operation": ("class Operation(IntEnum):", "What a call does."),
    "un_form": ("class Form:", "What else a reduction is, as bits above the four of its number."),
    "un_note": ("class Note:", "Texts that a rank leaves for its peers' errors."),
}


def members(text: str, enumeration: str) -> dict[str, int]:
    """The members of a C enumeration and their values, without its count."""
    found = re.search(rf"enum {enumeration} {{(.*?)}}", text, re.DOTALL)
    assert found is not None, f"there is no {enumeration}"
    values: dict[str, int] = {}
    number = -1
    for name, value in re.findall(
        r"(\w+)(?: = (\d+))?,", re.sub(r"/\*.*?\*/", "", found[1], flags=re.DOTALL)
    ):
        number = int(value) if value else number + 1
        values[name.removeprefix("UN_")] = number
    return {name: value for name, value in values.items() if name not in ("NOTES", "REDUCTIONS")}


def numbers_text() -> str:
    """The module."""
    text = "\n".join((ROOT / header).read_text() for header in HEADERS)
    lines = [HEAD]
    for enumeration, (head, told) in CLASSES.items():
        own = members(text, enumeration) | (
            members(text, "extra_status") if enumeration == "un_status" else {}
        )
        lines += [
            "",
            head,
            f'    """{told}"""',
            "",
            *(f"    {name} = {value}" for name, value in own.items()),
            "",
        ]
    numbers = {name.lower(): value for name, value in members(text, "un_reduction").items()}
    lines += [
        "",
        "REDUCTION_NUMBERS = {",
        *(f'    "{name}": {value},' for name, value in numbers.items()),
        "}",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    NUMBERS.write_text(numbers_text())
