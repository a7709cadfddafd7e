"""Break the code on purpose, one line at a time, and see whether the tests notice.

    python tools/mutants                  all of them (make mutants)
    python tools/mutants --list           what they are, and whether all have their place
    python tools/mutants --only wake      those whose name or file contains the word
    python tools/mutants --resume         go on where the last run of the same sources stopped

Each mutant is a change of a few words and the tests that should fail because of it (engine.py,
library.py). It is made in a copy of the tree, build/mutants/tree, never here. A mutant whose old
text is not there exactly once is an error: the line has moved, and the list must follow.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine import ENGINE
from library import LIBRARY
from mutant import Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
HOME = ROOT / "build" / "mutants"
TREE = HOME / "tree"
RESULTS = HOME / "results.json"
MUTANTS = (*ENGINE, *LIBRARY)
FEWEST_KILLED = 36
GRACE_S = 60.0
"""A test with a mutant may take so much longer than ten times what it takes without."""


class Wrong(Exception):
    """The run cannot go on, or the list is wrong."""


# -- the copy ------------------------------------------------------------------------------------


def copy_tree() -> str:
    """Make the copy equal to the working tree; what is equal already keeps its age, so that little
    is compiled. Returns a digest of the code."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    names = sorted(name for name in listed.split("\0") if name and (ROOT / name).is_file())
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        source, target = ROOT / name, TREE / name
        content = source.read_bytes()
        if name.startswith(("src/", "csrc/")) or name.endswith((".txt", ".toml", "conftest.py")):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            shutil.copymode(source, target)
    for path in TREE.rglob("*.[chp]*"):  # files that have gone
        name = str(path.relative_to(TREE))
        if path.suffix in (".c", ".h", ".py") and name not in names and "build" not in name:
            path.unlink()
    return digest.hexdigest()


def make_environment() -> Path:
    """An interpreter that finds the copy's package, and everything else in .venv: a .pth file adds
    folders, and what .venv itself knows of an installed unisono is not read."""
    packages = next((ROOT / ".venv" / "lib").glob("python3.*/site-packages"))
    home = HOME / "venv"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, symlinks=True)
    own = next((home / "lib").glob("python3.*/site-packages"))
    (own / "mutants.pth").write_text(f"{TREE / 'src'}\n{packages}\n")
    return python


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The copy with a mutant in it."""
    path = TREE / mutant.file
    before = path.read_text()
    path.write_text(before.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        path.write_text(before)


def check_list() -> None:
    """Every mutant must be known by one name, and have its place."""
    wrong = []
    for mutant in MUTANTS:
        path = ROOT / mutant.file
        times = path.read_text().count(mutant.old) if path.exists() else 0
        if times != 1:
            wrong.append(f"{mutant.name}: its text stands {times} times in {mutant.file}, not once")
    if len({mutant.name for mutant in MUTANTS}) < len(MUTANTS):
        wrong.append("two mutants have the same name")
    if wrong:
        raise Wrong("does not apply:\n  " + "\n  ".join(wrong))


# -- running -------------------------------------------------------------------------------------


def run(command: list[str | Path], limit_s: float | None = None) -> tuple[int | None, str]:
    """How a command ended in the copy, and what it said; None: it did not end in time. Whatever
    happens to us, it and what it has started end with us."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=TREE, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, output


