"""Write src/unisono/__init__.pyi: the public names of unisono, for type checkers.

python tools/write_stub.py
"""

from __future__ import annotations

from pathlib import Path

import unisono

STUB = Path(__file__).parent.parent / "src/unisono/__init__.pyi"


def stub_text() -> str:
    """Every public name, imported from its module under its own name: that makes it public."""
    lines = ["# Written by tools/write_stub.py from the tables in __init__.py."]
    for name, home in sorted(unisono._HOME_OF.items(), key=lambda item: item[::-1]):
        lines.append(f"from {home} import {name} as {name}")
    return "\n".join([*lines, "", "__version__: str", "__all__: list[str]", ""])


if __name__ == "__main__":
    STUB.write_text(stub_text())
