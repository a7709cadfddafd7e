"""`unisono run`, and programs started by others: torchrun, torch.multiprocessing.spawn."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from unisono.cli import main
from user_programs import (
    Program,
    WriteProgram,
    eventually,
    ignoring,
    lives,
    plain_environment,
    read_pids,
)

RUN = ("-m", "unisono", "run")


def run(
    script: Program, ranks: int, *args: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a script on this many ranks."""
    return script.run(*args, before=(*RUN, "-n", str(ranks), *options))


# -- what a program finds ------------------------------------------------------------------------


def test_a_script_is_run_as_python_would(tmp_path: Path, program: WriteProgram) -> None:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    script = program("""
        import os, sys, beside, unisono
        import __main__
        comm = unisono.init()
        assert __main__.comm is comm and __name__ == "__main__" and __spec__ is None
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR".split()
        print(comm.rank, comm.size, sys.argv[1:], os.path.basename(__file__), beside.NAME)
        slow = {"torch", "numpy", "unisono.launcher.crew"}  # more than all the rest of a start
        print([os.environ[name] for name in names], slow & {*sys.modules})
    """)
    done = run(script, 2, "--lr", "0.1", "-n", "7")
    assert done.returncode == 0, done.stderr
    for rank in "01":
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[rank {rank}]")]
        assert lines == [
            f"[rank {rank}] {rank} 2 ['--lr', '0.1', '-n', '7'] program.py beside",
            f"[rank {rank}] ['{rank}', '{rank}', '2', '2', '0', '127.0.0.1'] set()",
        ]


