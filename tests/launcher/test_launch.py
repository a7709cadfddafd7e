"""`unisono.launch`: results, failures, output, exits. Every rank is a real process."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import pytest

import unisono
from unisono.errors import RanksFailed, RanksTimedOut, UnisonoError
from unisono.launcher import share
from unisono.launcher.output import Lines, Terminal
from user_programs import WriteProgram, eventually, ignoring, lives, read_pids

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # spares every rank pytest's import


@pytest.fixture(autouse=True)
def _nobody_is_left() -> Iterator[None]:
    before = children()
    descriptors = len(os.listdir("/proc/self/fd"))
    yield
    assert children() <= before
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


# -- results -------------------------------------------------------------------------------------


def test_results_come_back_in_rank_order() -> None:
    assert unisono.launch(summed, 3, (10,), {"factor": 2.0}) == [(0, 66.0), (1, 66.0), (2, 66.0)]


def summed(more: int, factor: float) -> tuple[int, float]:
    comm = unisono.init()
    array = numpy.full(5, (comm.rank + more) * factor)
    comm.all_reduce(array)
    return comm.rank, float(array[0])


def test_a_closure_a_lambda_and_large_values() -> None:
    offset = numpy.arange(1 << 20)

    def shifted() -> numpy.ndarray[Any, Any]:
        return offset + unisono.init().rank

    first, second = unisono.launch(shifted, 2)
    assert (second - first == 1).all()
    assert unisono.launch(lambda: len(offset), 1) == [1 << 20]


def test_a_rank_needs_no_torch_and_no_port() -> None:
    assert unisono.launch(without_torch, 2) == [(0, False)] * 2


def without_torch() -> tuple[int, bool]:
    comm = unisono.init()
    comm.all_reduce(numpy.ones(3))
    return count_ports(), "torch" in sys.modules


def test_what_the_program_itself_defines(program: WriteProgram) -> None:
    script = program("""
        import pickle
        import unisono

        class Thing:
            def __init__(self, rank):
                self.rank = rank

        def make(more=0):
            thing = Thing(unisono.init().rank + more)
            assert isinstance(pickle.loads(pickle.dumps(thing)), Thing)
            return thing

        # no `if __name__ == "__main__"`, as in a notebook
        things = unisono.launch(make, 2, kwargs={"more": 5})
        assert all(type(thing) is Thing for thing in things)
        print([thing.rank for thing in things], unisono.launch(lambda: Thing, 1)[0] is Thing)
    """)
    done = script.run()
    assert done.stdout == "[5, 6] True\n", done.stderr


@pytest.mark.slow
def test_a_function_that_mentions_torchs_operators(program: WriteProgram) -> None:
    text = """
        import torch, unisono
        from torch.ops import aten
        add = torch.ops.aten.add.Tensor

        def work():
            four = add(torch.ops.aten.mul(torch.ones(1), 3), aten.neg(-torch.ones(1)))
            return four.item(), aten

        if __name__ == "__main__":
            assert unisono.launch(work, 2) == [(4.0, aten), (4.0, aten)]
    """
    result = program(text).run()
    assert result.returncode == 0, result.stderr


def test_code_without_a_file_is_shown_in_tracebacks(program: WriteProgram) -> None:
    script = program("""
        import linecache, unisono
        text = "def cell():\\n    raise ValueError('in a cell')  # a notebook's\\n"
        linecache.cache["<cell 1>"] = (len(text), None, text.splitlines(True), "<cell 1>")
        exec(compile(text, "<cell 1>", "exec"))
        try:
            unisono.launch(cell, 2)
        except unisono.RanksFailed as error:
            print(error)
    """)
    assert "# a notebook's" in script.run().stdout


def test_a_module_that_cannot_be_imported_by_name(program: WriteProgram) -> None:
    path = program("def double(x):\n    return 2 * x\n", "loaded_by_hand.py").path
    spec = importlib.util.spec_from_file_location("loaded_by_hand", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["loaded_by_hand"] = module
    try:
        spec.loader.exec_module(module)
        assert unisono.launch(module.double, 1, (21,)) == [42]
    finally:
        del sys.modules["loaded_by_hand"]


# -- failures ------------------------------------------------------------------------------------


def failed(function: Any, ranks: int, *args: Any, **options: Any) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        unisono.launch(function, ranks, args, **options)
    return caught.value


def test_every_traceback_once_and_the_first_to_fail_on_top() -> None:
    error = failed(one_raises, 4)
    text = str(error)
    assert error.first == 2
    assert text.startswith("rank 2 failed first, of 4 ranks: LookupError: no such luck\n")
    assert text.index("rank 2, the first to fail, raised:") < text.index("ranks 0, 1 and 3 raised:")
    assert text.count("Traceback") == 2
    assert "in one_raises\n" in text
    assert "unisono/launcher/" not in text  # no frames of ours
    assert [ending.how for ending in error.endings] == ["raised"] * 4
    assert "PeerLost: rank 2" in error.endings[0].traceback
    assert [ending.exit_code for ending in error.endings] == [1] * 4


def one_raises() -> None:
    comm = unisono.init()
    if comm.rank == 2:
        raise LookupError("no such luck")
    comm.barrier()


def test_texts_that_differ_only_in_the_rank_are_one() -> None:
    error = failed(all_raise, 3)
    heading = f"ranks 0-2 (rank {error.first} was the first) raised (as rank "
    assert heading in str(error)
    assert str(error).count("Traceback") == 1


def all_raise() -> None:
    rank = unisono.init().rank
    raise ValueError(f"rank {rank} has no luck, {object()}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_has_a_name(number: signal.Signals) -> None:
    error = failed(one_is_killed, 3, number)
    assert error.first == 1
    ending = error.endings[1]
    assert ending.signal == number.name
    assert ending.exit_code == 128 + number
    assert f"rank 1 failed first, of 3 ranks: it was killed by {number.name}" in str(error)
    assert "ranks 0 and 2 raised:" in str(error)
    assert "PeerLost: rank 1 (pid " in str(error)
    if number == signal.SIGSEGV:  # the crash wrote a stack
        assert "in one_is_killed" in ending.stack


def one_is_killed(number: signal.Signals) -> None:
    comm = unisono.init()
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), number)
    comm.barrier()


def test_a_rank_that_ends_without_a_value() -> None:
    error = failed(one_leaves, 2)
    assert error.first == 1
    assert "it exited with code 0 and returned nothing" in str(error)
    assert "rank 0 returned" in str(error)


def one_leaves() -> None:
    if os.environ["UNISONO_RANK"] == "1":
        os._exit(0)


def test_a_value_that_cannot_be_sent() -> None:
    error = failed(threading.Lock, 1)
    assert "return value, a lock, cannot be sent back" in str(error)


def test_a_survivor_that_does_not_notice_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.launcher.crew.SURVIVORS_S", 0.5)
    error = failed(one_sleeps, 2)
    assert error.first == 1
    assert error.endings[0].how == "was terminated while still running"
    assert "in one_sleeps" in error.endings[0].stack
    assert "rank 0 was terminated while still running:\n    It was here:" in str(error)


def one_sleeps() -> None:
    comm = unisono.init()
    comm.barrier()
    if comm.rank == 1:
        raise ValueError("gone")
    time.sleep(600)


def test_what_a_failed_rank_started_is_ended_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    failed(leaves_a_child, 1, str(note), True)
    assert eventually(lambda: not lives(int(note.read_text())))


def leaves_a_child(note: str, fails: bool) -> str:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(note).write_text(str(child.pid))
    if fails:
        raise ValueError("gone")
    return "done"


def test_a_crash_after_the_value_is_told() -> None:
    error = failed(crashes_late, 2)
    assert "it returned, and then was killed by SIGABRT" in str(error)


def crashes_late() -> int:
    import atexit

    if os.environ["UNISONO_RANK"] == "1":
        atexit.register(os.abort)
    return 3


# -- timeouts and interrupts ---------------------------------------------------------------------


def test_a_timeout_shows_where_each_rank_was() -> None:
    for timeout_s in (2.5, 10.0, 40.0):
        with pytest.raises(RanksTimedOut) as caught:
            unisono.launch(one_is_late, 3, timeout=timeout_s)
        text = str(caught.value)
        if "while starting" not in text:  # this takes long on a busy machine
            break
    assert text.startswith(f"not done within {timeout_s:g} s: ranks 0 and 1 of 3 ranks")
    assert "rank 2 returned" in text
    assert "in one_is_late" in caught.value.endings[0].stack
    last_line = one_is_late.__code__.co_firstlineno + 7  # the barrier, in which it waits
    assert f"line {last_line} in one_is_late" in caught.value.endings[1].stack


def one_is_late() -> None:
    rank = int(os.environ["UNISONO_RANK"])
    if rank == 2:
        return
    comm = unisono.init(rank=rank, size=2, rendezvous=meeting())
    if comm.rank == 0:
        time.sleep(600)
    comm.barrier()


def meeting() -> int:
    return int(os.environ["UNISONO_RENDEZVOUS"].removeprefix("fd:"))


INTERRUPTED = """
    import os, signal, sys, time, unisono

    def work(how):
        if how == "deaf":  # before anybody knows whom to interrupt
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("pid", os.getpid())
        if how == "in a barrier" and unisono.init().rank == 1:
            unisono.get_world().barrier()
        time.sleep(600)

    if __name__ == "__main__":
        try:
            unisono.launch(work, 2, (sys.argv[1],))
        except KeyboardInterrupt:
            print("interrupted")