def build(tests: tuple[str, ...], python: Path) -> None:
    """Compile what these tests need of the copy."""
    cmake = shutil.which("cmake", path=f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if cmake is None:
        raise Wrong("cmake is not installed")
    for kind in {kind_of(test) for test in tests}:
        folder = HOME / kind
        options = ["-DUNISONO_MODULE=OFF"]
        if kind == "pytest":
            options = ["-DUNISONO_IN_TREE=ON", f"-DPython_EXECUTABLE={python}"]
        elif kind == "race":
            options.append("-DUNISONO_SANITIZE=thread")
        target = "_native" if kind == "pytest" else "threads"
        for command in (
            [cmake, "-S", TREE, "-B", folder, "-DUNISONO_LTO=OFF", *options],
            [cmake, "--build", folder, "--target", target, "--parallel"],
        ):
            code, output = run(command)
            if code:
                raise Wrong(f"it cannot be compiled:\n{output[-3000:]}")


def kind_of(test: str) -> str:
    """What a test needs to be compiled: "pytest", "threads" or "race"."""
    kind = test.partition(" ")[0]
    return kind if kind in ("threads", "race") else "pytest"


def run_tests(tests: tuple[str, ...], python: Path, limit_s: float | None = None) -> str:
    """What the tests say: "passed", "failed" or "hung"."""
    native = [test for test in tests if kind_of(test) != "pytest"]
    for test in native:
        kind, _, name = test.partition(" ")
        fixed = ["setarch", "-R"] if kind == "race" else []  # as in make sanitize
        code, _ = run([*fixed, HOME / kind / "threads", name], limit_s)
        if code != 0:
            return "hung" if code is None else "failed"
    others = [test for test in tests if test not in native]
    if others:
        options = ["-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider"]
        options.append(f"--basetemp={HOME / 'tmp'}")
        code, output = run([python, "-m", "pytest", *options, *others], limit_s)
        if code is None:
            return "hung"
        if code > 1 or (code == 0 and " passed" not in output.splitlines()[-1]):
            raise Wrong(f"tests could not be run: {' '.join(others)}\n{output[-2000:]}")
        return "failed" if code else "passed"
    return "passed"


class Results:
    """What is known of these sources so far; kept in a file."""

    def __init__(self, code: str, resume: bool) -> None:
        self._code = code
        self._known: dict[str, Any] = {}
        if resume and RESULTS.exists():
            self._known = json.loads(RESULTS.read_text())

    def _key(self, tests: tuple[str, ...], what: object) -> str:
        """What a result depends on: the code, the mutant, the files of the tests."""
        digest = hashlib.blake2b(f"{self._code} {tests} {what}".encode(), digest_size=16)
        for test in tests:
            is_native = kind_of(test) != "pytest"
            files = sorted(TREE.glob("tests/native/*" if is_native else test.partition("::")[0]))
            for file in files:
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def _keep(self, key: str, result: object) -> None:
        self._known[key] = result
        RESULTS.write_text(json.dumps(self._known))

    def end_of(self, mutant: Mutant) -> str | None:
        """How a mutant ended, if it has been tried."""
        return self._known.get(self._key(mutant.tests, mutant))

    def keep_end(self, mutant: Mutant, end: str) -> None:
        """Remember it."""
        self._keep(self._key(mutant.tests, mutant), end)

    def knows(self, tests: tuple[str, ...]) -> bool:
        """Whether these tests have passed without a mutant."""
        return self._key(tests, "seconds") in self._known

    def seconds(self, tests: tuple[str, ...], python: Path) -> float:
        """How long tests take without a mutant, with which they must pass."""
        if not self.knows(tests):
            begin_s = time.monotonic()
            end = run_tests(tests, python)
            if end != "passed":
                raise Wrong(f"without any mutant {' '.join(tests)} {end}")
            self._keep(self._key(tests, "seconds"), time.monotonic() - begin_s)
        return float(self._known[self._key(tests, "seconds")])


def try_mutant(mutant: Mutant, results: Results, python: Path) -> str:
    """ "killed", "hung" (which is as good) or "survived"."""
    is_compiled = mutant.file.startswith("csrc/")
    if not is_compiled or not results.knows(mutant.tests):
        build(mutant.tests, python)
    limit_s = GRACE_S + 10 * results.seconds(mutant.tests, python)
    with applied(mutant):
        if is_compiled:
            build(mutant.tests, python)
        end = run_tests(mutant.tests, python, limit_s)
    return {"passed": "survived", "failed": "killed", "hung": "hung"}[end]


def run_all(chosen: list[Mutant], resume: bool) -> int:
    """Try these mutants; returns the exit code."""
    HOME.mkdir(parents=True, exist_ok=True)
    results = Results(copy_tree(), resume)
    python = make_environment()
    begin_s = time.monotonic()
    for number, mutant in enumerate(chosen, 1):
        if results.end_of(mutant) is None:
            print(f"{number:3}/{len(chosen)} {mutant.name:24}", end=" ", flush=True)
            results.keep_end(mutant, try_mutant(mutant, results, python))
            print(f"{results.end_of(mutant):9} {time.monotonic() - begin_s:6.0f} s", flush=True)
    killed = [mutant for mutant in chosen if results.end_of(mutant) in ("killed", "hung")]
    alive = [mutant for mutant in chosen if mutant not in killed]
    for mutant in alive:
        reason = f"equivalent: {mutant.equivalent}" if mutant.equivalent else mutant.why
        print(f"\nSURVIVED {mutant.name} in {mutant.file}: {reason}")
    for mutant in killed:
        if mutant.equivalent:
            print(f"\n{mutant.name} is called equivalent, and was killed: say so in the list")
    print(f"\n{len(killed)} of {len(chosen)} killed")
    is_enough = len(killed) >= FEWEST_KILLED or len(chosen) < len(MUTANTS)
    return 0 if is_enough and all(mutant.equivalent for mutant in alive) else 1


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="show the mutants, and run nothing")
    parser.add_argument("--only", action="append", default=[], metavar="WORD")
    parser.add_argument("--resume", action="store_true", help="keep what the last run found")
    options = parser.parse_args()
    words = options.only or [""]
    chosen = [m for m in MUTANTS if any(word in m.name or word in m.file for word in words)]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:24} {mutant.file}\n    {mutant.why}")
            print(f"    {', '.join(mutant.tests)}")
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # though a shell had it ignored
    try:
        check_list()
        return 0 if options.list else run_all(chosen, options.resume)
    except Wrong as wrong:
        print(f"\n{wrong}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; --resume goes on", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
