"""`unisono doctor`: the machine, the variables, the self-test on real ranks."""

from __future__ import annotations

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
from unisono.cli import main
from unisono.comm.communicator import Communicator
from unisono.doctor import diagnosis, known_variables, machine, software
from unisono.doctor.machine import Finding
from unisono.doctor.self_test import SelfTest
from unisono.torch_support import NEWEST_TRIED_TORCH, OLDEST_TORCH, is_newer
from user_programs import plain_environment

ROOT = Path(__file__).parents[2]


def by_topic(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.topic: finding for finding in findings}


# -- this machine ----------------------------------------------------------------------------------


def test_a_machine_that_runs_these_tests_has_nothing_red() -> None:
    found = [*software.findings(), *machine.findings(2)]
    assert {finding.topic for finding in found} >= {
        "python", "torch", "engine", "ucx", "gpu", "kernel", "memory", "/dev/shm", "open files",
        "cores", "load", "threads", "loopback",
    }  # fmt: skip
    assert not [finding for finding in found if finding.level == "fail"]
    for finding in found:
        assert bool(finding.advice) == (finding.level != "ok"), finding
        assert not finding.advice or finding.advice.endswith((".", "?"))


def test_more_ranks_than_memory_is_red_and_more_than_cores_yellow() -> None:
    found = by_topic(machine.findings(1_000_000))
    assert found["memory"].level == "fail"
    assert found["cores"].level == "warn"


def test_few_open_files_are_yellow() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, before[1]))
    try:
        found = by_topic(machine.findings(2))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert found["open files"].level == "warn"
    assert "ulimit -n 256" in found["open files"].advice


def test_a_nearly_full_table_of_neighbours(tmp_path: Path) -> None:
    known, most = tmp_path / "arp", tmp_path / "gc_thresh3"
    known.write_text("IP address  HW type\n" + "10.77.0.2  0x1\n" * 513)
    most.write_text("1024\n")
    (found,) = machine.neighbours(known, most)
    assert found.text == "513 hosts of this network are known, and at most 1024 can be"
    assert "sysctl -w net.ipv4.neigh.default.gc_thresh3=16384" in found.advice
    most.write_text("16384\n")
    assert [*machine.neighbours(known, most)] == []
    assert [*machine.neighbours(tmp_path / "none", tmp_path / "none")] == []


@pytest.mark.parametrize(("threads", "level"), [("1", "ok"), ("4096", "warn"), ("many", "warn")])
def test_threads_against_cores(monkeypatch: pytest.MonkeyPatch, threads: str, level: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert by_topic(machine.findings(2))["threads"].level == level


@pytest.mark.parametrize(("busy", "level"), [(0.1, "ok"), (64.0, "warn")])
def test_a_busy_machine_is_yellow(monkeypatch: pytest.MonkeyPatch, busy: float, level: str) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (busy, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert by_topic(machine.findings(2))["load"].level == level


def test_versions_are_compared_as_numbers() -> None:
    assert is_newer("2.11", than="2.9.1")
    assert not is_newer("2.11", than="2.13.0+cpu")
    assert not is_newer("2.15.3+cu132", than="2.15")
    assert is_newer("2.16.0a0+git1234", than="2.15")
    assert is_newer("3.0.0", than="2.15")


def test_the_pinned_torch_was_tried() -> None:
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert not is_newer(OLDEST_TORCH, than=pinned[1])
    assert not is_newer(pinned[1], than=NEWEST_TRIED_TORCH)


def test_a_torch_that_nobody_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", "2.99.0")
    found = by_topic(software.findings())["torch"]
    assert found.level == "warn"
    assert "torch 2.99.0" in found.text
    assert f"up to {NEWEST_TRIED_TORCH}" in found.text


# -- variables -------------------------------------------------------------------------------------


def test_every_variable_that_the_package_reads_is_known() -> None:
    texts = [path.read_text() for path in (ROOT / "src/unisono").rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'"(UNISONO_[A-Z_]*[A-Z])"', text)}
    assert "UNISONO_RANK" in named
    assert named <= set(known_variables.KNOWN)


def test_a_secret_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for secret in ("s" * 32, "swordfish"):  # the second is too short, which a finding says
        monkeypatch.setenv("UNISONO_JOB_SECRET", secret)
        assert known_variables.set_here(os.environ)["UNISONO_JOB_SECRET"] == "(secret)"
        shown = CliRunner().invoke(main, ["doctor", "--variables"]).output
        assert "(secret)" in shown
        assert secret not in shown
    (found,) = known_variables.findings({"UNISONO_JOB_SECRET": "swordfish"})
    assert found.text == "=(secret) is not valid"


def test_torch_knows_the_variables_that_we_say_are_its_own() -> None:
    import torch

    folder = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    headers = "".join(path.read_text() for path in folder.glob("*.hpp"))
    elsewhere = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}  # read from a source file, not from a header
    for name in known_variables.TORCH:
        if name.startswith(("TORCH_NCCL", "TORCH_FR")):
            assert name in headers or name in elsewhere
    for name in known_variables.RENAMED:
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
    found = by_topic(known_variables.findings(fine | wrong))
    assert set(found) == set(wrong)
    assert found["NCCL_BLOCKING_WAIT"].advice == "Set TORCH_NCCL_BLOCKING_WAIT instead."
    assert found["NCCL_DEBUG"].advice == "Set it to one of VERSION, WARN, INFO, TRACE."
    assert found["UNISONO_BACKEND"].text.endswith("did you mean gloo?")
    assert found["UNISONO_EAGER_SENDS"].advice == "Did you mean UNISONO_EAGER_SEND?"
    assert found["UNISONO_WATCH_HANG_S"].text == "=abc is not valid"
    assert found["UNISONO_WATCH_HANG_S"].advice == "It must be a number of seconds above 0."
    assert found["UNISONO_WATHC"].advice == "Did you mean UNISONO_WATCH?"


