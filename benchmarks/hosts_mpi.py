"""Open MPI over TCP between the same emulated hosts as benchmarks/hosts.py, which has the limits.

    sudo apt-get install openmpi-bin libopenmpi-dev          Debian's; any with mpirun and mpicc
    sudo python benchmarks/hosts_mpi.py                      2 hosts x 2 ranks in blocks, 1 Gbit/s
    sudo python benchmarks/hosts_mpi.py --rate 10 --against hosts.json

Collectives are MPI's own on floats, messages MPI_Send and MPI_Recv; ranks of one host share memory.
Ranks yield while they wait (mpi_yield_when_idle), because there may be more of them than cores.
Rounds, turns, roots and medians are those of hosts.py. --against takes the file of its --json, for
a column with unisono's times and their ratio to Open MPI's. Run both on the same machine, one after
the other, with nothing else running.
"""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hosts import HEADERS, PING_PONG, Setting, calls_of, describe_hosts, least_bytes, parser_of

SOURCE = Path(__file__).with_suffix(".c")
Key = tuple[str, int]
"""A call and its bytes."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--against", type=Path, help="what hosts.py --json has written")
    options = parser.parse_args()
    setting = Setting(
        hosts=options.hosts,
        ranks=options.ranks,
        placement=options.placement,
        rate_bits_per_s=int(options.rate * 1e9),
        sizes=tuple(options.sizes),
        collectives=tuple(options.collectives),
        rounds=options.rounds,
    )
    repeats = [measure(setting) for _ in range(options.repeats)]
    figures = {key: statistics.median(each[key] for each in repeats) for key in repeats[0]}
    ours = read_ours(options.against, setting) if options.against else {}
    show(setting, figures, ours)
    if options.json:
        rows = [[*key, ms] for key, ms in figures.items()]
        options.json.write_text(json.dumps({"openmpi_ms": rows}, indent=1) + "\n")


def why_not() -> str:
    """What is missing here; "" if nothing is."""
    missing = [tool for tool in ("mpirun", "mpicc") if shutil.which(tool) is None]
    how = ": apt-get install openmpi-bin libopenmpi-dev"
    return f"no {' and '.join(missing)}{how}" if missing else ""


def measure(setting: Setting) -> dict[Key, float]:
    """Make the hosts, run Open MPI's ranks there, and return their times in ms."""
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "hosts"))
    import namespaces
    from namespaces import Link, network

    if lack := namespaces.why_not() or why_not():
        sys.exit(f"left out: {lack}")
    with (
        tempfile.TemporaryDirectory() as folder,
        network(len(setting.counts), Link(setting.rate_bits_per_s)) as made,
    ):
        program, agent = Path(folder) / "hosts_mpi", Path(folder) / "agent"
        subprocess.run(["mpicc", "-O2", SOURCE, "-o", program], check=True)
        agent.write_text(write_agent({host.ipv4: host.pid for host in made.hosts}))
        agent.chmod(0o755)
        places = zip(made.hosts, setting.counts, strict=True)
        slots = ",".join(f"{host.ipv4}:{count}" for host, count in places)
        command = [
            *enter(made.hosts[0].pid),
            *("mpirun", "--allow-run-as-root", "--oversubscribe", "--host", slots),
            *("--map-by", "node" if setting.placement == "cyclic" else "slot"),
            *("--bind-to", "none", "--mca", "plm_rsh_agent", str(agent)),
            *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self,vader"),
            *("--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"),
            *("--mca", "mpi_yield_when_idle", "1"),
            *("-n", str(len(setting.placed())), str(program), *plan(setting)),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3600.0)
        if done.returncode:
            sys.exit(f"Open MPI failed:\n{done.stdout}")
    lines = [line.split() for line in done.stdout.splitlines()]
    return {(name, int(size_bytes)): float(ms) for name, size_bytes, ms in lines}


def plan(setting: Setting) -> list[str]:
    """What the program has to measure."""
    words = [str(setting.mate)]
    for name in setting.collectives:
        for size_bytes in setting.sizes_of(name):
            rounds, calls = setting.rounds_of(size_bytes), calls_of(size_bytes)
            words += [name, str(size_bytes), str(rounds), str(calls)]
    return words


def enter(pid: int) -> list[str]:
    """Runs a command on the host of this process, but as a process of this machine: mpirun must
    also find the other hosts' processes."""
    return ["nsenter", "-t", str(pid), "--net", "--ipc", "--uts"]


def write_agent(hosts: dict[str, int]) -> str:
    """In place of ssh: agent HOST COMMAND..."""
    cases = "".join(f"{name}) enter='{shlex.join(enter(pid))}';;\n" for name, pid in hosts.items())
    return f'#!/bin/sh\nhost=$1\nshift\ncase $host in\n{cases}esac\nexec $enter sh -c "$*"\n'


def read_ours(file: Path, setting: Setting) -> dict[Key, float]:
    """unisono's times, if they are of the same hosts."""
    data: dict[str, Any] = json.loads(file.read_text())
    theirs = data["setting"]
    for name in ("hosts", "ranks", "placement", "rate_bits_per_s"):
        if theirs[name] != getattr(setting, name):
            sys.exit(f"{file} is of other hosts: {name} is {theirs[name]}")
    return {
        (figure["what"], figure["size_bytes"]): figure["milliseconds"]["unisono"]
        for figure in data["figures"]
    }


def show(setting: Setting, figures: dict[Key, float], ours: dict[Key, float]) -> None:
    """A table in Markdown."""
    rate = setting.rate_bits_per_s
    print(f"\n{describe_hosts(setting)}, {rate / 1e9:g} Gbit/s, Open MPI over TCP\n")
    print(
        "| | bytes | limit ms | Open MPI ms | unisono ms | / Open MPI |\n|---|---|---|---|---|---|"
    )
    for (name, size_bytes), ms in figures.items():
        trips = 2 if name == PING_PONG else 1
        limit_ms = 8000 * trips * least_bytes(name, size_bytes, setting) * HEADERS / rate
        own = ours.get((name, size_bytes))
        cells = [name, f"{size_bytes:,}", f"{limit_ms:.3g}", f"{ms:.3g}"]
        cells += [f"{own:.3g}", f"{own / ms:.2f}"] if own else ["-", "-"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
