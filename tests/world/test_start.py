"""How a world starts and ends: the launcher, the backend, torch's group, the exit."""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import unisono
from implementations import on_backends
from ranks import attempt
from unisono.world.environment import find_master, read_local_rank, read_rank_info, read_size
from unisono.world.start import RankDescription, choose_backend
from unisono.world.world import resolve
from user_programs import eventually, plain_environment, write_program

# -- who started the ranks -------------------------------------------------------------------------


NO_LAUNCHER = (
    "unisono: no launcher started this program, so it is a world of one rank; unisono run -n 2 "
    "{} starts two (init(rank=0, size=1) means one)\r\n"
)


def at_a_terminal(*command: str, **more: str) -> str:
    """What a command writes to a terminal; its program must not think that it is part of a test."""
    environment = plain_environment() | more
    if "PYTEST_VERSION" not in more:
        environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_")}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, *command], env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # how a terminal signals the end
            while part := os.read(ours, 4096):
                written += part
    os.close(ours)
    assert process.returncode == 0, written
    return written.decode()


def test_one_rank_by_accident_is_told_at_a_terminal_alone(tmp_path: Path) -> None:
    program = write_program(
        tmp_path,
        """
        import sys
        import unisono
        given = {"rank": 0, "size": 1} if "one" in sys.argv else {}
        for _ in range(2):
            unisono.init(with_torch=False, **given)
            unisono.shutdown()
        """,
    )
    path = str(program.path)
    assert at_a_terminal(path, "a b") == NO_LAUNCHER.format(f"{path} 'a b'")
    as_module = ("-m", program.path.stem, "a")
    text = at_a_terminal(*as_module, PYTHONPATH=str(program.path.parent))
    assert text == NO_LAUNCHER.format(" ".join(as_module))
    assert at_a_terminal(path, "one") == ""
    assert at_a_terminal("-c", "import unisono; unisono.init(with_torch=False)") == ""
    assert at_a_terminal(path, PYTEST_VERSION="9") == ""
    assert at_a_terminal("-m", "unisono", "run", "-n", "1", path) == ""
    ended = program.run()
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")


def variables(text: str) -> dict[str, str]:
    """An environment, from "NAME=value NAME=value"."""
    return dict(assignment.split("=") for assignment in text.split())


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("", None),
        ("WORLD_SIZE=4", None),
        ("UNISONO_RANK=1 UNISONO_SIZE=4", (1, 4, 1, 4, "unisono")),
        ("UNISONO_RANK=1 UNISONO_SIZE=2 RANK=7 WORLD_SIZE=9", (1, 2, 1, 2, "unisono")),
        ("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4", (5, 8, 1, 4, "torchrun")),
        ("SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1 SLURM_NNODES=2", (3, 4, 1, 0, "srun")),
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=2", (0, 2, 0, 2, "srun")),
        (
            "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 "
            "OMPI_COMM_WORLD_LOCAL_SIZE=2 SLURM_PROCID=0 SLURM_NTASKS=4",
            (2, 4, 0, 2, "mpirun"),
        ),
        ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", (1, 2, 1, 2, "mpirun")),
    ],
)
def test_which_rank_of_how_many(environment: str, expected: Any) -> None:
    info = read_rank_info(variables(environment))
    found = info and (info.rank, info.size, info.local_rank, info.local_size, info.launcher)
    assert found == expected


STEP = "SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_STEP_NUM_NODES=2 SLURM_JOB_ID=11 SLURM_STEP_ID=2 "


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("MASTER_ADDR=a MASTER_PORT=7", ("a", "7")),
        ("MASTER_ADDR=a", None),
        (STEP + "SLURM_STEP_NODELIST=node[07-09,12],login1", ("node07", "15079")),
        (STEP + "SLURM_STEP_NODELIST=login1,node[1-2]", ("login1", "15079")),
        (STEP + "SLURM_STEP_NODELIST=rack[2-3]node[5,7]-ib", ("rack2node5-ib", "15079")),
        (STEP + "SLURM_STEP_NODELIST=n[1-2] MASTER_ADDR=a MASTER_PORT=7", ("a", "7")),
        (STEP + "SLURM_STEP_NODELIST=n[1-2] MASTER_PORT=7", ("n1", "7")),
        (STEP + "SLURM_NODELIST=n[1-2]", None),  # a batch script's
        ("SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n1 SLURM_JOB_ID=11", None),
    ],
)
def test_where_rank_0_hosts_the_store(environment: str, expected: Any) -> None:
    assert find_master(variables(environment)) == expected


