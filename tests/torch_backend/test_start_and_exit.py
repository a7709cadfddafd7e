"""What a process imports for its first group, and how one ends that still has a group at hand."""

from __future__ import annotations

from pathlib import Path

from user_programs import DEADLINE_S, write_program

PROGRAM = """
import sys

import torch.distributed as dist

rank, meeting = int(sys.argv[1]), "file://" + sys.argv[2]
dist.init_process_group("unisono", init_method=meeting, rank=rank, world_size=2)
for_need = ("solo", "failures", "error_texts", "mismatches", "watch")
print([name for name in sys.modules if name.startswith("unisono.") and name.endswith(for_need)])
group = dist.new_group()  # a global: it is let go when the interpreter has taken its modules apart
dist.barrier(group)
dist.destroy_process_group()
"""


def test_a_group_imports_no_words_for_failures_and_is_let_go_in_silence(tmp_path: Path) -> None:
    program = write_program(tmp_path, PROGRAM)
    ranks = [program.start(str(rank), str(tmp_path / "meeting")) for rank in range(2)]
    for process in ranks:
        assert process.communicate(timeout=DEADLINE_S) == ("[]\n", "")
        assert process.returncode == 0
