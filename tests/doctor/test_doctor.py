"""`unisono doctor`: the machine, the variables, the self-test on real ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ranks import RankPool
from unisono import requirements
from unisono.cli import main
from unisono.comm.base import Communicator
from unisono.comm.shared_memory.communicator import SharedMemoryCommunicator
from unisono.doctor import gpus, machine, ranks, software, variables
from unisono.doctor.findings import Finding, Level
from unisono.doctor.selftest.results import SelfTest
from user_programs import plain_environment

ROOT = Path(__file__).parents[2]


def by_topic(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}


# -- this machine ----------------------------------------------------------------------------------


def test_a_machine_that_runs_these_tests_has_nothing_red() -> None:
    found = [*software.findings(), *machine.findings(2)]
    assert {finding.topic for finding in found} >= {
        "python", "torch", "unisono", "engine", "gpu", "kernel", "memory", "/dev/shm",
        "open files", "locked memory", "cores", "load", "threads", "loopback",
    }  # fmt: skip
    assert not [finding for finding in found if finding.level is Level.FAIL]
    for finding in found:
        assert bool(finding.advice) == (finding.level is not Level.OK), finding
        assert not finding.advice or finding.advice.endswith((".", "?"))


def test_more_ranks_than_memory_is_red_and_more_than_cores_yellow() -> None:
    found = by_topic(machine.findings(1_000_000))
    assert found["memory"].level is Level.FAIL
    assert found["cores"].level is Level.WARN


def test_few_open_files_are_yellow() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
    try:
        found = by_topic(machine.findings(2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found["open files"].level is Level.WARN
    assert "ulimit -n 256" in found["open files"].advice


@pytest.mark.parametrize(
    ("threads", "level"), [("1", Level.OK), ("4096", Level.WARN), ("many", Level.WARN)]
)
def test_threads_against_cores(monkeypatch: pytest.MonkeyPatch, threads: str, level: Level) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert by_topic(machine.findings(2))["threads"].level is level


def test_a_busy_machine_is_yellow() -> None:
    cores = os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        for _ in cores:
            burner = subprocess.Popen(
                [sys.executable, "-c", "print(flush=True)\nwhile True: pass"],
                stdout=subprocess.PIPE,
            )
            stack.enter_context(burner)
            stack.callback(burner.kill)
            assert burner.stdout is not None
            burner.stdout.readline()
        load = by_topic(machine.findings(len(cores)))["load"]
    assert load.level is Level.WARN
    assert "noisy" in load.advice


def test_time_that_cores_have_worked() -> None:
    hertz = os.sysconf("SC_CLK_TCK")
    stat = (
        f"cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 {hertz} 0 0 7 7 0 0 0 0 0\ncpu1 0 0 0 5 5 0 0 {hertz} 0 0"
    )
    assert machine.busy_seconds(stat, [0]) == 1
    assert machine.busy_seconds(stat, [0, 1]) == 2
    assert machine.busy_seconds(stat, [2]) == 0


def test_versions_are_compared_as_numbers() -> None:
    assert requirements.is_too_old("2.9.1")
    assert not requirements.is_too_old("2.13.0+cpu")
    assert not requirements.is_untried("2.15.3+cu132")
    assert requirements.is_untried("2.16.0a0+git1234")
    assert requirements.is_untried("3.0.0")


def test_the_pinned_torch_was_tried() -> None:
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert not requirements.is_too_old(pinned[1])
    assert not requirements.is_untried(pinned[1])


def test_a_torch_that_nobody_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", "2.99.0")
    found = by_topic(software.findings())["torch"]
    assert found.level is Level.WARN
    assert "torch 2.99.0" in found.text
    assert f"up to {requirements.format_version(requirements.NEWEST_TRIED_TORCH)}" in found.text


# -- variables -------------------------------------------------------------------------------------


def test_every_variable_that_the_package_reads_is_known() -> None:
    texts = [path.read_text() for path in (ROOT / "src/unisono").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'"(UNISONO_[A-Z_]*[A-Z])"', text)}
    assert "UNISONO_RANK" in named
    assert named <= set(variables.KNOWN)


def test_torch_knows_the_variables_that_we_say_are_its_own() -> None:
    import torch

    folder = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    headers = "".join(path.read_text() for path in folder.glob("*.hpp"))
    ours = [
        variable
        for variable in variables.TORCH
        if variable.name.startswith(("TORCH_NCCL", "TORCH_FR"))
    ]
    elsewhere = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}  # read in a source file, not in a header
    if requirements.torch_version(torch.__version__) >= (2, 15):
        elsewhere.add("TORCH_NCCL_AVOID_RECORD_STREAMS")  # no more
    for variable in ours:
        assert variable.name in headers or variable.name in elsewhere
    for name in variables.RENAMED:
        assert f'"{name}"' in headers


def test_mistakes_in_variables_are_yellow() -> None:
    fine = {
        "TORCH_DISTRIBUTED_DEBUG": "detail",
        "NCCL_ALGO": "Tree",
        "NCCL_SOMETHING_NEW": "1",
        "UNISONO_SITES": "1",
        "UNISONO_EAGER_SEND": "",
        "UNISONO_CHECK": "off",
    }
    wrong = {
        "NCCL_BLOCKING_WAIT": "1",
        "NCCL_DEBUG": "LOUD",
        "NCCL_P2P_DISABLE": "1",
        "UNISONO_ALGO": "rnig",
        "UNISONO_BACKEND": "glooo",
        "UNISONO_EAGER_SENDS": "1",
        "UNISONO_WATCH_HANG_S": "abc",
        "UNISONO_WATHC": "1",
    }
    found = by_topic(variables.findings(fine | wrong))
    assert set(found) == set(wrong)
    assert found["NCCL_BLOCKING_WAIT"].advice == "Set TORCH_NCCL_BLOCKING_WAIT instead."
    assert found["NCCL_DEBUG"].advice == "Set it to one of VERSION, WARN, INFO, TRACE."
    assert found["UNISONO_BACKEND"].text.endswith("did you mean gloo?")
    assert found["UNISONO_EAGER_SENDS"].advice == "Did you mean UNISONO_EAGER_SEND?"
    assert found["UNISONO_WATCH_HANG_S"].text == "=abc means nothing"
    assert found["UNISONO_WATCH_HANG_S"].advice == "It must be a number of seconds above 0."
    assert found["UNISONO_WATHC"].advice == "Did you mean UNISONO_WATCH?"


def test_variables_of_nccl_are_for_machines_with_a_gpu() -> None:
    set_here = {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "LOUD", "GLOO_SOCKET_IFNAME": "lo"}
    assert [finding.topic for finding in variables.findings(set_here, gpus=True)] == [
        "NCCL_DEBUG", "NCCL_P2P_DISABLE"
    ]  # fmt: skip
    assert list(variables.findings(set_here, gpus=False)) == []
    names = {
        variable.name for variable, _ in variables.relevant({"NCCL_IB_HCA": "mlx5"}, gpus=False)
    }
    assert "NCCL_IB_HCA" in names  # it is set
    assert "NCCL_ALGO" not in names
    assert "GLOO_SOCKET_IFNAME" in names


def test_variables_with_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    few = {
        variable.name: value for variable, value in variables.relevant({"NCCL_IB_HCA": "mlx5_0"})
    }
    assert few["NCCL_IB_HCA"] == "mlx5_0"
    assert few["NCCL_DEBUG"] is None
    assert "NCCL_BUFFSIZE" not in few
    done = CliRunner().invoke(main, ["doctor", "--variables"])
    assert done.exit_code == 0
    for name in variables.KNOWN:
        assert name in done.output
    assert re.search(r"NCCL_IB_HCA\s+mlx5_0\s", done.output)


def test_the_document_has_the_table_that_the_command_prints() -> None:
    done = CliRunner().invoke(main, ["doctor", "--variables", "--markdown"])
    assert done.exit_code == 0
    assert done.output.count("\n") == len(variables.KNOWN) + 2
    assert done.output in (ROOT / "docs/doctor.md").read_text()


def test_markdown_alone_is_misuse() -> None:
    assert CliRunner().invoke(main, ["doctor", "--markdown"]).exit_code == 2


# -- the self-test on ranks ------------------------------------------------------------------------


def test_the_command_is_green_here_and_reads_well() -> None:
    command = [sys.executable, "-m", "unisono", "doctor", "--backends", "unisono"]
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert re.search(r"^ok +all_to_all +[0-9.]+ us", done.stdout, re.M)
    assert "FAIL" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_json_is_for_programs(fresh_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "launch", fresh_pool.launch)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    done = CliRunner().invoke(main, ["doctor", "--json", "--backends", "gloo,nonsense"])
    said = json.loads(done.stdout)
    assert done.exit_code == 1
    assert said["ok"] is False
    assert said["variables"]["NCCL_DEBUG"] == "WARN"
    assert {finding["topic"] for finding in said["findings"]} >= {"python", "kernel", "memory"}
    good, bad = said["backends"]
    assert (good["backend"], good["ok"], good["tested"]) == ("gloo", True, True), good
    assert all(check["ok"] and check["microseconds"] > 0 for check in good["checks"])
    assert not bad["ok"]
    assert bad["problem"].startswith("torch has no backend nonsense here, only ")


def test_without_backends_no_rank_is_started() -> None:
    said = CliRunner().invoke(main, ["doctor", "--backends", ""])
    assert said.exit_code == 0
    assert "self-test" not in said.output


def test_a_wrong_result_is_red_and_fails_the_command(
    fresh_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "launch", fresh_pool.launch)
    monkeypatch.setattr(ranks, "_run", run_with_a_fault)
    said = CliRunner().invoke(main, ["doctor", "--backends", "unisono"])
    assert said.exit_code == 1
    assert re.search(r"^FAIL +broadcast .*rank 0: element 999 is", said.output, re.M)
    assert re.search(r"^ok +all_to_all ", said.output, re.M)
    assert said.output.endswith("not well: self-test of unisono\n")


def run_with_a_fault(backend: str, folder: str) -> SelfTest | str:
    """Run by every rank: rank 0 spoils what it receives in a broadcast."""
    sound = SharedMemoryCommunicator.broadcast

    def spoiled(self: SharedMemoryCommunicator, tensor: Any, *args: Any, **keywords: Any) -> Any:
        result = sound(self, tensor, *args, **keywords)
        if self.rank == 0:
            tensor[-1] += 1
        return result

    SharedMemoryCommunicator.broadcast = spoiled  # type: ignore[method-assign]
    return REAL_RUN(backend, folder)


REAL_RUN = ranks._run


def test_more_gpus_than_there_are_is_one_sentence() -> None:
    tested = ranks.try_backend("nccl", 64)
    assert not tested.ok
    assert tested.problem.startswith(("torch has no backend nccl", "nccl wants a GPU for each"))


# -- GPUs ------------------------------------------------------------------------------------------


def find_sharing(comm: Communicator, folder: str, refuses: bool) -> Finding:
    import replaced_driver

    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"  # where nvidia-smi is
    replaced_driver.install()
    replaced_driver.refuses_export = refuses
    return gpus.find_sharing(replaced_driver.allocate(4096, folder))


def test_who_shares_a_gpu_and_what_to_do(fresh_pool: RankPool, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        "echo 'GPU-1, 17, 512 MiB, /usr/bin/python3'\n"
        "echo 'GPU-1, 18, 1024 MiB, /usr/bin/vllm'\n"
    )
    tool.chmod(0o755)
    (found,) = fresh_pool.run(find_sharing, 1, str(tmp_path), False)
    assert found.level is Level.OK
    assert "open each other's memory (CUDA IPC); they take turns, for there is no MPS" in found.text
    assert "now pid 17 python3 (512 MiB), pid 18 vllm (1024 MiB) on GPU GPU-1" in found.text
    assert "nvidia-cuda-mps-control -d" in found.text
    (found,) = fresh_pool.run(find_sharing, 1, str(tmp_path), True)
    assert found.level is Level.WARN
    assert "the driver exports no memory (cuIpcGetMemHandle" in found.text
    assert "expandable segments" in found.advice
