"""Programs that name gloo, on unisono; and torchrun's options for `unisono run`."""

from __future__ import annotations

import logging
import os

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import unisono.watch
from outside_groups import outside_group
from ranks import RankPool
from unisono.cli import main
from unisono.torch_backend.autoload import autoload
from user_programs import WriteProgram

RUN = ("-m", "unisono", "run")
NOTICE = "this program asks for gloo and gets unisono (UNISONO_REPLACE=gloo)"

NAMES_GLOO = """
    import os
    import torch
    import torch.distributed as dist
    from torch.distributed import init_process_group, new_group
    from torch.distributed.device_mesh import init_device_mesh
    import unisono

    init_process_group(backend="gloo")
    groups = [dist.group.WORLD, new_group(backend="GLOO"), new_group([0, 1], None, "cpu:gloo")]
    groups.append(dist.new_subgroups(2, backend="gloo")[0])
    groups.append(init_device_mesh("cpu", (2,)).get_group())
    sums = []
    for group in groups:
        tensor = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
    os.write(1, f"{[dist.get_backend(group) for group in groups]} {sums}\\n".encode())
    dist.destroy_process_group()

    unisono.init("gloo").barrier()  # who says it to unisono means it
    os.write(1, f"{dist.get_backend()} {unisono.get_backend()}\\n".encode())
"""
EXPECTED = f"{['unisono'] * 5} {[3.0] * 5}"


def test_who_names_gloo_gets_unisono_and_is_told_once(fresh_pool: RankPool) -> None:
    first, second = fresh_pool.run(name_gloo, 2, connected=False)
    outside = [
        f"unisono: group {name}, outside torch's world, is made with unisono, not gloo: every "
        "process in it needs UNISONO_REPLACE=gloo"
        for name in ("weights", "other", "watched")
    ]
    assert first == (["unisono"] * 7, [3.0] * 7, [f"unisono: {NOTICE}", *outside])
    assert second == (["unisono"] * 7, [3.0] * 7, [])


def name_gloo(rank: int, size: int, path: str) -> tuple[list[str], list[float], list[str]]:
    """The groups that a rank gets, their sums, and the messages that it gets."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unisono").addHandler(handler)
    os.environ["UNISONO_REPLACE"] = "gloo"
    autoload()  # as at `import torch`, which these ranks have already done
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
    groups = [
        dist.group.WORLD,
        dist.new_group(backend="GLOO"),
        dist.new_group([0, 1], None, "cpu:gloo"),
        dist.new_subgroups(2, backend="gloo")[0],
        outside_group("gloo", f"{path}.weights", "weights", 1 - rank, size),
        outside_group("undefined", f"{path}.other", "other", rank, size),
    ]
    unisono.watch.start()  # which is in between, and is not the caller
    groups.append(outside_group("gloo", f"{path}.watched", "watched", rank, size))
    unisono.watch.stop()
    sums = []
    for group in groups:
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())
    backends = [dist.get_backend(group) for group in groups]
    dist.destroy_process_group()
    return backends, sums, said


def test_the_option_is_the_variable(program: WriteProgram) -> None:
    script = program("import os; print(os.environ['UNISONO_REPLACE'])")
    ended = script.run(before=(*RUN, "-np", "1", "--replace", "gloo", "--no-prefix"))
    assert (ended.returncode, ended.stdout) == (0, "gloo\n"), ended.stderr


@pytest.mark.slow
def test_a_program_that_names_gloo_gets_unisono_and_is_told_once(program: WriteProgram) -> None:
    ended = program(NAMES_GLOO).run(
        before=(*RUN, "--nproc_per_node=2", "--replace", "gloo", "--no-prefix", "--threads", "1")
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [EXPECTED] * 2 + ["gloo gloo"] * 2
    assert ended.stderr.count(NOTICE) == 1


@pytest.mark.slow
def test_under_torchrun_a_variable_does_it_and_no_name_is_replaced_as_well(
    program: WriteProgram,
) -> None:
    script = program("""
        import os
        import torch.distributed as dist
        dist.init_process_group()
        os.write(1, f"made {dist.get_backend()}\\n".encode())
        dist.destroy_process_group()
    """)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = script.run(before=torchrun, environment={"UNISONO_REPLACE": "gloo"})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("made unisono") == 2
    assert ended.stderr.count(NOTICE) == 1


def test_a_group_for_several_devices_is_left_alone_and_that_is_said() -> None:
    from unisono.torch_backend.replacement import _is_replaced

    assert _is_replaced("Gloo", "gloo")
    assert _is_replaced("cpu:gloo", "gloo")
    for asked in (None, "nccl", "unisono", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo", "mygloo"):
        assert not _is_replaced(asked, "gloo")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--nnodes=1", "this machine only"),
        ("--rdzv_endpoint=localhost:29400", "needs no address"),
        ("--max-restarts=3", "use torchrun"),
        ("--nonsense", "unknown option"),
    ],
)
def test_an_option_of_torchrun_that_does_not_fit_is_one_sentence(option: str, words: str) -> None:
    refused = CliRunner().invoke(main, ["run", option, "--nproc-per-node", "2", "train.py"])
    assert refused.exit_code == 2
    assert refused.output.startswith(f"Error: {option}: ")
    assert words in refused.output
    assert refused.output.count("\n") == 1


@pytest.mark.parametrize("count", [[], ["-n", "0"], ["-np", "two"], ["--nproc-per-node", "gpu"]])
def test_a_count_that_means_nothing_is_one_sentence(
    program: WriteProgram, count: list[str]
) -> None:
    refused = CliRunner().invoke(main, ["run", *count, str(program("").path)])
    assert refused.exit_code == 2
    assert refused.output.startswith("Error: ")
    assert refused.output.count("\n") == 1
