"""csrc/ucx.h against the headers of pip's UCX: sizes, offsets, constants, types of functions."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_layout(folder: Path, *options: str) -> list[str]:
    compile_it = [
        *("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-Wno-sign-compare"),
        *("-o", "layout", str(ROOT / "tests/native/ucx_layout.c"), f"-I{ROOT / 'csrc'}", *options),
    ]
    subprocess.run(compile_it, cwd=folder, check=True)
    return subprocess.check_output([folder / "layout"], text=True).splitlines()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_declarations_are_those_of_ucx(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        pytest.skip("needs UCX's headers: pip install libucx-cu12")
    home = Path(spec.origin).parent
    libraries = home / "lib"
    ours = run_layout(tmp_path)
    real = run_layout(
        tmp_path,
        "-DREAL",
        f"-isystem{home / 'include'}",
        *(f"{libraries}/lib{name}.so" for name in ("ucp", "ucs")),
        f"-Wl,-rpath,{libraries}",
    )
    assert ours == real
    assert len(ours) > 100
