"""Run a harness of this folder under GenMC, over the engine's own files.

The files are used as they are, except for a few sizes (SMALLER): a ring of 256 entries overflows
after 257 messages, which is too many for a model checker; one of four overflows after five.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENGINE = ROOT / "csrc"
LIMIT_S = 300
_COMPILER_OPTIONS = ["-I.", "-std=gnu11", "-w"]
_CROSS_HEADERS = "/usr/x86_64-linux-gnu/include"
if platform.machine() != "x86_64":  # GenMC cannot parse the copies that clang generates for Arm
    _COMPILER_OPTIONS += ["--target=x86_64-linux-gnu", "-isystem", _CROSS_HEADERS]
_FOUND = 42  # what GenMC returns for a counterexample

MISSING = """GenMC is not installed. As root, on Debian 12:
    apt-get install autoconf automake clang g++ llvm-dev libclang-dev libffi-dev libedit-dev
    apt-get install libc6-dev-amd64-cross    # except on x86-64: the harnesses are compiled for that
    git clone https://github.com/MPI-SWS/genmc /opt/genmc-src
    cd /opt/genmc-src && git checkout v0.10.3 && git apply .../unisono/tests/model/genmc.patch
    autoreconf --install && ./configure --prefix=/opt/genmc && make -j2 && make install"""

SMALLER = (
    ("base/layout.h", "#define PAGE_BYTES 4096", "#define PAGE_BYTES 512"),
    (
        "base/layout.h",
        "#define DESCRIPTOR_BYTES (4096 + LINE_BYTES) ",
        "#define DESCRIPTOR_BYTES 64 ",
    ),
    ("base/layout.h", "char text[120];", "char text[8];"),
    ("base/layout.h", "char group_name[104];", "char group_name[8];"),
    ("base/layout.h", "#define SLOT_BYTES (256 * 1024)", "#define SLOT_BYTES 8"),
    ("base/layout.h", "#define ENTRIES 256 ", "#define ENTRIES 4 "),
    ("base/layout.h", "#define RING_BYTES (256 * 1024)", "#define RING_BYTES 2"),
    ("local/messages.h", "PIECE_BYTES = RING_BYTES / 4", "PIECE_BYTES = RING_BYTES / 2"),
    ("base/layout.h", "#define FIFO_BYTES (256 * 1024)", "#define FIFO_BYTES 2"),
    ("local/schedules.c", "PIECE_BYTES = 32 * 1024,", "PIECE_BYTES = 1,"),
    ("local/schedules.c", "UN_BUSIEST * 16", "1"),
    ("unisono.h", "#define UN_TEXT_BYTES 248 ", "#define UN_TEXT_BYTES 4 "),
    ("base/layout.h", "#define RECORDS 1024 ", "#define RECORDS 2 "),
    ("base/layout.h", "#define SITES 128 ", "#define SITES 2 "),
    ("base/layout.h", "#define DECISIONS 64 ", "#define DECISIONS 2 "),
    ("base/layout.h", "char payload[280];", "char payload[1];"),
    ("base/wait.h", "spins < 16;", "spins < 1;"),
    # GenMC supports neither accesses of mixed sizes nor filling a struct with a double: structs are
    # copied field by field.
    (
        "local/receive.c",
        "memcpy(kept, seen, sizeof *kept);",
        "kept->match.tag = seen->match.tag, kept->match.source = seen->match.source;\n"
        "    kept->handle = seen->handle, kept->bytes = seen->bytes, kept->dtype = seen->dtype;\n"
        "    kept->parcel = seen->parcel;",
    ),
    (
        "local/receive.c",
        "m->match = (un_match){.number = ++g->messages.matches, .tag = m->tag, .source = m->peer};",
        "m->match.number = ++g->messages.matches;\n"
        "        m->match.tag = m->tag, m->match.source = m->peer;",
    ),
    (
        "local/worker.c",
        "un_call alone = {.timeout_ns = work->call.timeout_ns};",
        "static un_call alone;\n    alone.timeout_ns = work->call.timeout_ns;",
    ),
    (
        "local/worker.c",
        "un_call waiting = *hooks;",
        "static un_call waiting;\n"
        "        waiting.block = hooks->block, waiting.pause = hooks->pause;\n"
        "        waiting.argument = hooks->argument;",
    ),
    (
        "hosts/hosts.c",
        "all.unclaimed = others;",
        "all.unclaimed.first = others.first, all.unclaimed.last = others.last;",
    ),
    (
        "local/send.c",
        "*h = (struct handle){.next_free = t->free_handle};",
        "h->message = NULL, h->next_free = t->free_handle;",
    ),
)


@dataclass(frozen=True)
class Change:
    """Replace `old` with `new` in `file`, a path below csrc; it must occur once."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Verdict:
    """What GenMC found: a counterexample, or "" if there was none in this many executions."""

    counterexample: str
    executions: int


def tool() -> str | None:
    """Where GenMC is."""
    return shutil.which("genmc", path=f"{os.environ['PATH']}:/opt/genmc/bin")


@contextmanager
def engine_with(*changes: Change) -> Iterator[Path]:
    """The engine's files with smaller sizes, and changed."""
    with tempfile.TemporaryDirectory(prefix="unisono-model-") as name:
        folder = Path(name)
        shutil.copytree(ENGINE, folder, ignore=shutil.ignore_patterns("python"), dirs_exist_ok=True)
        for path in HERE.glob("*.[ch]"):
            shutil.copy(path, folder)
        for change in (*(Change(*smaller) for smaller in SMALLER), *changes):
            path = folder / change.file
            before = path.read_text()
            if before.count(change.old) != 1:
                raise ValueError(
                    f"{change.file} has {change.old!r} {before.count(change.old)} times"
                )
            path.write_text(before.replace(change.old, change.new))
        yield folder


def check(harness: str, *changes: Change) -> Verdict:
    """Explore every execution of a harness."""
    options = re.findall(r"^// genmc: (.*)$", (HERE / harness).read_text(), re.M)
    with engine_with(*changes) as folder:
        done = subprocess.run(
            [str(tool()), "--disable-estimation", *options, "--", *_COMPILER_OPTIONS, harness],
            cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    text = done.stdout + done.stderr
    count = re.search(r"complete executions explored: (\d+)", text)
    if done.returncode not in (0, _FOUND) or not count:
        raise RuntimeError(f"{harness} could not be explored:\n{text[-2000:]}")
    reason = re.search(r"^Error: (.*?)!?$", text, re.M)
    detail = re.search(r"^(Assertion violation: .*)$", text, re.M)
    found = [match[1] for match in (reason, detail) if match]
    return Verdict(found[-1] if done.returncode else "", int(count[1]))