"""


@pytest.mark.parametrize("how", ["asleep", "in a barrier", "deaf", "started with it ignored"])
def test_ctrl_c_ends_all_ranks(program: WriteProgram, how: str) -> None:
    ignored = how == "started with it ignored"
    with ignoring(signal.SIGINT) if ignored else contextlib.nullcontext():
        process = program(INTERRUPTED).start(how)
    pids = read_pids(process, 2)
    time.sleep(0.3 if how == "in a barrier" else 0.0)
    process.send_signal(signal.SIGINT)
    if how == "deaf":
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)  # the second one kills the ranks
    out, err = process.communicate(timeout=180)
    assert out.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert process.returncode == 0
    assert not any(map(lives, pids))


# -- torch's own programs --------------------------------------------------------------------------


def test_a_plain_torch_program_needs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = unisono.launch(start_torch_thrice, 2, (port,))
    assert results == [[("unisono", 3.0, 0), ("gloo", 3.0, None), ("unisono", 3.0, None)]] * 2


def start_torch_thrice(port: int) -> list[tuple[str, float, int | None]]:
    """Each time the backend, a sum, and how many ports this process has, although it needs none."""
    import torch
    import torch.distributed as dist

    said = []
    for turn, backend in enumerate(("unisono", "gloo", "unisono")):
        if turn == 2:  # like programs written for mp.spawn
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group(backend)
        assert os.environ["LOCAL_RANK"] == os.environ["RANK"] == str(dist.get_rank())
        x = torch.full((1,), dist.get_rank() + 1.0)
        dist.all_reduce(x)
        dist.barrier(dist.new_group([0, 1]))
        said.append((backend, x.item(), None if turn else count_ports()))
        dist.destroy_process_group()
    return said


def count_ports() -> int:
    """How many network sockets this process has."""
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6", "udp", "udp6")]
    inodes = {row.split()[9] for table in tables for row in table.splitlines()[1:]}
    return sum(f"socket:[{inode}]" in link for inode in inodes for link in links)


# -- output --------------------------------------------------------------------------------------


def test_lines_have_the_ranks_name(capsys: pytest.CaptureFixture[str]) -> None:
    unisono.launch(speaks_in_many_ways, 2)
    out, err = capsys.readouterr()
    for rank in (0, 1):
        assert f"[rank {rank}] from Python" in out.splitlines()
        assert f"[rank {rank}] from C" in out.splitlines()
        assert f"[rank {rank}] from a process" in out.splitlines()
        assert f"[rank {rank}] no newline \u00e4" in out.splitlines()
        assert f"[rank {rank}] an error" in err.splitlines()
        assert f"[rank {rank}] " + "x" * 3_000_000 in out.splitlines()
    assert "\x1b" not in out + err


def speaks_in_many_ways() -> None:
    print("from Python")
    print("an error", file=sys.stderr)
    ctypes.CDLL(None).printf(b"from C\n")
    subprocess.run([sys.executable, "-c", "print('from a process')"], check=True)
    print("x" * 3_000_000)
    print("no newline \u00e4", end="")


def test_lines_come_when_they_are_written() -> None:
    seen: list[tuple[int, str, str]] = []
    reader, writer = os.pipe()

    def on_line(rank: int, stream: str, line: str) -> None:
        seen.append((rank, stream, line))
        os.write(writer, b"!")  # the rank continues only when its line has arrived

    path = f"/proc/{os.getpid()}/fd/{reader}"
    try:
        assert unisono.launch(speaks_and_listens, 1, (path,), on_line=on_line) == [True]
    finally:
        os.close(reader)
        os.close(writer)
    assert seen == [(0, "stdout", "hello")]


def speaks_and_listens(path: str) -> bool:
    print("hello")
    with open(path, "rb", buffering=0) as answer:
        return answer.read(1) == b"!"


def test_much_output_at_once_stays_in_lines() -> None:
    counts = {0: 0, 1: 0}

    def count(rank: int, stream: str, line: str) -> None:
        assert line == f"{stream} of {rank} " + "." * 100, line[:200]
        counts[rank] += 1

    unisono.launch(floods, 2, on_line=count)
    assert counts == {0: 40_000, 1: 40_000}


def floods() -> None:
    rank = os.environ["UNISONO_RANK"]
    for _ in range(200):
        os.write(1, f"stdout of {rank} {'.' * 100}\n".encode() * 100)
        os.write(2, f"stderr of {rank} {'.' * 100}\n".encode() * 100)


def test_captured_output_is_on_the_exception(capsys: pytest.CaptureFixture[str]) -> None:
    error = failed(speaks_and_fails, 2, capture=True)
    assert capsys.readouterr().out == ""
    assert error.endings[1].stdout == "so far 1\n"
    assert error.endings[1].stderr == "so bad\n"
    assert "The end of rank 1's stderr:\n    so bad" in str(error)


def speaks_and_fails() -> None:
    comm = unisono.init()
    print("so far", comm.rank)
    print("so bad", file=sys.stderr)
    comm.barrier()
    if comm.rank == 1:
        raise ValueError("gone")
    comm.barrier()


def test_a_background_process_that_keeps_the_pipe_open_delays_nothing(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    start = time.monotonic()
    assert unisono.launch(leaves_a_child, 1, (str(note), False), capture=True) == ["done"]
    assert time.monotonic() - start < 20
    os.kill(int(note.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("plain", [False, True], ids=["in colour", "NO_COLOR"])
def test_on_a_terminal(program: WriteProgram, plain: bool) -> None:
    script = program("""
        import sys, time, unisono
        def work():
            print("question? ", end="", flush=True)
            time.sleep(0.6)  # long enough for it to be shown
            print("\\rprogress")
        unisono.launch(work, 1)
    """)
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm"} | ({"NO_COLOR": "1"} if plain else {})
    done = subprocess.Popen(
        [sys.executable, str(script.path)], stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    text = read_all(ours)
    assert done.wait(30) == 0, text
    prefix = "[rank 0] " if plain else "\x1b[36m[rank 0]\x1b[0m "
    assert text == f"{prefix}question? \r{prefix}progress\r\n"


def read_all(descriptor: int) -> str:
    data = b""
    with contextlib.suppress(OSError):  # how a terminal signals end of file
        while part := os.read(descriptor, 4096):
            data += part
    os.close(descriptor)
    return data.decode()


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_without_an_end_gives_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("unisono.launcher.output._PATIENCE_S", 0.0)
    terminal = Terminal()
    first, second = (Lines(rank, "stdout", terminal, 100) for rank in (0, 1))
    first.feed(b"10 %")
    first.tick()
    assert screen.getvalue() == "[rank 0] 10 %"
    second.feed("gr\u00fc".encode()[:-1])  # half a character
    second.feed("\u00fc".encode()[-1:] + b"n\nrot\n")
    first.feed(b" 20 %\r\n")
    first.feed(b"", last=True)
    assert screen.getvalue().splitlines() == [
        "[rank 0] 10 %",
        "[rank 1] gr\u00fcn",
        "[rank 1] rot",
        "[rank 0]  20 %",
    ]
    assert (first.tail, second.tail) == ("10 % 20 %\r\n", "gr\u00fcn\nrot\n")


def test_a_stream_that_cannot_write_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    unisono.launch(print, 1, ("\u00fc",))
    assert raw.getvalue() == b"[rank 0] \\xfc\n"


def test_kernels_and_sandboxes_that_lack_something(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(os, "memfd_create", refuse)
    assert unisono.launch(summed, 2, (10,), {"factor": 1.0}) == [(0, 21.0), (1, 21.0)]
    assert failed(one_is_killed, 2, signal.SIGKILL).first == 1


# -- threads and cores ---------------------------------------------------------------------------


def test_threads_fit_the_cores(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in share.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    ranks = 2
    fitting = str(max(1, share.core_count() // ranks))
    share._say_once.cache_clear()
    assert unisono.launch(thread_variables, ranks) == [[fitting] * 3] * ranks
    notice = f"unisono: 2 ranks share {share.core_count()} cores, so each gets {fitting} thread"
    assert (notice in capfd.readouterr().err) == (share.core_count() > 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(share, "core_count", lambda: 1)
        share.thread_variables(2, None, {})
    assert not capfd.readouterr().err  # as many as without unisono
    assert unisono.launch(thread_variables, 1, threads=7) == [["7"] * 3]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert unisono.launch(thread_variables, 2) == [["5", None, None]] * 2


def thread_variables() -> list[str | None]:
    return [os.environ.get(name) for name in share.THREAD_VARIABLES]


def test_ranks_reuse_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    reused = unisono.launch(count_faults, 1, threads=1)[0]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")  # the user's own setting wins
    returned = unisono.launch(count_faults, 1, threads=1)[0]
    assert reused * 5 < returned


def count_faults() -> int:
    """Page faults of buffers that are filled and freed, like every layer's buffers in FSDP2."""
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        b"x" * (1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_pinned_ranks_have_cores_of_their_own() -> None:
    ranks = len(share.cores())
    bound = unisono.launch(os.sched_getaffinity, ranks, (0,), pin=True)
    assert sorted(core for cores in bound for core in cores) == share.cores()
    assert share.pins(2 * ranks)[ranks] == (share.cores()[0],)


# -- what is refused -----------------------------------------------------------------------------


def test_bad_requests_are_one_sentence() -> None:
    lock = threading.Lock()
    refusals: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "ranks must be .* at least 1, not 0", lambda: unisono.launch(print, 0)),
        (ValueError, "at least 1, not 1.5", lambda: unisono.launch(print, 1.5)),  # type: ignore[arg-type]
        (TypeError, "needs a function, not a int", lambda: unisono.launch(3, 2)),  # type: ignore[arg-type]
        (ValueError, "timeout must", lambda: unisono.launch(print, 1, timeout=0)),
        (ValueError, "threads must", lambda: unisono.launch(print, 1, threads=0)),
        (
            TypeError,
            "function \\(its variable lock, a lock\\)",
            lambda: unisono.launch(lambda: lock, 2),
        ),
        (
            TypeError,
            "arguments \\(args\\[1\\], a lock\\)",
            lambda: unisono.launch(print, 2, (5, lock)),
        ),
        (
            TypeError,
            "args: launch\\(fn, 2, args=\\(5,\\)\\)",
            lambda: unisono.launch(print, 5, ranks=2),
        ),  # type: ignore[misc]
        (UnisonoError, "need at least .* of memory", lambda: unisono.launch(print, 10**9)),
    ]
    for kind, text, call in refusals:
        with pytest.raises(kind, match=text) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_too_many_open_files_is_one_sentence(program: WriteProgram) -> None:
    script = program("""
        import resource, unisono
        resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))
        try:
            unisono.launch(print, 20)
        except unisono.UnisonoError as error:
            print(error)
    """)
    assert "could not be started: Too many open files" in script.run().stdout


