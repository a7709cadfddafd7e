"""Check that each folder of csrc/ includes only headers of those below it, and that no circle of
files that include each other is long: a .c file and its header count as one.

    python tools/check_includes.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ENGINE = Path(__file__).resolve().parent.parent / "csrc"
KNOWN = {
    "base": ("base/",),
    "local": ("base/", "local/"),
    "network": ("base/system.h", "network/"),
    "hosts": ("base/", "local/", "network/", "hosts/"),
    "torch_ops": ("torch_ops/",),
    "python": ("python/", "torch_ops/"),
}
"""What each folder may include, besides unisono.h."""
LONGEST_CIRCLE = 8


def problems(engine: Path = ENGINE) -> list[str]:
    """One sentence for each."""
    found: list[str] = []
    reached: dict[str, set[str]] = {}
    for path in sorted(engine.glob("*/*.[ch]")):
        folder, name = path.parent.name, str(path.relative_to(engine))
        of_file = reached.setdefault(name[:-2], set())
        for header in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
            if folder == "python" and "/" not in header and header != "unisono.h":
                header = f"python/{header}"
            if not (engine / header).exists():
                found.append(f"{name}: there is no {header} in {engine.name}/")
            elif header != "unisono.h" and not header.startswith(KNOWN[folder]):
                found.append(f"{name} includes {header}: {folder}/ may include {KNOWN[folder]}")
            of_file.add(header[:-2])
    for by in reached:
        for names in reached.values():
            if by in names:
                names |= reached[by]
    for name, names in reached.items():
        circle = sorted(other for other in names if name in reached.get(other, ()))
        if len(circle) > LONGEST_CIRCLE and circle[0] == name:
            found.append(f"these {len(circle)} include each other: {' '.join(circle)}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or 0)
