"""How long after SIGKILL the kernel shows that a process has ended, by the memory it had.

    python benchmarks/deaths.py                      half a minute
    python benchmarks/deaths.py --sizes 10M 8G --turns 20 --busy 2

No program can hear of a death sooner than its pidfd says so: the kernel first frees the memory,
page by page. The process has written to all of it, and does nothing when it is killed. "busy"
processes compute meanwhile, on the same cores.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from weights import parse_bytes

HOLDER = """
import mmap, sys
memory = mmap.mmap(-1, int(sys.argv[1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(memory), 4096):
    memory[at] = 1
print(flush=True)
sys.stdin.read()
"""
BUSY = "while True: pass"


def seconds_to_see(size: int) -> float:
    command = [sys.executable, "-c", HOLDER, str(size)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pidfd = os.pidfd_open(process.pid)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        began_s = time.perf_counter()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll.poll()
        took_s = time.perf_counter() - began_s
        os.close(pidfd)
    return took_s


def main(arguments: Sequence[str]) -> int:
    what, _, how = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=what, epilog=how, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [parse_bytes(text) for text in ("10MB", "400MB", "800MB", "1.6GB")]
    parser.add_argument("--sizes", type=parse_bytes, nargs="+", default=sizes)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--busy", type=int, default=0, help="processes that compute meanwhile")
    options = parser.parse_args(arguments)
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(options.busy)]
    try:
        taken = [[seconds_to_see(size) for size in options.sizes] for _ in range(options.turns)]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"{os.cpu_count()} cores, {options.busy} busy processes, ms of {options.turns} deaths")
    for size, each_s in zip(options.sizes, zip(*taken, strict=True), strict=True):
        median_s, worst_s = statistics.median(each_s), max(each_s)
        print(f"  {size / 1e6:8,.0f} MB  median {1e3 * median_s:6.1f}  worst {1e3 * worst_s:6.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