def test_what_is_not_a_number_is_named_and_a_size_alone_is_seen() -> None:
    with pytest.raises(ValueError, match="RANK is 'one'"):
        read_rank_info({"RANK": "one", "WORLD_SIZE": "2"})
    assert read_size({"WORLD_SIZE": "4"}) == 4
    assert read_local_rank({"LOCAL_RANK": "3"}) == 3
    assert read_local_rank({}) == 0


PLAIN = """
    import logging, sys, numpy
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout)
    import unisono
    comm = unisono.init()
    x = numpy.full(3, comm.rank + 1.0)
    comm.all_reduce(x)
    print(comm.rank, comm.size, unisono.get_local_rank(), x[0], unisono.get_backend(), flush=True)
    unisono.shutdown()
    assert unisono.init().rank == comm.rank
    assert "torch" not in sys.modules
"""


def start_ranks(folder: Path, text: str, *environments: str, shell: bool = False) -> Any:
    """Run a program once for each environment, as children of one process; returns each one's
    output."""
    program = write_program(folder, text)
    if shell:  # a process between the ranks and the one that started them
        command = f"{sys.executable} {program.path}; exit $?"
        program = write_program(
            folder, f"import os, sys; sys.exit(os.system({command!r}) >> 8)", "shell.py"
        )
    started = [program.start(environment=variables(environment)) for environment in environments]
    try:
        return [(*process.communicate(timeout=180), process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


LAUNCHERS = {
    "srun": "SLURM_PROCID={rank} SLURM_NTASKS=2 SLURM_LOCALID={rank} SLURM_JOB_ID={job} "
    "SLURM_STEP_ID=0",
    "mpirun": "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 PMIX_NAMESPACE=prterun-{job}@1 "
    "OMPI_COMM_WORLD_LOCAL_RANK={rank} OMPI_COMM_WORLD_LOCAL_SIZE=2",
    "hydra": "PMI_RANK={rank} PMI_SIZE=2 MPI_LOCALRANKID={rank} MPI_LOCALNRANKS=2",
}


@pytest.mark.parametrize("shell", [False, True], ids=["directly", "through a shell"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_srun_and_mpirun_meet_without_a_port(
    tmp_path: Path, launcher: str, shell: bool
) -> None:
    if launcher == "hydra" and shell:
        pytest.skip("MPICH names no job: its ranks know each other by their parent")
    environments = [LAUNCHERS[launcher].format(rank=rank, job=os.getpid()) for rank in range(2)]
    ends = start_ranks(tmp_path, PLAIN, *environments, shell=shell)
    for rank, (out, err, code) in enumerate(ends):
        assert code == 0, err
        assert f"{rank} 2 {rank} 3.0 unisono\n" in out
    assert "unisono backend unisono for 2 ranks: no rank has a GPU, and all are" in ends[0][0]
    assert "backend" not in ends[1][0]


def test_the_file_of_a_killed_rank_0_goes_when_other_ranks_meet(tmp_path: Path) -> None:
    """The next job has another name, so nobody would look at that file again."""
    killed = LAUNCHERS["srun"].format(rank=0, job=f"{os.getpid()}1")
    with write_program(tmp_path, PLAIN).start(environment=variables(killed)) as rank_0:
        assert eventually(lambda: bool(announced_by(rank_0.pid)))
        rank_0.terminate()
    (left,) = announced_by(rank_0.pid)
    environments = [LAUNCHERS["srun"].format(rank=rank, job=os.getpid()) for rank in range(2)]
    assert [code for _, _, code in start_ranks(tmp_path, PLAIN, *environments)] == [0, 0]
    assert not left.exists()


def announced_by(pid: int) -> list[Path]:
    """The rendezvous files of a rank 0."""
    folders = (Path("/tmp"), Path(f"/run/user/{os.geteuid()}"))
    found = []
    for file in (file for folder in folders for file in folder.glob(f"unisono-{os.geteuid()}-*")):
        with contextlib.suppress(FileNotFoundError):  # of another job
            found += [file] if f'"pid": {pid},' in file.read_text() else []
    return found


def test_ranks_on_several_machines_need_an_address(tmp_path: Path) -> None:
    info = "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_NNODES=2"
    ((_, err, code),) = start_ranks(tmp_path, "import unisono; unisono.init()", info)
    assert code == 1
    assert "not all of them on this machine: set MASTER_ADDR and MASTER_PORT" in err


SPAWNED = """
    import torch, torch.distributed as dist, unisono

    def work(rank, size):
        comm = unisono.setup(rank, size)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size] * 2 and dist.get_rank() == unisono.get_rank() == rank
        assert unisono.get_local_rank() == rank and unisono.get_device().type == "cpu"
        unisono.cleanup()
        unisono.cleanup()
        assert not dist.is_initialized()
        unisono.setup(rank, size, "gloo")
        comm = unisono.get_world()
        assert comm.backend == unisono.get_backend() == "gloo"
        comm.all_reduce(tensor)
        assert tensor.tolist() == [size * size] * 2
        print("done", flush=True)  # and leaves without cleaning up

    if __name__ == "__main__":
        torch.multiprocessing.spawn(work, (2,), nprocs=2)
"""


def test_ranks_of_mp_spawn_set_up_and_clean_up(tmp_path: Path) -> None:
    done = write_program(tmp_path, SPAWNED).run()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n" * 2


@pytest.mark.ranks(2)
def test_ranks_of_torchrun_meet_in_its_store(
    shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These processes are warm; tests/launcher/test_run.py has torchrun itself start some."""
    rank = int(os.environ["UNISONO_RANK"])
    found = shared_tmp_path / "port"
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (shared_tmp_path / "new").write_text(str(server.port))
        (shared_tmp_path / "new").rename(found)
    assert eventually(found.exists)
    for name in [name for name in os.environ if name.startswith("UNISONO_")]:
        monkeypatch.delenv(name)
    torchrun = (
        f"RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
        f"MASTER_PORT={found.read_text()} TORCHELASTIC_USE_AGENT_STORE=True "
        "TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0"
    )
    for name, value in variables(torchrun).items():
        monkeypatch.setenv(name, value)
    for backend, name in (("auto", "unisono"), ("gloo", "gloo"), ("unisono", "unisono")):
        comm = unisono.init(backend)
        comm.all_reduce(tensor := torch.ones(2))
        dist.all_reduce(tensor)
        assert (comm.rank, unisono.get_local_rank(), comm.backend) == (rank, rank, name)
        assert tensor.tolist() == [4, 4]
        unisono.shutdown()


# -- the backend -----------------------------------------------------------------------------------


def described(boot: str = "a", gpu: str = "") -> RankDescription:
    return RankDescription(f"host-{boot}", boot, True, gpu)


@pytest.mark.parametrize(
    ("everyone", "backend", "reason"),
    [
        ([described()], "unisono", "no rank has a GPU"),
        ([described(), described()], "unisono", "one machine"),
        ([described("a"), described("b")], "unisono", "2 hosts, UCX between them"),
        ([described(gpu="x")], "nccl", "its own GPU"),
        ([described("a", "x"), described("b", "y")], "nccl", "its own GPU"),
        ([described(gpu="x"), described(gpu="x")], "unisono", "not every rank has its own GPU"),
        ([described("a", "x"), described("b")], "unisono", "not every rank has its own GPU"),
    ],
)
def test_the_choice_and_its_reason(
    everyone: list[RankDescription], backend: str, reason: str
) -> None:
    found = choose_backend(everyone)
    assert found[0] == backend
    assert reason in found[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.ranks(2)
def test_nccl_without_a_gpu_is_one_sentence_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    if not dist.is_nccl_available():
        with pytest.raises(unisono.UnisonoError, match="torch has no backend nccl here, only"):
            unisono.init("nccl")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)  # as a build for CUDA has it
    with pytest.raises(
        unisono.UnisonoError, match=r"nccl needs a GPU .* none on ranks 0 and 1 of 2"
    ):
        unisono.init("nccl")
    assert unisono.init().backend == "unisono"


@pytest.mark.ranks(2)
def test_the_choice_is_logged_by_rank_0_and_can_be_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "unisono"):
        comm = unisono.init()
    lines = [record.getMessage() for record in caplog.records if record.name == "unisono"]
    assert len(lines) == (comm.rank == 0)
    assert (comm.backend, unisono.get_backend()) == ("unisono", "unisono")
    assert "one machine" in unisono.get_backend_reason()
    unisono.shutdown()
    unisono.init("gloo").barrier()  # gloo fails if a peer leaves while others still connect
    assert unisono.get_backend_reason() == "it was asked for"


@pytest.mark.ranks(2)
def test_a_backend_that_is_not_to_be_had_is_refused_on_every_rank() -> None:
    for wrong in ("mpi", "nonsense"):
        with pytest.raises(unisono.UnisonoError, match=f"no backend {wrong}"):
            unisono.init(wrong)
    assert not dist.is_initialized()
    unisono.init().barrier()


# -- torch.distributed -----------------------------------------------------------------------------


@pytest.mark.ranks([1, 3])
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_ddp_works_after_init(backend: str) -> None:
    comm = unisono.init(backend)
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    assert resolve() is comm
    torch.manual_seed(0)
    inner = torch.nn.Linear(4, 1)
    alone = torch.nn.Linear(4, 1)
    alone.load_state_dict(inner.state_dict())
    batch = torch.arange(4.0 * comm.size).view(comm.size, 4)
    model = torch.nn.parallel.DistributedDataParallel(inner)
    model(batch[comm.rank]).sum().backward()
    (alone(batch).sum() / comm.size).backward()
    assert torch.allclose(inner.weight.grad, alone.weight.grad)
    even = dist.new_group([0])
    assert (resolve(even).size == 1) if comm.rank == 0 else True
    unisono.shutdown()
    assert not dist.is_initialized()
    assert isinstance(attempt(comm.barrier), unisono.GroupClosed)
    unisono.init(backend).barrier()  # and again; left open


ON_ONE = """
    import os, sys, unisono
    if os.environ["UNISONO_RANK"] == "1":
        import torch
    had_torch = "torch" in sys.modules
    unisono.init()
    import torch, torch.distributed as dist
    dist.all_reduce(tensor := torch.ones(1))
    unisono.shutdown()
    unisono.init(with_torch=False)
    print(had_torch, tensor.item(), dist.is_initialized())
"""


def test_torch_starts_on_all_ranks_if_it_is_there_on_one(tmp_path: Path) -> None:
    where = f"UNISONO_SIZE=2 UNISONO_RENDEZVOUS={tmp_path / 'meeting'}"
    ends = start_ranks(tmp_path, ON_ONE, *(f"{where} UNISONO_RANK={rank}" for rank in range(2)))
    assert [end[0] for end in ends] == ["False 2.0 False\n", "True 2.0 False\n"], ends


@on_backends(gloo=[2], unisono=[2])
def test_a_group_that_is_there_is_adopted_and_left_alone(process_group: Any, backend: str) -> None:
    assert unisono.get_rank() == dist.get_rank()
    assert unisono.get_world_size() == 2
    assert unisono.is_distributed()
    assert "already" in unisono.get_backend_reason()
    comm = unisono.init()
    assert comm is resolve(process_group)
    assert comm.backend == backend
    assert "already" in unisono.get_backend_reason()
    comm.all_reduce(tensor := torch.ones(1))
    assert tensor.item() == 2
    unisono.shutdown()
    unisono.shutdown()
    dist.all_reduce(tensor)
    assert tensor.item() == 4
    resolve().barrier()
    other = "unisono" if backend == "gloo" else "gloo"
    with pytest.raises(unisono.UnisonoError, match=f"already runs on {backend}"):
        unisono.init(other)
    with pytest.raises(unisono.UnisonoError, match="cannot be rank 1 of 3"):
        unisono.init(rank=1, size=3, rendezvous="somewhere")


@pytest.mark.ranks(2)
def test_a_program_that_destroys_the_group_itself_can_still_shut_down() -> None:
    unisono.init()
    dist.destroy_process_group()
    unisono.shutdown()
    unisono.init("gloo").barrier()
    dist.destroy_process_group()
    unisono.shutdown()
    unisono.init().barrier()


# -- one process -----------------------------------------------------------------------------------


def test_everything_works_in_one_process_without_init() -> None:
    assert not unisono.is_distributed()
    assert unisono.is_main_process()
    assert (unisono.get_rank(), unisono.get_world_size(), unisono.get_local_rank()) == (0, 1, 0)
    assert unisono.get_device() == torch.device("cpu")
    assert unisono.get_backend() == "unisono"
    assert unisono.get_device(3) == torch.device("cpu")
    with pytest.raises(ValueError, match="not be negative"):
        unisono.get_device(-1)
    world = unisono.get_world()
    assert world is resolve()
    assert (world.rank, world.size) == (0, 1)
    unisono.barrier()
    work = unisono.barrier(async_op=True)
    work.wait()
    assert work.is_completed()
    unisono.monitored_barrier()
    unisono.shutdown()


@pytest.mark.parametrize("backend", ["auto", "gloo", "unisono"])
def test_a_world_of_one_has_a_group_of_one(backend: str) -> None:
    comm = unisono.init(backend)
    try:
        dist.all_reduce(tensor := torch.ones(2))
        comm.all_reduce(tensor)
        unisono.barrier()
        assert tensor.tolist() == [1, 1]
    finally:
        unisono.shutdown()
    assert not dist.is_initialized()


# -- what `group=` means ---------------------------------------------------------------------------


def test_a_launched_process_that_has_not_met_the_others_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")  # and nothing says which
    asks = (resolve, unisono.get_world, unisono.barrier, unisono.get_rank, unisono.get_world_size)
    for ask in asks:
        with pytest.raises(unisono.UnisonoError, match="one of 4 ranks"):
            ask()


AGREE = """
    import os, unisono

    def who():
        rank, size = unisono.get_rank(), unisono.get_world_size()
        assert unisono.is_main_process() == (rank == 0) and unisono.is_distributed() == (size > 1)
        return rank, size, unisono.get_local_rank()

    before = who()
    for call in (unisono.get_world, unisono.barrier):
        try:
            call()
            raise AssertionError("it has not met the others")
        except unisono.UnisonoError as error:
            assert "not initialised: this process was launched as one of 2 ranks" in str(error)
    comm = unisono.init()
    assert unisono.get_world() is comm and (comm.rank, comm.size) == who()[:2]
    assert who() == before
    unisono.shutdown()
    import torch.distributed as dist
    dist.init_process_group("gloo", "file://" + os.environ["MEETING"], rank=before[0], world_size=2)
    world = unisono.get_world()
    assert (world.rank, world.size, world.backend) == (dist.get_rank(), 2, "gloo")
    assert who() == before
    work = unisono.barrier(async_op=True)
    work.wait(60)
    assert work.is_completed()
    dist.destroy_process_group()
    print(*who())
"""


def test_who_am_i_has_one_answer_before_and_after_the_ranks_have_met(tmp_path: Path) -> None:
    where = f"UNISONO_SIZE=2 UNISONO_RENDEZVOUS={tmp_path / 'meeting'} MEETING={tmp_path / 'torch'}"
    own = (f"UNISONO_RANK={rank} RANK={rank} WORLD_SIZE=2" for rank in range(2))
    ends = start_ranks(tmp_path, AGREE, *(f"{where} {mine}" for mine in own))
    assert [end[0] for end in ends] == ["0 2 0\n", "1 2 1\n"], ends


@pytest.mark.ranks(2)
def test_a_barrier_in_the_background_ends_when_the_last_rank_has_come(comm: Any) -> None:
    if comm.rank == 0:
        work = unisono.barrier(async_op=True)
        assert not work.is_completed()
        comm.send(torch.ones(1), 1)  # rank 1 has not called it before it has this
        work.wait()
        assert work.is_completed()
    else:
        comm.recv(torch.empty(1), 0)
        unisono.barrier()


@pytest.mark.ranks(2)
def test_a_communicator_is_itself(comm: Any) -> None:
    assert resolve(comm) is comm


@pytest.mark.ranks(3)
def test_torch_groups_of_ours_unwrap(process_group: Any) -> None:
    assert resolve() is process_group.comm
    few = dist.new_group([0, 2])
    if process_group.rank() == 1:
        with pytest.raises(unisono.UnisonoError, match="member"):
            resolve(few)
    else:
        assert resolve(few).global_ranks == (0, 2)


# -- the way out -----------------------------------------------------------------------------------


def leave_early(how: str, backend: str) -> None:
    comm = unisono.init(backend)
    comm.all_reduce(torch.ones(1))
    if comm.rank == 1 and how == "raises":
        raise LookupError("no such luck")
    if how != "returns":
        comm.all_reduce(torch.ones(1))


def test_ranks_that_do_not_shut_down_end_without_noise() -> None:
    lines: list[str] = []
    unisono.launch(
        leave_early,
        2,
        args=("returns", "gloo"),
        timeout=180,
        on_line=lambda *line: lines.append(str(line)),
    )
    assert lines == []


@pytest.mark.slow
def test_one_rank_that_fails_ends_the_others_on_gloo_too() -> None:
    with pytest.raises(unisono.RanksFailed) as caught:
        unisono.launch(leave_early, 2, args=("raises", "gloo"), timeout=60, capture=True)
    assert caught.value.first == 1
    assert "LookupError: no such luck" in str(caught.value)
    assert re.search("PeerLost|GroupAborted", caught.value.endings[0].traceback)
