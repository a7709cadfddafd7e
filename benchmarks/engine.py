"""The engine against Open MPI and gloo: `unisono bench` with its peers, and the goals.

    python benchmarks/engine.py                    2 ranks, everything, some minutes
    python benchmarks/engine.py --ranks 4 --quick --goals
    python benchmarks/engine.py --record           also write results, tables and plots
    python benchmarks/engine.py -- all_reduce --sizes 8:1M    arguments of `unisono bench`

If mpi4py and mpirun are missing, they are set up in build/peers. On a machine with more cores:

    for ranks in 4 8 16; do python benchmarks/engine.py --ranks $ranks --record; done
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import figures
import peers
import record

import unisono
from unisono.bench.results import read

sys.path.append(str(peers.REPOSITORY / "tests"))
from commit import commit

COLLECTIVES = ("all_reduce", *figures.MOVERS, "barrier", "ping_pong", "all_reduce_async")
SIZES = "8,64,1K,4K,16K,64K,256K,1M,4M,16M,64M,256M"
RESULTS = peers.REPOSITORY / "benchmarks" / "results"
NATIVE_PROGRAM = peers.REPOSITORY / "build" / "native" / "native_latency"


def machine_name(facts: dict[str, object], ranks: int) -> str:
    """A file name for results of a machine: "neoverse-n1-2-cores-2-ranks"."""
    text = f"{facts['processor']} {facts['cores']} cores {ranks} ranks".lower()
    text = re.sub(r"\((r|tm)\)|\bcpu\b|@.*?ghz|\bprocessor\b", " ", text)
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def bench(found: peers.Peers, arguments: Sequence[str], ranks: int, path: Path) -> int:
    """Run `unisono bench` on ranks of mpirun; it writes its JSON to `path`."""
    spins = ranks <= (os.cpu_count() or 1)  # more would only compete for the cores
    command = [*found.command(ranks, spins=spins), "-m", "unisono", "bench", *arguments]
    command += ["--backends", "unisono,mpi,gloo", "--json", str(path)]
    return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


def idle_percent(wait_s: float = 1.0) -> float:
    """How much of a core a rank uses while it waits in a barrier for one that sleeps."""

    def wait() -> float:
        comm = unisono.init()
        comm.barrier()
        if comm.rank:
            time.sleep(wait_s)
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        comm.barrier()
        return 100 * (time.process_time() - begin_cpu_s) / (time.perf_counter() - begin_s)

    return unisono.launch(wait, 2, threads=1)[0]


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer turns per row")
    parser.add_argument("--goals", action="store_true", help="say which goals are met or missed")
    parser.add_argument("--record", action="store_true", help="keep results, tables and plots")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all measurements")
    parser.add_argument("--native", action="store_true", help="also the engine's times inside C")
    parser.add_argument("--no-setup", action="store_true", help="install nothing")
    parser.add_argument("bench", nargs="*", help="arguments of `unisono bench`")
    options = parser.parse_args(arguments)
    asked = options.bench or [*COLLECTIVES, "--sizes", SIZES]
    asked = [*asked, "--budget", "0.5" if options.quick else "2.5"]
    try:
        found = peers.find()
        if found is None and options.no_setup:
            raise peers.PeersError("--no-setup, but mpi4py or mpirun is missing here")
        found = found or peers.set_up()
    except peers.PeersError as error:
        print(f"engine.py: {error}", file=sys.stderr)
        return 1
    at = commit()
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        path = Path(folder) / "run.json"
        status = bench(found, asked, options.ranks, path)
        if not path.exists():
            return status
        document = json.loads(path.read_text())
        document["versions"]["commit"] = at
        path.write_text(text := json.dumps(document, indent=1) + "\n")
        run = read(path)
    print(figures.summary(figures.Figures(run), idle_percent(), options.goals))
    if options.json:
        options.json.write_text(text)
    if options.record and run.finished and status == 0:
        (RESULTS / f"{machine_name(run.machine, options.ranks)}.json").write_text(text)
        record.write_all()
    if options.native:
        if not NATIVE_PROGRAM.exists():
            print(f"{NATIVE_PROGRAM} is not there: `make latency` builds it", file=sys.stderr)
            return 1
        print("\nall_reduce inside C (0 bytes: barrier): ranks, bytes, median ns", flush=True)
        subprocess.run([str(NATIVE_PROGRAM), str(options.ranks)], check=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
