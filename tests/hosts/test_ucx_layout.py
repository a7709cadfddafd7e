"""csrc/network/ucx.h compared with the headers of pip's UCX, and what loading it leaves behind."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARIES = ("libucp.so.0", "libuct.so.0", "libucs.so.0", "libucm.so.0")

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def wheel() -> Path:
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        pytest.skip("needs pip's UCX: pip install libucx-cu12")
    return Path(spec.origin).parent


def compile_native(folder: Path, name: str, *more: str | Path) -> Path:
    """A program of tests/native."""
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-sign-compare")
    sources = (ROOT / f"tests/native/{name}.c", f"-I{ROOT / 'csrc'}", *more)
    subprocess.run(["cc", "-std=c11", *warnings, "-o", folder / name, *sources], check=True)
    return folder / name


def test_declarations_are_those_of_ucx(tmp_path: Path, wheel: Path) -> None:
    libraries = wheel / "lib"
    real = (
        *("-DREAL", f"-isystem{wheel / 'include'}", f"-Wl,-rpath,{libraries}"),
        *(libraries / "libucp.so", libraries / "libucs.so"),
    )
    ours, theirs = (
        subprocess.check_output(compile_native(tmp_path, "ucx_layout", *more), text=True)
        for more in ((), real)
    )
    assert ours.splitlines() == theirs.splitlines()
    assert ours.count("\n") > 80


@pytest.fixture
def loads_ucx(tmp_path: Path) -> Path:
    return compile_native(tmp_path, "ucx_load", ROOT / "csrc/network/ucx.c", "-pthread")


def run_load(program: Path, *paths: Path, **variables: str) -> list[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run([program, *paths], capture_output=True, text=True, env=plain | variables)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_loading_ucx_changes_nothing_in_the_process(loads_ucx: Path, wheel: Path) -> None:
    path = wheel / "lib/libucp.so"
    version = (wheel / "UCX_WHEEL_VERSION.txt").read_text().strip()
    assert run_load(loads_ucx, path) == [f"UCX {version} in {path.resolve()}"]


def test_what_the_user_has_set_counts(loads_ucx: Path, wheel: Path) -> None:
    handled = run_load(loads_ucx, wheel / "lib/libucp.so", UCX_DEBUG_SIGNO="USR2")
    assert handled[0] == "handles signal 12"


def test_a_ucx_that_is_there_already_serves(tmp_path: Path, loads_ucx: Path, wheel: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in LIBRARIES:
        shutil.copy(wheel / "lib" / name, other)
    *_, last = run_load(loads_ucx, wheel / "lib/libucp.so", other / "libucs.so.0")
    assert last.endswith(f" in {other}/libucp.so.0")


def test_a_library_that_is_no_ucx_is_said(tmp_path: Path, loads_ucx: Path) -> None:
    (tmp_path / "libucp.so").write_text("no library")
    (problem,) = run_load(loads_ucx, tmp_path / "libucp.so")
    assert problem.startswith(f"problem: {tmp_path}/libucp.so: ")