def test_a_module_and_a_package(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("from . import sub\nprint('main', __package__)\n")
    (package / "sub.py").write_text("import sys\nprint('sub', __name__, sys.argv[1:])\n")
    environment = plain_environment()
    for name, expected in (
        ("package.sub", "sub __main__ ['a']\n"),
        ("package", "sub package.sub ['a']\nmain package\n"),
    ):
        command = [sys.executable, *RUN, "-n", "1", "--no-prefix", "-m", name, "a"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180
        )
        assert done.stdout == expected, done.stderr


TORCH = """
    import sys, torch, torch.distributed as dist, unisono
    comm = unisono.init(with_torch=False)  # needs no port: the store may start meanwhile
    dist.init_process_group()
    tensor = torch.full((2,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    ours = torch.full((2,), comm.rank + 1.0)
    comm.all_reduce(ours)
    group = dist.distributed_c10d._get_default_group()
    name = group._get_backend(torch.device("cpu")).name()
    print(f"{name} {tensor.tolist()} {ours.tolist()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torch_programs_run_two_at_once_without_a_port_of_their_own(program: WriteProgram) -> None:
    script = program(TORCH)
    runs = [script.start(before=(*RUN, "-n", str(ranks))) for ranks in (1, 2)]
    for ranks, total, process in zip((1, 2), (1.0, 3.0), runs, strict=True):
        out, err = process.communicate(timeout=180)
        assert process.returncode == 0, err
        lines = [
            f"[rank {rank}] gloo [{total}, {total}] [{total}, {total}]" for rank in range(ranks)
        ]
        assert sorted(out.splitlines()) == lines


def test_the_default_backend_is_the_one_asked_for(program: WriteProgram) -> None:
    script = program("""
        import torch.distributed as dist
        print(dist.Backend.default_device_backend_map)
        print(dist.distributed_c10d.BackendConfig(dist.Backend("undefined")))
    """)
    environment = {"UNISONO_BACKEND": "fake"}
    done = script.run(environment=environment)
    assert "'cpu': 'fake'" in done.stdout, done.stderr
    assert "cpu:fake" in done.stdout
    refused = CliRunner().invoke(main, ["run", "-n2", "--backend=nonsense", str(script.path)])
    assert refused.exit_code == 2
    assert refused.output.startswith("Error: torch has no backend nonsense here, only gloo")
    assert refused.output.count("\n") == 1


@pytest.mark.slow
def test_torchrun_starts_ranks_for_unisono_too(program: WriteProgram) -> None:
    script = program("""
        import numpy, os, unisono
        comm = unisono.init()
        comm.all_reduce(array := numpy.ones(2))
        os.write(1, f"sum {array[0]}\\n".encode())  # torchrun keeps no lines together
    """)
    done = script.run(before=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2.0") == 2


@pytest.mark.slow
@pytest.mark.parametrize("way", ["unisono.init()", 'dist.init_process_group("unisono")'])
def test_torchrun_starts_ranks_again(program: WriteProgram, way: str) -> None:
    """The ranks of a new attempt meet, whatever the last one has left in torchrun's store."""
    again = program("""
        import os, sys, numpy, unisono, torch.distributed as dist
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        eval(sys.argv[1])
        comm = unisono.get_world()
        array = numpy.ones(3) + comm.rank
        comm.all_reduce(array)
        os.write(1, f"attempt {attempt}: {array[0]}\\n".encode())
        if attempt < 2:
            sys.exit(comm.rank)
    """)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = again.run(way, before=(*torchrun, "--max-restarts=2"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"attempt {n}: 3.0" for n in (0, 0, 1, 1, 2, 2)]


@pytest.mark.parametrize("way", ["a parent", pytest.param("a store", marks=pytest.mark.slow)])
def test_spawned_ranks_meet_by_setup(program: WriteProgram, way: str) -> None:
    script = program("""
        import glob, multiprocessing, os, socket, sys
        import numpy, unisono

        def work(rank, world_size):
            for _ in range(2):
                comm = unisono.init(rank=rank, size=world_size)
                comm.all_reduce(array := numpy.ones(2))
                assert array[0] == world_size and comm.rank == rank
                unisono.shutdown()

        if __name__ == "__main__":
            if sys.argv[1] == "a store":  # the kernel knows a port that is free right now
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    host, port = free.getsockname()
                    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
            context = multiprocessing.get_context("spawn")
            ranks = [context.Process(target=work, args=(rank, 2)) for rank in range(2)]
            for rank in ranks: rank.start()
            for rank in ranks: rank.join()
            left = glob.glob(f"/tmp/unisono-*-{os.getpid()}-*")
            print([rank.exitcode for rank in ranks], left)
    """)
    done = script.run(way)
    assert done.stdout == "[0, 0] []\n", done.stderr


def test_setup_refuses_what_is_unclear(program: WriteProgram) -> None:
    script = program("""
        import os, unisono
        os.getppid = lambda: 1  # as for a process whose parent has ended
        for call in (lambda: unisono.setup(0, 2), lambda: unisono.setup(2, 2)):
            try:
                call()
            except (unisono.RendezvousError, ValueError) as error:
                print(error)
    """)
    done = script.run()
    first, second = done.stdout.splitlines()[:2]
    assert "do not say where to meet" in first
    assert "MASTER_ADDR" in first
    assert second == "rank 2 is not in a world of 2"


def test_two_children_cannot_be_the_same_rank(program: WriteProgram) -> None:
    script = program("""
        import unisono
        print("here", flush=True)
        try:
            unisono.setup(1, 2)
        except unisono.RendezvousError as error:
            print(error, flush=True)
    """)
    both = [script.start(), script.start()]
    try:
        with selectors.DefaultSelector() as selector:
            for process in both:
                assert process.stdout is not None
                assert process.stdout.readline() == "here\n"
                selector.register(process.stdout, selectors.EVENT_READ)
            ((key, _),) = selector.select(30)  # one is rejected, one waits for rank 0
        text = key.fileobj.readline()  # type: ignore[union-attr]
        assert f"another child of process {os.getpid()} is rank 1 right now" in text
    finally:
        for process in both:
            process.kill()
            process.communicate()


# -- how it ends ---------------------------------------------------------------------------------


ENDS = """
    import os, signal, sys, unisono
    comm = unisono.init()
    comm.barrier()
    if comm.rank == 1:
        how = sys.argv[1]
        if how == "raise":
            raise LookupError("no such luck")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(int(how))
    comm.barrier()
"""


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("kill", 137), ("7", 7)])
def test_the_exit_code_is_the_first_failing_ranks(
    program: WriteProgram, how: str, code: int
) -> None:
    done = run(program(ENDS), 3, how)
    assert done.returncode == code
    assert "unisono run: rank 1 failed first, of 3 ranks: " in done.stderr
    assert "ranks 0 and 2 raised:" in done.stderr
    assert done.stderr.count("errors.PeerLost") == 1
    assert done.stderr.count("LookupError: no such luck") == (2 if how == "raise" else 0)


