"""How many Python functions of unisono a call passes through, and in how many files.

    python tools/call_counts.py              a table: calls and files, on each of two ranks
    python tools/call_counts.py --where      and which functions they are, on rank 0

Each row is the second of two identical calls, as the first one imports and connects. Two ranks on
one machine; only functions of files under src/unisono count, on the thread that makes the call.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import unisono

PACKAGE = str(Path(unisono.__file__).parent)


def count_calls(action: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """The functions of unisono that `action` calls: by file and name, how often."""
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls[code.co_filename[len(PACKAGE) + 1 :], code.co_qualname] += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def actions(comm: unisono.Communicator) -> dict[str, Callable[[], Any]]:
    """What is counted, by name."""
    import torch.distributed as dist

    from unisono.training import WeightReceiver, WeightSender

    model = torch.nn.Linear(8, 8)
    party = WeightReceiver(comm, model) if comm.rank else WeightSender(comm, model)
    x = torch.ones(8)
    return {
        "weight update": party.update,
        "broadcast, binomial": lambda: comm.broadcast(x, algorithm="binomial"),
        "dist.all_reduce, async": lambda: dist.all_reduce(x, async_op=True).wait(),
    }


def count_all() -> dict[str, Counter[tuple[str, str]]]:
    """One rank's counts."""
    counts = {}
    for name, action in actions(unisono.init()).items():
        action()
        counts[name] = count_calls(action)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--where", action="store_true", help="list the functions, on rank 0")
    where = parser.parse_args().where
    ranks = unisono.launch(count_all, 2)
    print(f"{'':24}" + "".join(f"{f'rank {rank}':>20}" for rank in range(len(ranks))))
    for name in ranks[0]:
        cells = [
            f"{c.total()} in {len({file for file, _ in c})} files" for c in (r[name] for r in ranks)
        ]
        print(f"{name:24}" + "".join(f"{cell:>20}" for cell in cells))
        if where:
            for (file, function), number in ranks[0][name].most_common():
                print(f"  {number:4}  {file}  {function}")


if __name__ == "__main__":
    main()
