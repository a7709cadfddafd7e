"""Programs that name gloo, on unisono; and torchrun's options for `unisono run`."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d
from click.testing import CliRunner
from torch.distributed.device_mesh import init_device_mesh

import unisono.watch
from outside_groups import outside_group
from ranks import RankPool
from torch_names import before_2_15, since_2_15
from unisono.cli import main
from unisono.torch_backend.autoload import autoload
from user_programs import WriteProgram

c10d: Any = torch.distributed.distributed_c10d
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
    os.write(1, f"{[type(group).__name__ for group in groups]} {sums}\\n".encode())
    dist.destroy_process_group()

    unisono.init("gloo").barrier()  # who says it to unisono means it
    os.write(1, f"{dist.get_backend()} {unisono.get_backend()}\\n".encode())
"""
EXPECTED = f"{['UnisonoProcessGroup'] * 5} {[3.0] * 5}"


def test_who_names_gloo_gets_unisono_and_is_told_once(fresh_pool: RankPool) -> None:
    first, second = fresh_pool.run(name_gloo, 2, connected=False)
    outside = [
        f"unisono: group {name}, outside torch's world, is made with unisono, not gloo: every "
        "process in it needs UNISONO_REPLACE=gloo"
        for name in ("weights", "other", "watched")
    ]
    names = [(name, "unisono") for name in ("gloo", "gloo", "cpu:gloo", *["gloo"] * 4)]
    assert first == (names, [3.0] * 7, [f"unisono: {NOTICE}", *outside])
    assert second == (names, [3.0] * 7, [])


def name_gloo(
    rank: int, size: int, path: str
) -> tuple[list[tuple[str, str]], list[float], list[str]]:
    """The names of the groups that a rank gets and what moves their data, their sums, and the
    messages that it gets."""
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
    backends = [(str(dist.get_backend(group)), group.comm.backend) for group in groups]
    dist.destroy_process_group()
    return backends, sums, said


def test_every_function_of_torch_names_a_replaced_gloo_as_it_names_gloo(
    fresh_pool: RankPool,
) -> None:
    on_gloo = fresh_pool.run(name_everywhere, 2, False, connected=False)
    replaced = fresh_pool.run(name_everywhere, 2, True, connected=False)
    assert [names for names, _, _ in replaced] == [names for names, _, _ in on_gloo]
    for _, kinds, reason in on_gloo:
        assert kinds == ["ProcessGroup"] * 6
        assert reason == "torch.distributed already runs on it"
    for _, kinds, reason in replaced:
        assert kinds == ["UnisonoProcessGroup"] * 6
        assert reason == (
            "the program asked torch for gloo, and UNISONO_REPLACE=gloo gives it unisono"
        )


def name_everywhere(
    rank: int, size: int, path: str, replaces: bool
) -> tuple[list[object], list[str], str]:
    """What torch calls the backend of some groups, their classes, and what unisono says; DDP and
    monitored_barrier, which ask for the name, work."""
    if replaces:
        os.environ["UNISONO_REPLACE"] = "gloo"
        autoload()  # as at `import torch`, which these ranks have already done
    limit = timedelta(seconds=60)
    cpu = torch.device("cpu")
    address = f"file://{path}.store"
    dist.init_process_group("GLOO", init_method=address, rank=rank, world_size=size, timeout=limit)
    world = dist.group.WORLD
    groups = [
        world,
        dist.new_group(),
        dist.new_group([1, 0], backend="gloo", use_local_synchronization=True),
        dist.new_subgroups(2)[0],
        init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")).get_group("b"),
        c10d._find_or_create_pg_by_ranks_and_tag("user:made", [0, 1], 2),
    ]
    names: list[object] = [c10d._backend]
    for group in groups:
        names += [str(dist.get_backend(group)), dist.get_backend_config(group), group.name()]
        names += [group._get_backend_name(), group._get_backend(cpu).name()]
        names += [str(c10d._world.pg_map[group][0]), c10d._get_pg_config(group)["backend_config"]]
    alone = dist.new_group([0])
    names.append(str(dist.get_backend(alone)) if rank == 0 else alone)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    names.append(model.module.weight.grad.tolist())
    dist.monitored_barrier(timeout=limit, wait_all_ranks=True)
    outcome = names, [type(group).__name__ for group in groups], unisono.get_backend_reason()
    dist.destroy_process_group()
    return outcome


@pytest.mark.provokes
def test_the_watch_reports_what_really_runs(fresh_pool: RankPool) -> None:
    assert fresh_pool.run(write_too_early, 2, connected=False) == [[("race", "unisono")], []]


def write_too_early(rank: int, size: int, path: str) -> list[tuple[str, str]]:
    """Write to a tensor while it is sent on a replaced group: the kinds and the backends of the
    watch's reports."""
    os.environ["UNISONO_REPLACE"] = "gloo"
    autoload()
    unisono.watch.sanitize()
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=size)
    tensor = torch.ones(4)
    if rank == 0:
        work = dist.isend(tensor, 1)
        tensor.zero_()
        assert work is not None
        work.wait()
    else:
        dist.recv(tensor, 0)
    reports = [(report.kind, report.backend) for report in unisono.watch.reports()]
    unisono.watch.stop()
    dist.destroy_process_group()
    return reports


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
        os.write(1, f"made {dist.get_backend()} {dist.group.WORLD!r}\\n".encode())
        dist.destroy_process_group()
    """)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = script.run(before=torchrun, environment={"UNISONO_REPLACE": "gloo"})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("made gloo <UnisonoProcessGroup") == 2
    assert ended.stderr.count(NOTICE) == 1


def test_what_a_group_is_made_of_instead() -> None:
    from unisono.torch_backend.replacement import _instead_of

    for asked in ("Gloo", "gloo", "cpu:gloo"):
        assert _instead_of(asked, "gloo") == "unisono"
    for asked in ("", "nccl", "unisono", "cpu:gloo,cuda:gloo", "cuda:gloo", "mygloo"):
        assert not _instead_of(asked, "gloo")


@before_2_15
def test_a_group_for_several_devices_is_left_alone_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from unisono.torch_backend.replacement import _instead_of

    assert not _instead_of("cpu:gloo,cuda:nccl", "gloo")
    assert "from torch 2.15 on CPUs can be ours" in caplog.text


@since_2_15
def test_the_cpus_part_of_a_group_for_several_devices(program: WriteProgram) -> None:
    script = program("""
        import os
        import torch
        import torch.distributed as dist
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  # stands for nccl
        import unisono
        from unisono.torch_backend.process_group import our_group

        dist.init_process_group("cpu:gloo,cuda:fake")
        said = []
        for group in (dist.group.WORLD, dist.new_group(), dist.new_group(backend="gloo")):
            tensor = torch.tensor([dist.get_rank() + 1.0])
            dist.all_reduce(tensor, group=group)
            said.append((tensor.item(), dist.get_backend(group), our_group(group) is not None))
        os.write(1, f"{said} {unisono.get_backend()}\\n".encode())
        dist.destroy_process_group()
    """)
    ended = script.run(before=("-m", "unisono", "run", "-n", "2", "--replace", "gloo"))
    assert ended.returncode == 0, ended.stderr
    both = (3.0, "cpu:gloo,cuda:fake", True)
    expected = f"{[both, both, (3.0, 'gloo', True)]} unisono"
    assert sorted(ended.stdout.splitlines()) == [f"[rank {rank}] {expected}" for rank in range(2)]
    assert NOTICE in ended.stderr


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