def test_variables_of_nccl_are_judged_where_there_is_a_gpu() -> None:
    set_here = {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "LOUD", "GLOO_SOCKET_IFNAME": "lo"}
    assert [finding.topic for finding in known_variables.findings(set_here, gpus=True)] == [
        "NCCL_DEBUG", "NCCL_P2P_DISABLE"
    ]  # fmt: skip
    assert list(known_variables.findings(set_here, gpus=False)) == []


def test_variables_that_are_set_or_help_to_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"NCCL_IB_HCA": "mlx5_0", "NCCL_NEW_ONE": "1", "HOME": "/", "RANK": ""}
    assert known_variables.set_here(environment) == {"NCCL_IB_HCA": "mlx5_0", "NCCL_NEW_ONE": "1"}
    shown = dict(known_variables.to_show(environment))
    assert {"NCCL_IB_HCA", "NCCL_NEW_ONE", "NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG"} <= shown.keys()
    assert shown.keys().isdisjoint({"NCCL_PROTO", "HOME"})
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")
    done = CliRunner().invoke(main, ["doctor", "--variables"])
    assert done.exit_code == 0
    for name in known_variables.KNOWN:
        assert name in done.output
    assert re.search(r"NCCL_IB_HCA\s+mlx5_0\s", done.output)


def test_the_document_has_every_variable() -> None:
    rows = [f"| `{name}` | {meaning} |\n" for name, meaning in known_variables.KNOWN.items()]
    assert "".join(rows) in (ROOT / "docs/doctor.md").read_text()


# -- the self-test on ranks ------------------------------------------------------------------------


def test_the_command_is_green_here_and_reads_well() -> None:
    command = [sys.executable, "-m", "unisono", "doctor", "--backends", "unisono"]
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert re.search(r"^  ok +all_to_all +[0-9.]+ us", done.stdout, re.M)
    assert "FAIL" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_json_is_for_programs(fresh_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "launch", fresh_pool.launch)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    done = CliRunner().invoke(main, ["doctor", "--json", "--backends", "gloo,nonsense"])
    said = json.loads(done.stdout)
    assert done.exit_code == 1
    assert said["ok"] is False
    assert said["variables"]["NCCL_DEBUG"] == "WARN"
    assert {finding["topic"] for finding in said["findings"]} >= {"python", "kernel", "memory"}
    good, bad = said["backends"]
    assert (good["backend"], good["ok"]) == ("gloo", True), good
    assert all(check["ok"] and check["microseconds"] > 0 for check in good["checks"])
    assert not bad["ok"]
    assert bad["checks"][0]["message"].startswith("torch has no backend nonsense here, only ")


def test_without_backends_no_rank_is_started() -> None:
    said = CliRunner().invoke(main, ["doctor", "--backends", ""])
    assert said.exit_code == 0
    assert "self-test" not in said.output


def test_a_wrong_result_is_red_and_fails_the_command(
    fresh_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "launch", fresh_pool.launch)
    monkeypatch.setattr(diagnosis, "_run", run_with_a_fault)
    said = CliRunner().invoke(main, ["doctor", "--backends", "unisono"])
    assert said.exit_code == 1
    assert re.search(r"^  WRONG broadcast .*rank 0: element 999 is", said.output, re.M)
    assert re.search(r"^  ok +all_to_all ", said.output, re.M)
    assert said.output.endswith("failed: self-test of unisono\n")


def run_with_a_fault(backend: str, folder: str) -> SelfTest:
    """Run by every rank: rank 0 corrupts what it receives in a broadcast."""
    sound = Communicator.broadcast

    def spoiled(self: Communicator, tensor: Any, *args: Any, **keywords: Any) -> Any:
        result = sound(self, tensor, *args, **keywords)
        if self.rank == 0:
            tensor[-1] += 1
        return result

    Communicator.broadcast = spoiled  # type: ignore[method-assign]
    return REAL_RUN(backend, folder)


REAL_RUN = diagnosis._run


def test_more_gpus_than_there_are_is_one_sentence() -> None:
    (check,) = diagnosis.try_backend("nccl", 64).checks
    assert not check.ok
    assert check.message.startswith(("torch has no backend nccl", "nccl needs a GPU for each"))


# -- GPUs ------------------------------------------------------------------------------------------


def find_sharing(comm: Communicator, folder: str, refuses: bool) -> Finding:
    import replaced_driver

    replaced_driver.install()
    replaced_driver.refuses_export = refuses
    return software.find_sharing(replaced_driver.allocate(4096, folder))


def test_whether_ranks_can_share_a_gpu(fresh_pool: RankPool, tmp_path: Path) -> None:
    (found,) = fresh_pool.run(find_sharing, 1, str(tmp_path), False)
    assert found.level == "ok"
    assert "open each other's memory (CUDA IPC), and take turns" in found.text
    assert "nvidia-cuda-mps-control -d" in found.text
    (found,) = fresh_pool.run(find_sharing, 1, str(tmp_path), True)
    assert found.level == "warn"
    assert "the driver exports no memory (cuIpcGetMemHandle" in found.text
    assert "MIG" in found.advice