def test_a_failure_counts_also_where_its_rank_takes_long_to_end(
    program: WriteProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unisono.launcher.crew.SURVIVORS_S", 0.2)
    text = "import atexit, time\natexit.register(time.sleep, 600)\nraise LookupError('no luck')\n"
    done = CliRunner().invoke(main, ["run", "-n", "1", str(program(text).path)])
    assert done.exit_code == 1
    assert "unisono run: rank 0 failed first, of 1 rank: LookupError: no luck" in done.stderr


def test_the_programs_own_hook_still_runs(program: WriteProgram) -> None:
    script = program("""
        import sys
        sys.excepthook = lambda kind, error, frames: print("hooked", error)
        raise ValueError("gone")
    """)
    assert "hooked gone" in run(script, 1).stdout


def test_what_cannot_be_run_is_one_sentence(tmp_path: Path, program: WriteProgram) -> None:
    missing = Program(tmp_path / "missing.py")
    done = run(missing, 2)
    assert done.returncode == 2
    assert done.stderr == f"Error: {missing.path} does not exist\n"
    script = program("print('here')")
    nowhere = tmp_path / "missing" / "trace.json"
    done = run(script, 2, options=("--trace", str(nowhere)))
    assert done.returncode == 2
    assert done.stderr == f"Error: the folder of {nowhere} does not exist\n"
    nested = script.run(before=(*RUN, "-n", "2"), environment={"UNISONO_RANK": "0"})
    assert nested.returncode == 1
    assert "ranks cannot launch ranks" in nested.stderr


def test_a_trace_that_cannot_be_written_does_not_hide_how_the_ranks_ended(
    tmp_path: Path, program: WriteProgram
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    script = program(f"""
        import os, sys
        os.rmdir({str(folder)!r})
        sys.exit(7)
    """)
    done = run(script, 1, options=("--trace", str(folder / "trace.json")))
    assert done.returncode == 7
    assert f"the trace {folder}/trace.json could not be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_timeout_shows_where_each_rank_was(program: WriteProgram) -> None:
    script = program("import time\ndef stuck():\n    time.sleep(600)\nstuck()\n")
    for limit_s in (2, 10, 50):  # includes the start: seconds on a busy machine
        done = run(script, 2, options=("--timeout", str(limit_s)))
        assert done.returncode == 124
        assert f"not done within {limit_s} s: ranks 0 and 1" in done.stderr
        if "while starting" not in done.stderr:
            break
    assert "in stuck" in done.stderr


def test_a_timeout_begins_with_what_the_watch_has_said(program: WriteProgram) -> None:
    script = program("""
        import os, time, torch, unisono
        comm = unisono.init()
        if comm.rank:
            time.sleep(600)
        comm.all_reduce(torch.ones(4))
    """)
    for limit_s in (5, 10, 30, 90):  # includes the start
        before = (*RUN, "-n", "2", "--watch", "--timeout", str(limit_s))
        done = script.run(before=before, environment={"UNISONO_WATCH_HANG_S": "1"})
        if "unisono.watch: " in done.stderr:
            break
    assert done.returncode == 124
    verdict = done.stderr[done.stderr.index("unisono run: ") :].splitlines()[0]
    assert verdict.startswith("unisono run: rank 1 never reached all_reduce #1 "), done.stderr
    assert verdict.endswith(f"; not done within {limit_s} s: ranks 0 and 1 of 2 ranks")


def test_a_program_that_gives_signals_their_defaults_back_is_not_killed_by_the_question(
    program: WriteProgram,
) -> None:
    script = program("""
        import signal, time
        for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(600)
    """)
    done = run(script, 2, options=("--timeout", "2"))
    assert done.returncode == 124
    assert "not done within 2 s: ranks 0 and 1" in done.stderr
    assert "killed by signal" not in done.stderr


DIFFERENT = """
    import torch, torch.distributed as dist, unisono
    def step():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(4))
        else:
            dist.broadcast(torch.ones(4), src=0)
    dist.init_process_group("unisono")
    step()
"""


def test_the_verdict_comes_first_and_once_and_frames_of_unisono_are_left_out(
    program: WriteProgram,
) -> None:
    err = program(DIFFERENT).run(before=(*RUN, "-n", "2")).stderr
    verdict, first, second, *_ = err[err.index("unisono run: ") :].strip().split("\n\n")
    assert "the ranks made different calls in call #1 of group" in verdict.splitlines()[0]
    assert verdict.count("program.py:5 in step") == verdict.count("program.py:7 in step") == 1
    assert "Make every rank call the same, in the same order." in verdict
    for part in (first, second):
        assert re.search(r"line [57], in step\n +dist\.(all_reduce|broadcast)", part)
        assert part.splitlines()[-1].startswith("    unisono.errors.CollectiveMismatch: the ranks")
        assert "/unisono/comm/" not in part


def test_captured_output_is_shown_only_if_ranks_fail(program: WriteProgram) -> None:
    script = program("import sys\nprint('so far')\nsys.exit(int(sys.argv[1]))\n")
    quiet = run(script, 2, "0", options=("--capture",))
    assert (quiet.returncode, quiet.stdout) == (0, "")
    loud = run(script, 2, "3", options=("--capture",))
    assert loud.returncode == 3
    assert re.search(r"The end of rank \d's stdout:\n    so far", loud.stderr)


def test_log_files_have_what_each_rank_wrote(tmp_path: Path, program: WriteProgram) -> None:
    script = program("""
        import os, sys
        rank = os.environ["RANK"]
        print("out", rank)
        sys.stderr.write("err " + rank)  # no newline
        if rank == "1":
            raise RuntimeError("broken")
    """)
    logs = tmp_path / "new" / "logs"
    done = run(script, 2, options=("--log-dir", str(logs)))
    assert done.returncode == 1
    for rank in "01":
        assert f"[rank {rank}] out {rank}\n" in done.stdout  # the terminal shows it, too
        assert (logs / rank / "stdout.log").read_text() == f"out {rank}\n"
    assert (logs / "0/stderr.log").read_text() == "err 0"
    written = (logs / "1/stderr.log").read_text()
    assert written.startswith("err 1Traceback (most recent call last)")
    assert written.endswith("RuntimeError: broken\n")
    quiet = run(script, 1, options=("--capture", "--log_dir", str(logs)))
    assert (quiet.returncode, quiet.stdout) == (0, "")
    assert (logs / "0/stdout.log").read_text() == "out 0\n"  # and not that of the run before


def test_a_log_folder_that_cannot_be_written_is_one_error(
    tmp_path: Path, program: WriteProgram
) -> None:
    (tmp_path / "file").touch()
    done = run(program("print('started')"), 2, options=("--log-dir", str(tmp_path / "file/logs")))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--log-dir: cannot write {tmp_path}/file/logs" in done.stderr


def test_a_full_disk_ends_the_log_and_not_the_program(
    tmp_path: Path, program: WriteProgram
) -> None:
    log = tmp_path / "logs/0/stdout.log"
    log.parent.mkdir(parents=True)
    log.symlink_to("/dev/full")
    done = run(program("print('a'); print('b')"), 1, options=("--log-dir", str(tmp_path / "logs")))
    assert (done.returncode, done.stdout) == (0, "[rank 0] a\n[rank 0] b\n")
    assert done.stderr.count(f"cannot write {log}: No space left on device") == 1


WAITS = """
    import os, signal, sys, time
    def stop(number, frame):
        print("asked to end by", signal.Signals(number).name)
        sys.exit(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    print("pid", os.getpid())
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "ignored"),
    [
        (signal.SIGINT, ()),
        (signal.SIGTERM, ()),
        (signal.SIGINT, (signal.SIGINT, signal.SIGHUP)),  # as a script's `nohup ... &` does
    ],
)
def test_signals_are_passed_on_and_everything_ends(
    program: WriteProgram, number: signal.Signals, ignored: tuple[signal.Signals, ...]
) -> None:
    """SIGINT works even if it was ignored at the start, as under torchrun."""
    with contextlib.ExitStack() as stack:
        for one in ignored:
            stack.enter_context(ignoring(one))
        process = program(WAITS).start(before=(*RUN, "-n", "2"))
    pids = read_pids(process, 2)
    time.sleep(0.1)
    if signal.SIGHUP in ignored:
        process.send_signal(signal.SIGHUP)  # nohup is respected
    process.send_signal(number)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 128 + number
    assert out.count(f"asked to end by {number.name}") == 2
    assert "Traceback" not in err
    assert not any(map(lives, pids))


@pytest.mark.parametrize("way", ["unisono run", "unisono.launch"])
def test_a_launcher_that_is_killed_leaves_no_orphan(program: WriteProgram, way: str) -> None:
    """Neither ranks nor the processes that they have started."""
    script = program("""
        import os, subprocess, unisono
        def work():
            child = subprocess.Popen(["sleep", "600"])
            print("pid", os.getpid())
            print("pid", child.pid)
            child.wait()
        if "UNISONO_RANK" in os.environ:
            work()
        else:
            unisono.launch(work, 2)
    """)
    process = script.start(before=(*RUN, "-n", "2") if way == "unisono run" else ())
    pids = read_pids(process, 4)
    time.sleep(0.1)
    process.kill()
    process.communicate()
    assert eventually(lambda: not any(map(lives, pids)))
    assert eventually(lambda: not guards_of(process.pid))


def guards_of(pid: int) -> list[str]:
    """The processes that guard the ranks of a launch."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().decode(errors="replace").split("\0")
            if any(word.endswith("guard_process.py") for word in words) and str(pid) in words:
                found.append(file.parent.name)
    return found


def test_without_proc_one_sentence_says_so(program: WriteProgram) -> None:
    alone = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    hidden = "mount -t tmpfs none /proc"
    if shutil.which("unshare") is None or subprocess.run([*alone, hidden]).returncode:
        pytest.skip("/proc cannot be hidden here")
    script = program("import unisono; unisono.launch(len, 1, ('',))")
    ways = '"$0" -m unisono run -n 1 "$1"; "$0" "$1"; true'
    done = subprocess.run(
        [*alone, f"{hidden} && {ways}", sys.executable, script.path],
        env=plain_environment(),
        capture_output=True,
        text=True,
    )
    *_, by_launch = done.stderr.splitlines()
    sentence = "unisono needs /proc: run mount -t proc proc /proc"
    assert done.stderr.startswith(f"Error: {sentence}")
    assert by_launch.startswith(f"FileNotFoundError: {sentence}")


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_it_can_be_started_without_standard_streams(program: WriteProgram, closed: str) -> None:
    script = program("""
        import pathlib, unisono
        comm = unisono.init()
        pathlib.Path(f"rank-{comm.rank}").write_text("was here")
        print("said")
    """)
    shell = f'exec "$0" -m unisono run -n 2 "$1" {closed}'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable, script.path],
        env=plain_environment(),
        cwd=script.path.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (script.path.parent / f"rank-{rank}").read_text() == "was here"
    assert done.stdout.count("said") == (0 if ">&-" in closed else 2)


def test_a_full_disk_is_one_sentence(program: WriteProgram) -> None:
    script = program("import time\nprint('hello', flush=True)\ntime.sleep(60)\n")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, *RUN, "-n", "1", script.path],
            env=plain_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode != 0
    assert "Error: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_goes_away_ends_the_run(program: WriteProgram) -> None:
    script = program("import os\nprint('pid', os.getpid())\nwhile True: print('.' * 99)\n")
    process = script.start(before=(*RUN, "-n", "1"))
    (pid,) = read_pids(process, 1)
    time.sleep(0.1)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(30) != 0
    assert not lives(pid)
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.provokes
def test_a_rank_that_was_left_out_of_a_call_is_told_apart_from_one_at_work(
    program: WriteProgram,
) -> None:
    """Rank 1 has reached the end of its program, and is only slow to exit."""
    script = program("""
        import atexit, time
        import numpy, unisono
        comm = unisono.init()
        atexit.register(time.sleep, 600)  # before anything of ours leaves
        if comm.rank == 1:
            comm.close()
        else:
            comm.all_reduce(numpy.ones(3))
    """)
    done = run(script, 2)
    assert done.returncode == 1, done.stderr
    text = "PeerLost: rank 1 closed group world after 0 calls; this rank was in all_reduce #1"
    assert text in done.stderr
    assert "rank 1 finished the program, and was terminated while exiting" in done.stderr
    assert "still running" not in done.stderr
