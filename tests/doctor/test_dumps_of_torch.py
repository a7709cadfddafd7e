"""`unisono doctor` on the dumps of torch's Flight Recorder."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from unisono.cli import main
from user_programs import WriteProgram

PROGRAM = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

dist.init_process_group("gloo")
pair = dist.new_group([1, 2], group_desc="pair", timeout=timedelta(seconds=3))
dist.barrier()
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3))
rank, how = dist.get_rank(), sys.argv[1]
try:
    for step in range(3):
        dist.all_reduce(torch.ones(4, 5))
    if how == "late" and rank == 2:
        time.sleep(6)
    if how == "differs" and rank == 1:
        dist.broadcast(torch.ones(5), 0)
    if how == "late" and rank:
        dist.all_reduce(torch.ones(2), group=pair)
    dist.all_gather([torch.ones(5) for _ in range(3)], torch.ones(5))
    dist.barrier()
except RuntimeError:
    pass
with open(f"trace_rank_{rank}", "wb") as file:
    file.write(_dump_fr_trace())
os._exit(0)
"""
VERDICTS = {
    "late": "rank 1 (global 2) never finished all_reduce #1 of group pair (program.py:20): it made "
    "no call after all_reduce #4 of group world (program.py:14)",
    "differs": "rank 1 called broadcast of float, 5 elements at program.py:18 where the others "
    "called all_gather of float, 5 elements: call #5 of group world",
}


def doctor(*args: str | Path) -> Result:
    return CliRunner().invoke(main, ["doctor", *map(str, args)])


@pytest.mark.parametrize("how", VERDICTS)
def test_one_verdict_from_the_dumps_of_all_ranks(
    tmp_path: Path, program: WriteProgram, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    before = ("-m", "unisono", "run", "-n", "3")
    ran = program(PROGRAM).run(how, before=before, environment=environment)
    assert ran.returncode == 0, ran
    files = sorted(tmp_path.glob("trace_rank_*"))
    shown = doctor(*files)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert shown.stdout.startswith(VERDICTS[how]), shown.stdout
    kind = "hang; group pair of gloo" if how == "late" else "mismatch; group world of gloo"
    assert kind in shown.stdout


# -- nccl's, as torch 2.11 writes them: it refuses two ranks on one GPU ---------------------------


def entry(number: int, name: str, line: int, *, is_over: bool, is_p2p: bool = False) -> Any:
    return {
        "frames": [
            {"name": "wrapper", "filename": "/x/site-packages/torch/distributed/c.py", "line": 83},
            {"name": "step", "filename": f"{os.getcwd()}/train.py", "line": line},
        ],
        "record_id": number,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": number if is_p2p else 0,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 10**18 + number * 10**9,
        "input_sizes": [[4, 5]],
        "input_dtypes": ["BFloat16"],
        "state": "completed" if is_over else "started",
        "time_discovered_completed_ns": 10**18 + number * 10**9 + 1000 if is_over else None,
        "retired": is_over,
        "timeout_ms": 600_000,
        "is_p2p": is_p2p,
    }


def dump(folder: Path, *ranks: list[Any], size: int = 2) -> list[Path]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*range(size)])}}
    files = []
    for rank, entries in enumerate(ranks):
        files.append(folder / f"nccl_trace_rank_{rank}")
        told = {"version": "2.10", "pg_config": config, "entries": entries}
        files[-1].write_bytes(pickle.dumps(told, 2))
    return files


def test_a_message_that_nobody_sends(tmp_path: Path) -> None:
    begun = entry(1, "_all_gather_base", 7, is_over=True)
    waiting = entry(2, "recv 0<-1", 9, is_over=False, is_p2p=True)
    shown = doctor(*dump(tmp_path, [begun, waiting], [begun]))
    expected = "rank 1 never posted the match for rank 0's recv from rank 1 (tag 0) of group world"
    assert shown.stdout.startswith(expected + " (train.py:9): it made no call after all_gather #1 ")
    assert "last seen" not in shown.stdout  # a dump has no age


def test_coalesced_messages_end_together(tmp_path: Path) -> None:
    send = entry(1, "send 0->1", 5, is_over=False, is_p2p=True)
    whole = entry(1, "coalesced", 5, is_over=True, is_p2p=True)
    receive = entry(1, "recv 1<-0", 6, is_over=False, is_p2p=True)
    last = entry(2, "all_reduce_barrier", 8, is_over=False)
    shown = doctor(*dump(tmp_path, [send, whole, last], [receive, whole]))
    expected = (
        "rank 1 never finished barrier #2 of group world (train.py:8): it made no call after "
    )
    assert shown.stdout.startswith(
        expected + "recv from rank 0 (tag 0) of group world (train.py:6)"
    )


def test_a_rank_without_a_dump(tmp_path: Path) -> None:
    calls = [entry(1, "all_reduce", 7, is_over=True), entry(2, "all_reduce", 7, is_over=False)]
    shown = doctor(*dump(tmp_path, calls, calls, size=3))
    verdict = "rank 2 never finished all_reduce #2 of group world (train.py:7): it left no dump"
    assert shown.stdout.splitlines()[0] == verdict
    assert "lost; group world of nccl" in shown.stdout


def test_dumps_of_a_healthy_job(tmp_path: Path) -> None:
    calls = [entry(1, "all_reduce", 7, is_over=True)]
    shown = doctor(*dump(tmp_path, calls, calls))
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert "no call waits or differs" in shown.stderr


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    (file,) = dump(tmp_path, [Evil(tmp_path / "made")])
    shown = doctor(file)
    assert shown.exit_code == 1
    assert "is not a report of unisono" in shown.stderr
    assert not (tmp_path / "made").exists()


def test_the_name_of_a_dump_ends_with_its_rank(tmp_path: Path) -> None:
    (file,) = dump(tmp_path, [entry(1, "all_reduce", 7, is_over=True)])
    shown = doctor(file.rename(tmp_path / "dump"))
    assert shown.exit_code == 1
    assert "does not end with a rank" in shown.stderr


def test_a_date_is_not_a_rank(tmp_path: Path) -> None:
    """No job has so many ranks; all of them would be listed as absent."""
    (file,) = dump(tmp_path, [entry(1, "all_reduce", 7, is_over=False)])
    shown = doctor(file.rename(tmp_path / "dump_20261117"))
    assert shown.exit_code == 1
    assert "does not end with a rank" in shown.stderr


def test_a_dump_that_names_an_impossible_rank(tmp_path: Path) -> None:
    (file,) = dump(tmp_path, [entry(1, "all_reduce", 7, is_over=False)])
    told = pickle.loads(file.read_bytes())
    told["pg_config"]["0"]["ranks"] = "[0, 1000000000000]"
    told["entries"][0]["process_group"] = ("1", "default_pg")
    file.write_bytes(pickle.dumps(told, 2))
    shown = doctor(file)
    assert shown.exit_code == 1
    assert "is not a report of unisono" in shown.stderr


def test_two_dumps_of_one_rank(tmp_path: Path) -> None:
    calls = [entry(1, "all_reduce", 7, is_over=True), entry(2, "all_reduce", 7, is_over=False)]
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
    files = [dump(folder, calls)[0] for folder in folders]
    shown = doctor(*files)
    assert shown.exit_code == 1
    assert f"{files[0]} and {files[1]} are both dumps of rank 0" in shown.stderr
