"""What a run that fails says: the answer first, little on a terminal, all of it in a file."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.watch import Report
from user_programs import Program, WriteProgram, plain_environment

RUN = ("-m", "unisono", "run")
MOST_LINES = 13
"""A headline, ten lines of evidence, what to do, the path of the full report."""

MISMATCH = """
    import numpy, unisono
    comm = unisono.init()
    comm.all_reduce(numpy.ones(5 + (comm.rank == 1)))
"""
RAISES = """
    import unisono
    comm = unisono.init()
    comm.barrier()
    if comm.rank == 2:
        raise LookupError("no such luck")
    comm.barrier()
"""


def on_terminal(script: Program, *options: str) -> list[str]:
    """The last paragraphs that a run writes to a terminal, from the launcher's own on."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *RUN, "-n", "3", *options, str(script.path)],
        env=plain_environment() | {"NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        cwd=script.path.parent,
    )
    script.started.append(process)  # type: ignore[arg-type]
    os.close(theirs)
    said = bytearray()
    try:
        while data := os.read(ours, 1 << 16):
            said += data
    except OSError:  # as a terminal says that it is closed
        pass
    os.close(ours)
    process.wait()
    lines = said.decode().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("unisono run: "))
    return lines[start:]


def full_report(lines: list[str]) -> str:
    """The file that they name last."""
    *_, path = re.findall("the full report: (.*)", "\n".join(lines))
    return Path(path).read_text()


@pytest.mark.provokes
@pytest.mark.parametrize("options", [(), ("--watch",)])
def test_a_terminal_shows_the_answer_and_a_file_has_the_rest(
    program: WriteProgram, options: tuple[str, ...]
) -> None:
    lines = on_terminal(program(MISMATCH), *options)
    assert lines[0].startswith("unisono run: rank 1 made a different call than the others"), lines
    assert "  rank 1: all_reduce of float64, 6 elements, sum at program.py:4 in <module>" in lines
    assert len(lines) <= MOST_LINES
    report = full_report(lines)
    assert "Traceback" not in "\n".join(lines)
    assert report.startswith(f"{lines[0]}\n")
    assert report.count("Traceback") == 2


def test_an_exception_of_the_program_keeps_its_traceback_on_a_terminal(
    program: WriteProgram,
) -> None:
    other = Path(os.environ["UNISONO_WATCH_FOLDER"], "seen-mismatch-1-1.json")  # another job's
    Report("mismatch", "rank 0 differs", "world", "gloo").save(other)
    os.utime(other, (2**32, 2**32))
    lines = on_terminal(program(RAISES))
    other.unlink()
    headline = "rank 2 failed first, of 3 ranks: LookupError: no such luck (program.py:6)"
    assert lines[0] == f"unisono run: {headline}"
    assert "  ranks 0 and 1 raised PeerLost at program.py:7 in <module>" in lines
    assert lines[-1] == "LookupError: no such luck"
    assert lines.count("Traceback (most recent call last):") == 1
    assert full_report(lines).count("Traceback") == 2


def test_without_a_terminal_the_answer_comes_first_and_last(program: WriteProgram) -> None:
    deep = ["def g0():\n    raise LookupError('deep')"]
    deep += [f"def g{n}():\n    g{n - 1}()" for n in range(1, 20)]
    script = program("\n".join([*deep, "g19()\n"]))
    done = script.run(before=(*RUN, "-n", "1"))
    lines = done.stderr.strip().splitlines()
    assert lines[0].startswith("unisono run: rank 0 failed first, of 1 rank: LookupError: deep")
    assert lines[-1] == lines[0]
    assert "Traceback (most recent call last):" in done.stderr
    full_report(lines)


@pytest.mark.slow
@pytest.mark.provokes
def test_the_last_headline_does_not_blame_a_healthy_rank_that_gloo_has_ended(
    program: WriteProgram,
) -> None:
    done = program("""
        import os, threading
        import torch, torch.distributed as dist
        from unisono import watch
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        def abort():  # as gloo does, but not before the watch has seen the calls
            while not watch.reports():
                pass
            os.abort()
        if rank == 2:
            threading.Thread(target=abort, daemon=True).start()
        if rank == 1:
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(4))
        threading.Event().wait()
    """).run(before=(*RUN, "-n", "3", "--watch"))
    assert done.returncode == 128 + signal.SIGABRT, done.stderr
    headline = done.stderr.partition("unisono run: ")[2].splitlines()[0]
    assert headline.startswith("rank 1 called barrier at program.py:"), done.stderr
    assert "failed first" not in done.stderr
    full_report(done.stderr.splitlines())


@pytest.mark.provokes
def test_a_mismatch_is_shown_when_it_happens(program: WriteProgram, tmp_path: Path) -> None:
    script = program("""
        import os, time, numpy, unisono
        comm = unisono.init()
        try:
            comm.all_reduce(numpy.ones(5 + (comm.rank == 1)))
        finally:
            while not os.path.exists("shown"):
                time.sleep(0.01)
    """)
    process = script.start(before=(*RUN, "-n", "3", "--watch"))
    assert process.stderr is not None
    line = next(line for line in process.stderr if "unisono.watch: " in line)
    assert "rank 1 made a different call than the others" in line
    (tmp_path / "shown").touch()
    rest = process.communicate()[1]
    assert "unisono.watch: " not in rest.partition("unisono run: ")[0], "once is enough"
    full_report(rest.splitlines())


@pytest.mark.slow
@pytest.mark.provokes
def test_a_run_with_a_proof_ends_with_the_finding(program: WriteProgram) -> None:
    script = program("""
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group()
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 1))
        rate = 0.1 if dist.get_rank() else 0.2
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for step in range(3):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        dist.destroy_process_group()
    """)
    done = script.run(before=(*RUN, "-n", "3", "--sanitize"))
    assert done.returncode == 3, done.stderr
    lines = done.stderr.partition("unisono run: ")[2].splitlines()
    assert lines[0].startswith("learning rate of rank 0 differs from the others' since step ")
    assert "program.py:8" in lines[0]
    assert "failed first" not in done.stderr
    full_report(lines)
