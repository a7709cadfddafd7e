"""`make conformance`: run the suite on each backend, and write the results."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from commit import commit
from torch_suite import page
from torch_suite.records import FOLDER, TORCH, Job, Result

BACKENDS, RANKS, HOSTS = ("gloo", "unisono"), (3, 4), (1, 2)
"""What the page shows."""
TEST_LIMIT_S = 120
"""The timeout of a test in torch's suite."""
SILENCE_LIMIT_S = TEST_LIMIT_S + 60
"""After this long without a line, the process that runs the tests is ended."""


def main() -> int:
    options = _options()
    FOLDER.mkdir(parents=True, exist_ok=True)
    jobs = _jobs(options.backend, options.ranks, options.hosts)
    for job in jobs:
        job.mend()
        if options.again or options.retry:
            job.forget("" if options.again else "failed")
        _run(job, options)
    every = _jobs(BACKENDS, RANKS, HOSTS)
    results = {job: known for job in every if (known := job.results())}
    missing = [job.name for job in every if job not in results]
    if missing:
        print(f"{page.PAGE} stays as it is: no results of {', '.join(missing)}")
    elif not options.only:
        page.write(results, TORCH)
    print("\n".join(page.counts(results)))
    failed = [
        job.name for job in jobs if "failed" in {result.status for result in job.results().values()}
    ]
    return 1 if "unisono" in " ".join(failed) else 0


def _jobs(backends: Sequence[str], ranks: Sequence[int], hosts: Sequence[int]) -> list[Job]:
    """Every useful combination: several hosts make a difference only on unisono."""
    return [
        Job(backend, size, count)
        for backend in backends
        for count in hosts
        for size in ranks
        if count == 1 or (backend == "unisono" and size % count == 0)
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make conformance", description=__doc__)
    parser.add_argument("--backend", nargs="+", default=BACKENDS)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument(
        "--hosts", nargs="+", type=int, default=HOSTS, help="unisono's ranks on so many hosts"
    )
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="one part of N")
    parser.add_argument("--only", default="", metavar="TEXT", help="tests with TEXT in their name")
    parser.add_argument("--again", action="store_true", help="forget all results first")
    parser.add_argument("--retry", action="store_true", help="forget failures first")
    return parser.parse_args()


def _part(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError(text)
    return part, parts


def _run(job: Job, options: argparse.Namespace) -> None:
    """Run the tests that have no result yet, in as many runners as needed."""
    finished, at = False, commit()
    while not finished:
        finished, started, total = True, "", 0
        for line in _lines(job, options):
            if "total" in line:
                total = line["total"]
            elif "starts" in line:
                finished, started = False, line["starts"]
            else:
                finished = True
                _keep(job, Result(**line, commit=at), total)
        if not finished:
            crash = Result(started, "failed", "the suite crashed or hung", commit=at)
            _keep(job, crash, total)


def _keep(job: Job, result: Result, total: int) -> None:
    job.keep(result)
    if result.status != "skipped" or result.seconds:
        progress = f"{job.name}  {len(job.results())}/{total}"
        print(f"{progress}  {result.status} {result.seconds:5.1f} s  {result.test}", flush=True)
        if result.status == "failed":
            print(f"    {result.reason}", flush=True)


def _lines(job: Job, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start a runner and yield its output; end it, with its ranks, when it falls silent."""
    part, parts = options.part
    done = list(job.results())
    instructions = {"done": done, "only": options.only, "part": part - 1, "parts": parts}
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", "torch_suite.runner", str(theirs), json.dumps(instructions)]
    with (
        tempfile.TemporaryDirectory() as scratch,  # torch's tests leave files behind
        job.log.open("ab") as log,
        open(ours, "rb", buffering=0) as pipe,
    ):
        runner = subprocess.Popen(
            command,
            env=os.environ | _environment(job) | {"TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[theirs],
            start_new_session=True,
        )
        os.close(theirs)
        try:
            unread = b""
            while select.select([pipe], [], [], SILENCE_LIMIT_S)[0]:
                piece = pipe.read(1 << 16)
                if not piece:
                    break
                *lines, unread = (unread + piece).split(b"\n")
                yield from map(json.loads, lines)
        finally:
            os.killpg(runner.pid, signal.SIGKILL)
            runner.wait()


def _environment(job: Job) -> dict[str, str]:
    return {
        "BACKEND": job.backend,
        "WORLD_SIZE": str(job.ranks),
        "HOSTS": str(job.hosts),
        "INIT_METHOD": "file://",  # as torch's own suite is run; each test creates its own
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_LIMIT_S),
    }


if __name__ == "__main__":
    sys.exit(main())
