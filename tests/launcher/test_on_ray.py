"""`unisono.launch(..., on="ray")` on Ray's own cluster of several nodes, all on this machine.

In its own suite (`make test-ray`), because a cluster takes long to start.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import pytest

import unisono
from unisono.errors import RanksFailed, RanksTimedOut
from user_programs import WriteProgram, eventually, lives

pytestmark = pytest.mark.ray

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'unisono[ray]'")
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of two CPUs, to which this process is connected. Their ranks are on two hosts,
    because each node has its own host name."""
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100 << 20}
    head = node | {"include_dashboard": False, "env_vars": {"UNISONO_HOSTID": "node0"}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**node, env_vars={"UNISONO_HOSTID": "node1"})
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.WARNING)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(autouse=True)
def _nothing_is_left(cluster: Any) -> Iterator[None]:
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    from ray.util import placement_group_table

    all_cpus_are_free()
    assert all(group["state"] == "REMOVED" for group in placement_group_table().values())
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 8  # Ray's own connections


def all_cpus_are_free() -> None:
    """Nodes report free resources to Ray a moment later."""
    eventually(lambda: ray.available_resources().get("CPU") == 4)


# -- results -------------------------------------------------------------------------------------


def test_results_come_back_in_rank_order_from_all_nodes() -> None:
    results = unisono.launch(summed, 4, (10,), {"factor": 2.0}, on="ray")
    assert [(rank, total) for rank, total, _, _ in results] == [(rank, 92.0) for rank in range(4)]
    nodes = [node for _, _, node, _ in results]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert [local for _, _, _, local in results] == [("0", "2"), ("1", "2")] * 2


def summed(more: int, factor: float) -> tuple[int, float, str, tuple[str, str]]:
    comm = unisono.init()
    assert len(set(comm.transport.host_names)) == 2  # type: ignore[attr-defined]
    array = numpy.full(5, (comm.rank + more) * factor)
    comm.all_reduce(array)
    local = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    return comm.rank, float(array[0]), os.environ["GROUP_RANK"], local


def test_spread_uses_every_node_and_pack_as_few_as_fit() -> None:
    assert unisono.launch(node_number, 2, on="ray", spread=True) == ["0", "1"]
    all_cpus_are_free()
    assert unisono.launch(node_number, 2, on="ray") == ["0", "0"]
    all_cpus_are_free()
    assert unisono.launch(node_number, 2, on="ray", resources={"CPU": 2}) == ["0", "1"]


def node_number() -> str:
    return os.environ["GROUP_RANK"]


def test_torch_starts_by_the_same_variables_and_large_values_come_back() -> None:
    first, second = unisono.launch(reduced_by_torch, 2, on="ray", spread=True)
    assert first.shape == (1 << 20,)
    assert (first == 3).all()
    assert (second == 3).all()


