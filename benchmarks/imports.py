"""What unisono costs if it is installed but not used: in `import torch`, and in pytest's start.

    python benchmarks/imports.py
    python benchmarks/imports.py --times 31 --json imports.json

torch calls unisono's entry point at the end of `import torch`, and pytest loads its plugin, in
every program and project of the environment. Each is started with and without it in turn
(`TORCH_DEVICE_BACKEND_AUTOLOAD=0`, `-p no:unisono`). The figures are CPU times, which other
programs disturb little: medians, and the median difference of neighbours. Exits with 1 if unisono
adds more than LIMITS_MS allows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile

LIMITS_MS = {"import torch": 5.0, "pytest": 30.0}
COMMANDS = {
    "import torch": (["-c", "import torch"], ["-c", "import torch"]),
    "pytest": (["-m", "pytest", "-q"], ["-m", "pytest", "-q", "-p", "no:unisono"]),
}
"""With unisono, and without it."""
WITHOUT = {"import torch": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "pytest": {}}


def cpu_ms(arguments: list[str], environment: dict[str, str], folder: str) -> float:
    """The CPU time of a process and what it has started."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": ""} | environment,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        check=False,  # pytest finds no test
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)


def measure(what: str, times: int) -> dict[str, float]:
    """Medians in milliseconds: with unisono, without, and the difference."""
    with_it, without = COMMANDS[what]
    pairs: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="unisono-imports-") as folder:
        pairs += [
            (cpu_ms(with_it, {}, folder), cpu_ms(without, WITHOUT[what], folder))
            for _ in range(times + 1)
        ]
    pairs = pairs[1:]  # the first one reads files from disk
    return {
        "with": statistics.median(pair[0] for pair in pairs),
        "without": statistics.median(pair[1] for pair in pairs),
        "more": statistics.median(pair[0] - pair[1] for pair in pairs),
        "limit": LIMITS_MS[what],
    }


def main() -> None:
    """Print the table; exit with 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=15, help="pairs of starts of each")
    parser.add_argument("--json", help="also write the figures to this file")
    options = parser.parse_args()
    found = {what: measure(what, options.times) for what in COMMANDS}
    print("| ms of CPU time | with unisono | without | more | at most |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for what, ms in found.items():
        print(
            f"| {what} | {ms['with']:.0f} | {ms['without']:.0f} | {ms['more']:.1f} | "
            f"{ms['limit']:.0f} |"
        )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    sys.exit(any(ms["more"] > ms["limit"] for ms in found.values()))


if __name__ == "__main__":
    main()
