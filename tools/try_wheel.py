"""Install a package as a new user would, and run the programs of the README and the course.

    python tools/try_wheel.py dist/unisono-*.whl
    python tools/try_wheel.py --torch 2.11 dist/unisono-*.tar.gz

The package is installed into a new environment. torch and what else it depends on are those of
.venv, where that has them; otherwise, or with `--torch`, they are installed, too: wheels alone, in
the versions of constraints.txt but for torch's. Programs run there with nothing on PATH but the
environment itself, outside the source tree, so that a wheel needs no compiler.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from docs.blocks import Block, blocks_of, first_line  # noqa: E402

SUM = """
import torch

total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), "on", dist.get_backend())
dist.destroy_process_group()
"""
"""What a program may do after the line that the README shows."""
TIMEOUT_S = 120


def programs() -> tuple[Block, Block]:
    """The README's two programs: one that launches ranks, one for torch.distributed."""
    found = [block for block in blocks_of("README.md") if block.language == "python"]
    if [list(block.marks) for block in found] != [["prints"], ["run"]]:
        raise SystemExit("README.md should have a program that prints, and one for `unisono run`")
    ten_lines, torch_line = found
    return ten_lines, torch_line


def install(package: Path, folder: Path, torch: str) -> dict[str, str]:
    """A new environment with the package in it; returns what its programs may know of the world.
    `torch` is a version, "newest", or "" for that of .venv."""
    venv.create(folder, with_pip=True)
    version = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    known, options = ROOT / ".venv" / version, [""]
    constraints = (ROOT / "constraints.txt").read_text()
    if torch:
        constraints = re.sub(r"^torch==.*$", "", constraints, flags=re.M)
        options = ["torch" if torch == "newest" else f"torch=={torch}.*"]
    elif (known / "torch").is_dir():
        (folder / version / "dependencies.pth").write_text(f"{known}\n")
        options = ["--no-deps"]
    (folder / "constraints.txt").write_text(constraints)
    subprocess.run(
        [
            folder / "bin/python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:",
            "--no-binary", "unisono", "--constraint", folder / "constraints.txt",
            *filter(None, options), package,
        ],
        check=True,
    )  # fmt: skip
    home = [folder / "bin/python", "-c", "import unisono; print(unisono.__file__)"]
    found = subprocess.run(home, check=True, capture_output=True, text=True, cwd=folder).stdout
    assert Path(found.strip()).is_relative_to(folder), f"{found.strip()} is not the package's"
    environment = {"PATH": str(folder / "bin"), "HOME": str(folder)}
    for compiler in ("cc", "gcc", "clang", "c++", "ld", "cmake", "make"):
        assert shutil.which(compiler, path=environment["PATH"]) is None, compiler
    return environment


def run(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """What the command prints; the end of this program if it fails."""
    executable = shutil.which(command[0], path=environment["PATH"]) or command[0]
    done = subprocess.run(
        [executable, *command[1:]],
        env=environment,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
    )
    print(f"$ {' '.join(command)}\n{done.stdout}", end="", flush=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return done.stdout


def main() -> None:
    """Exit with 1 if the package does not do what the README says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--torch", default="", help="a version, or newest")
    options = parser.parse_args()
    package = options.package.resolve()
    with tempfile.TemporaryDirectory(prefix="unisono-wheel-") as name:
        folder = Path(name)
        environment = install(package, folder / "environment", options.torch)
        ten_lines, torch_line = programs()
        (folder / "ten_lines.py").write_text(ten_lines.text)
        (folder / "torch_line.py").write_text(torch_line.text + SUM)
        printed = run(["python", "ten_lines.py"], environment, folder)
        wanted = ten_lines.marks["prints"]
        if printed.splitlines()[-1] != wanted:
            raise SystemExit(f"the ten lines should have printed {wanted}")
        command = [*first_line(torch_line.marks["run"]).split(), "torch_line.py"]
        printed = run(command, environment, folder)
        if printed.count("sum 2 on unisono") != 2:
            raise SystemExit("torch.distributed should have added two ones on unisono, twice")
        run(["unisono", "doctor", "--backends", "unisono"], environment, folder)
        run(["unisono", "learn"], environment, folder)
        (folder / "course/chapter_02.py").write_text(
            run(["unisono", "learn", "solution", "2"], environment, folder)
        )
        run(["unisono", "learn", "check", "2"], environment, folder)
    with_torch = f" with torch {options.torch}" if options.torch else ""
    print(f"{package.name}: installed{with_torch}; README's programs and the course run")


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
