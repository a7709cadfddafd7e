"""What a process imports for its first group, and later for failures; and how a process exits that
still has a group."""

from __future__ import annotations

from pathlib import Path

from user_programs import DEADLINE_S, write_program

START = """
import sys

import torch
import torch.distributed as dist

from unisono import failures

failures.DELAY_S = 600.0
before = set(sys.modules)
rank, meeting = int(sys.argv[1]), "file://" + sys.argv[2]
dist.init_process_group("unisono", init_method=meeting, rank=rank, world_size=2)
dist.all_reduce(torch.ones(1))
loaded = {name: sys.modules[name] for name in set(sys.modules) - before}
"""

LOADED = (
    START
    + """
for_need = {
    "unisono.comm.arguments",
    "unisono.comm.engine.group_types",
    "unisono.comm.meeting.network",
    "unisono.comm.on_rows.mismatches",
    "unisono.comm.over_torch",
    "unisono.comm.overlaps",
    "unisono.comm.meeting.meeting_points",
    "unisono.comm.shared_memory.allocation",
    "unisono.comm.shared_memory.dtypes",
    "unisono.comm.shared_memory.error_texts",
    "unisono.comm.shared_memory.failures",
    "unisono.plan",
    "unisono.launcher",
    "unisono.torch_backend.futures",
    "unisono.watch",
    "hmac",
    "secrets",
}
at_import_torch = {name for name in before if name.startswith("unisono.")}
at_import_torch -= {"unisono.torch_backend", "unisono.torch_backend.autoload"}
print(sorted(at_import_torch))
print(sorted(for_need & set(loaded)), rank == 0 or "unisono.comm.meeting.leading" not in loaded)
print([
    f"{name}.{attribute}"
    for name, module in loaded.items()
    for attribute, value in vars(module).items()
    if name.startswith("unisono") and hasattr(value, "__dataclass_fields__")
])
group = dist.new_group()  # a global: it is let go when the interpreter has taken its modules apart
dist.barrier(group)
dist.destroy_process_group()
"""
)

FAILING = (
    START
    + """
import atexit
import os

from unisono import GroupClosed, PeerLost


def fail(kind):
    try:
        dist.all_reduce(torch.ones(1))
    except kind as error:
        print(kind.__name__, getattr(error, "peer", None), flush=True)


if rank == 1:
    os._exit(0)
print("unisono.comm.shared_memory.exceptions" in sys.modules, flush=True)
print("unisono.comm.shared_memory.failures" in sys.modules, flush=True)
child = os.fork()
if child == 0:
    fail(GroupClosed)
    os._exit(0)
os.waitpid(child, 0)
atexit.register(fail, PeerLost)
"""
)


def test_a_group_imports_what_it_needs_and_is_let_go_in_silence(tmp_path: Path) -> None:
    """Creating a dataclass takes a millisecond, and an unneeded module a quarter of one."""
    program = write_program(tmp_path, LOADED)
    ranks = [program.start(str(rank), str(tmp_path / "meeting")) for rank in range(2)]
    for process in ranks:
        small = ("errors", "failures", "torch_habits", "torch_support", "variables")
        expected = f"{[f'unisono.{name}' for name in small]}\n[] True\n[]\n"
        assert process.communicate(timeout=DEADLINE_S) == (expected, "")
        assert process.returncode == 0


def test_what_words_a_failure_can_be_imported_by_a_forked_child_and_at_exit(tmp_path: Path) -> None:
    program = write_program(tmp_path, FAILING)
    ranks = [program.start(str(rank), str(tmp_path / "meeting")) for rank in range(2)]
    (told, errors), _ = (process.communicate(timeout=DEADLINE_S) for process in ranks)
    assert told == "True\nFalse\nGroupClosed None\nPeerLost 1\n", errors
    assert ranks[0].returncode == 0


PRELOADING = """
import os
import sys
import time
from pathlib import Path

from unisono import failures

failures.DELAY_S = 0.0
for name in ("first", "second"):
    text = f"import time, pathlib; pathlib.Path('{name}').touch(); time.sleep(0.3)"
    Path(f"{name}.py").write_text(text)
    failures.load_soon(name)
    while not Path(name).exists():
        time.sleep(0.001)
    if name == "first":
        child = os.fork()
        import first

        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
print("first" in sys.modules)
"""


def test_a_fork_and_the_end_wait_for_an_import_that_a_thread_has_begun(tmp_path: Path) -> None:
    """Otherwise the child would wait forever for the thread to finish the import."""
    ended = write_program(tmp_path, PRELOADING).run()
    assert (ended.stdout, ended.stderr, ended.returncode) == ("True\n", "", 0)