def reduced_by_torch() -> Any:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.full((1 << 20,), dist.get_rank() + 1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.numpy()


# -- failures ------------------------------------------------------------------------------------


def test_every_traceback_once_with_its_host() -> None:
    with pytest.raises(RanksFailed) as caught:
        unisono.launch(one_raises, 4, on="ray")
    error = caught.value
    assert error.first == 2
    text, hosts = str(error), [ending.host for ending in error.endings]
    assert hosts in (["node0"] * 2 + ["node1"] * 2, ["node1"] * 2 + ["node0"] * 2)
    own = hosts[2]
    assert text.startswith(f"rank 2 on {own} failed first, of 4 ranks: LookupError: no such luck")
    assert "raise LookupError" in text
    assert text.count("comm.barrier()") >= 1
    for rank in (0, 1, 3):
        assert "PeerLost: rank 2" in error.endings[rank].traceback
    assert "unisono/launcher/" not in text


def one_raises() -> None:
    comm = unisono.init()
    if comm.rank == 2:
        raise LookupError("no such luck")
    comm.barrier()


def test_a_signal_has_a_name() -> None:
    with pytest.raises(RanksFailed, match="it was killed by SIGKILL") as caught:
        unisono.launch(one_is_killed, 2, on="ray")
    assert caught.value.first == 1
    assert caught.value.endings[1].signal == "SIGKILL"
    assert "PeerLost: rank 1" in caught.value.endings[0].traceback


def one_is_killed() -> None:
    comm = unisono.init()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def test_a_lost_actor_is_a_lost_rank_and_takes_its_process_along(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="was lost with its Ray actor") as caught:
        unisono.launch(one_loses_its_actor, 2, (tmp_path,), on="ray")
    assert caught.value.first == 1
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 3
    eventually(lambda: not any(map(lives, pids)))


def one_loses_its_actor(folder: Path) -> None:
    comm = unisono.init()
    (folder / str(os.getpid())).touch()
    if comm.rank == 1:
        child = subprocess.Popen(["sleep", "600"])
        (folder / str(child.pid)).touch()
        os.kill(os.getppid(), signal.SIGKILL)
    comm.barrier()


def test_a_timeout_shows_where_each_rank_was(tmp_path: Path) -> None:
    with pytest.raises(RanksTimedOut, match="not done within 20 s: rank 1 of 2 ranks") as caught:
        unisono.launch(one_sleeps, 2, (tmp_path,), on="ray", timeout=20)
    first, second = caught.value.endings
    assert first.how == "returned"
    assert "in one_sleeps" in second.stack
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 3
    eventually(lambda: not any(map(lives, pids)))


def one_sleeps(folder: Path) -> None:
    (folder / str(os.getpid())).touch()
    if os.environ["RANK"] == "1":
        child = subprocess.Popen(["sleep", "600"])
        (folder / str(child.pid)).touch()
        time.sleep(600)


def test_what_does_not_exist_is_waited_for_with_a_limit(caplog: Any) -> None:
    sentence = "8 ranks wait for Ray to give 1 CPU to each: its nodes have 4 CPU, 4 of them free"
    with pytest.raises(RanksTimedOut, match=f"not started within 6 s: {sentence}"):
        unisono.launch(node_number, 8, on="ray", timeout=6)
    assert f"{sentence} (launch gives up in 1 s)" in caplog.text


# -- across hosts --------------------------------------------------------------------------------


def test_a_killed_rank_is_told_on_the_other_host() -> None:
    with pytest.raises(RanksFailed, match="it was killed by SIGKILL") as caught:
        unisono.launch(one_is_killed, 2, on="ray", spread=True)
    assert caught.value.first == 1
    host = caught.value.endings[1].host
    assert "PeerLost: rank 1 (pid " in caught.value.endings[0].traceback
    assert f"on {host})" in caught.value.endings[0].traceback


def test_a_timeout_shows_where_ranks_of_all_hosts_wait() -> None:
    with pytest.raises(RanksTimedOut, match="not done within 40 s: ranks 0 and 1 of 2") as caught:
        unisono.launch(one_does_not_come, 2, on="ray", spread=True, timeout=40)
    first, second = caught.value.endings
    assert "in one_does_not_come" in first.stack
    assert "time.sleep" in second.stack or "in one_does_not_come" in second.stack


def one_does_not_come(timeout_s: float | None = None) -> None:
    comm = unisono.init()
    if comm.rank == 1:
        time.sleep(600)
    comm.barrier(timeout_s=timeout_s)


def test_a_deadline_names_who_is_missing_on_which_host() -> None:
    with pytest.raises(RanksFailed, match="CollectiveTimeout") as caught:
        unisono.launch(one_does_not_come, 2, (2.0,), on="ray", spread=True)
    host, text = caught.value.endings[1].host, caught.value.endings[0].traceback
    assert "because rank 1 never arrived; arrived: 0" in text, text
    assert re.search(rf"rank 1 \(pid \d+ on {host}\) is at .*test_on_ray.py:\d+", text), text


def test_the_watch_says_who_is_missing(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("UNISONO_WATCH", "1")
    monkeypatch.setenv("UNISONO_WATCH_HANG_S", "2")
    with pytest.raises(RanksFailed, match="CollectiveTimeout"):
        unisono.launch(one_does_not_come, 2, (20.0,), on="ray", spread=True)
    err = capfd.readouterr().err
    said = [line for line in err.splitlines() if "unisono.watch:" in line]
    assert any(re.search(r"rank 1 on node\d never reached barrier #1 ", line) for line in said), err


# -- output and ends -----------------------------------------------------------------------------


def test_lines_have_rank_and_host(capfd: Any) -> None:
    unisono.launch(speaks, 2, on="ray")
    out, err = capfd.readouterr()
    on = [line.partition("]")[0].rpartition(" ")[2] for line in sorted(out.splitlines())]
    assert on in (["node0"] * 2, ["node1"] * 2)
    assert sorted(out.splitlines()) == [f"[rank {r} on {on[0]}] out of {r}" for r in range(2)]
    assert f"[rank 1 on {on[0]}] by a child" in err.splitlines()


def speaks() -> None:
    print("out of", os.environ["RANK"])
    subprocess.run("echo by a child >&2", shell=True, check=True)


def test_on_line_gets_every_line() -> None:
    lines: list[tuple[int, str, str]] = []
    unisono.launch(speaks, 1, on="ray", on_line=lambda *line: lines.append(line))
    assert sorted(lines) == [(0, "stderr", "by a child"), (0, "stdout", "out of 0")]


def tell_secret() -> str:
    comm = unisono.init()
    assert comm.size == 2
    return os.environ["UNISONO_JOB_SECRET"]


def test_each_launch_has_a_secret_of_its_own(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UNISONO_REQUIRE_SECRET", "1")
    first, second = (
        unisono.launch(tell_secret, 2, on="ray", spread=True, timeout=120) for _ in range(2)
    )
    assert len({*first, *second}) == 2
    assert first[0] == first[1] != second[0]
    file = tmp_path / "secret"
    file.write_text("s" * 32)
    file.chmod(0o600)
    monkeypatch.setenv("UNISONO_JOB_SECRET_FILE", str(file))
    told = unisono.launch(tell_secret, 2, on="ray", spread=True, timeout=120)
    assert told == ["s" * 32] * 2


INTERRUPTED = """
    import os, sys, time, unisono

    def work():
        unisono.init()
        try:
            print("pid", os.getpid(), flush=True)
            time.sleep(600)
        except KeyboardInterrupt:
            print("tidied up", flush=True)
            raise

    try:
        unisono.launch(work, 2, on="ray", spread=True)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_launching_program(
    cluster: Any, program: WriteProgram, number: signal.Signals
) -> None:
    script = program(INTERRUPTED).start(environment={"RAY_ADDRESS": cluster.address})
    assert script.stdout is not None
    pids = []
    while len(pids) < 2:
        line = script.stdout.readline()
        assert line, script.communicate()
        if "] pid " in line:
            pids.append(int(line.split()[-1]))
    script.send_signal(number)
    out, err = script.communicate(timeout=60)
    eventually(lambda: not any(map(lives, pids)))
    if number == signal.SIGINT:
        assert out.count("tidied up") == 2, err
        assert out.endswith("interrupted\n"), err
