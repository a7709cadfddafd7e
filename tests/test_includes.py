"""tools/check_includes.py: folders of the engine that know what they should not."""

from __future__ import annotations

import runpy
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def test_what_is_found(tmp_path: Path) -> None:
    def write(name: str, *headers: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f'#include "{header}"\n' for header in headers))

    problems = runpy.run_path(str(TOOLS / "check_includes.py"))["problems"]
    for number in range(8):
        write(f"base/b{number}.h", f"base/b{(number + 1) % 8}.h")
    write("unisono.h")
    write("hosts/far.h", "local/near.h", "base/b0.h", "unisono.h")
    write("local/near.h", "base/b1.h")
    assert problems(tmp_path) == []
    write("base/b0.c", "hosts/far.h", "none.h")
    upward, missing, circle = problems(tmp_path)
    assert upward.startswith("base/b0.c includes hosts/far.h")
    assert missing.startswith("base/b0.c: there is no none.h")
    assert circle.startswith("these 10 include each other: base/b0 base/b1 ")
