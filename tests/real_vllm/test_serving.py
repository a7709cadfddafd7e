"""vLLM's workers over unisono generate the tokens that they generate over vLLM's own kernel
(`make real-vllm`)."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from namespaces import Link, network, start_on

from serving import SETTINGS, make_model

pytestmark = pytest.mark.vllm

PROGRAM = Path(__file__).parents[2] / "benchmarks/serving.py"
SMALL = ["--layers", "2", "--hidden", "128", "--tokens", "12"]


def test_the_same_tokens(tmp_path: Path) -> None:
    environment = os.environ | {"VLLM_CACHE_ROOT": str(tmp_path)}
    command = [sys.executable, str(PROGRAM), *SMALL]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the same tokens" in ended.stdout


KILLED = textwrap.dedent("""
    import os, signal, sys, threading, time
    import vllm

    def find_pid(worker):
        return os.getpid()

    if __name__ == "__main__":
        engine = vllm.LLM(
            sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
            max_model_len=256, tensor_parallel_size=2, distributed_executor_backend="mp",
        )
        victim = engine.collective_rpc(find_pid)[1]
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=200, ignore_eos=True, detokenize=False
        )
        prompt = [{"prompt_token_ids": [7, 9, 11, 3]}]
        engine.generate(prompt, sampling, use_tqdm=False)
        killed = []

        def kill():
            killed.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

        threading.Timer(0.2, kill).start()
        try:
            while True:
                engine.generate(prompt, sampling, use_tqdm=False)
        except Exception as error:
            after = time.monotonic() - killed[0]
            print(f"RAISED {type(error).__name__} after {after:.3f} s", flush=True)
        os._exit(0)
""")


@pytest.mark.parametrize("ours", [True, False])
def test_a_worker_is_killed(ours: bool, tmp_path: Path) -> None:
    """The engine raises with unisono as without (`-s` shows when), and with it the log says why."""
    make_model(tmp_path / "model", 2, 128, 0)
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    environment = (
        os.environ
        | SETTINGS
        | {
            "UNISONO_VLLM": str(int(ours)),
            "VLLM_CACHE_ROOT": str(tmp_path),
        }
    )
    ended = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "model")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = ended.stdout + ended.stderr
    raised = re.search(r"RAISED \w+ after .* s", said)
    assert raised, said
    print(raised[0])
    assert ("was killed by SIGKILL; this rank was in all_reduce of group vllm tp:0" in said) == ours


LAUNCHED = textwrap.dedent("""
    import os, sys
    import vllm

    if __name__ == "__main__":
        engine = vllm.LLM(
            sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, dtype="float32",
            max_model_len=128, tensor_parallel_size=2, seed=0,
            distributed_executor_backend="external_launcher",
        )
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=24, ignore_eos=True, detokenize=False
        )
        prompt = [{"prompt_token_ids": [7, 9, 11, 3]}]
        outputs = engine.generate(prompt, sampling, use_tqdm=False)
        print("TOKENS", list(outputs[0].outputs[0].token_ids), flush=True)
        os._exit(0)
""")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
def test_two_hosts(tmp_path: Path) -> None:
    """They generate what one host does with vLLM's kernel, which serves no two hosts."""
    model, program = tmp_path / "model", tmp_path / "launched.py"
    make_model(model, 2, 128, 0)
    program.write_text(LAUNCHED)
    said: dict[tuple[int, int], list[list[str]]] = {}
    with network(2, Link(int(1e9))) as made:
        for placement in (0, 0), (0, 1):
            folder = tmp_path / f"on{placement[1]}"
            folder.mkdir()
            ranks = [
                start_on(
                    made.hosts[host],
                    [sys.executable, str(program), str(model)],
                    folder / f"rank{rank}",
                    os.environ
                    | SETTINGS
                    | {
                        "UNISONO_VLLM": str(placement[1]),
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank if host == 0 else 0),
                        "WORLD_SIZE": "2",
                        "MASTER_ADDR": made.hosts[0].ipv4,
                        "MASTER_PORT": "29400",
                        "GLOO_SOCKET_IFNAME": "eth0",
                        "VLLM_HOST_IP": made.hosts[host].ipv4,
                        "VLLM_CACHE_ROOT": str(tmp_path),
                    },
                )
                for rank, host in enumerate(placement)
            ]
            assert [rank.wait(240, ranks) for rank in ranks] == [0, 0], ranks[0].text()
            said[placement] = [re.findall("TOKENS .*", rank.text()) for rank in ranks]
    assert said[0, 1] == said[0, 0]
    assert all(map(len, said[0, 1])), said


ENGINE = textwrap.dedent("""
    import sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from vllm.config import ParallelConfig
    from vllm.distributed import utils
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    for number in range(2):  # a second one, as after a restart
        group = utils.stateless_init_torch_distributed_process_group(
            "127.0.0.1", port + number, rank, 2, "gloo", f"engines {number}",
            timeout=timedelta(seconds=60),
        )
        answers = [
            ParallelConfig.has_unfinished_dp(group, rank == 0),
            ParallelConfig.has_unfinished_dp(group, False),
            ParallelConfig.sync_dp_state(group, rank == 1, False),
            ParallelConfig.sync_kv_cache_memory_size(group, 10 + rank),
        ]
        dist.barrier(group)
        utils.stateless_destroy_torch_distributed_process_group(group)
    print(type(group).__name__, group.name(), answers)
""")


@pytest.mark.parametrize("replaced", [True, False])
def test_the_group_of_data_parallel_engines(replaced: bool) -> None:
    """vLLM's own functions give the same answers over gloo and over us."""
    with socket.socket() as one, socket.socket() as next_one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        next_one.bind(("127.0.0.1", port + 1))
    environment = os.environ | ({"UNISONO_REPLACE": "gloo"} if replaced else {})
    engines = [
        subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(rank), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    ended = [engine.communicate(timeout=300) for engine in engines]
    kind = "UnisonoProcessGroup" if replaced else "ProcessGroup"
    for out, err in ended:
        assert out.splitlines()[-1:] == [f"{kind} gloo [True, False, (True, False), 10]"], err