def test_ranks_cannot_launch_ranks() -> None:
    error = failed(unisono.launch, 2, print, 2)
    assert "this process is rank" in str(error)
    assert "ranks cannot launch ranks" in str(error)


def test_launch_works_in_another_thread() -> None:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(unisono.launch(os.getppid, 2)))
    thread.start()
    thread.join(60)
    assert results == [os.getpid()] * 2


def test_exceptions_survive_a_pickle() -> None:
    import pickle

    again = pickle.loads(pickle.dumps(RanksFailed("text", first=1)))
    assert (str(again), again.first) == ("text", 1)


def test_an_exception_has_no_other_fields_than_its_class() -> None:
    with pytest.raises(TypeError, match="RanksFailed has no field 'last'"):
        RanksFailed("text", last=1)


# -- on Ray: what needs no cluster; the rest is in test_on_ray.py ----------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"on": "slurm"}, 'on must be "ray", or None for this machine'),
        ({"resources": {"CPU": 2}}, "are for ranks on a cluster"),
        ({"on": "ray", "pin": True}, "cannot be pinned"),
        ({"on": "ray", "resources": {"GPU": 0}}, "positive amounts per rank, not GPU=0"),
    ],
)
def test_where_ranks_cannot_be_started(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        unisono.launch(os.getpid, 1, **options)


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if the module were not installed
    with pytest.raises(UnisonoError, match=r'needs Ray, .* run `pip install "unisono\[ray\]"`'):
        unisono.launch(os.getpid, 1, on="ray")
