"""From results to docs/conformance.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch_suite.records import Job, Result

PAGE = Path("docs/conformance.md")
STATUSES = ("passed", "failed", "skipped")
Results = dict[Job, dict[str, Result]]

_INTRODUCTION = """\
# torch's own suite on unisono

torch ships the tests of its own backends
(`torch/testing/_internal/distributed/distributed_test.py`). `make conformance` runs them on unisono
and gloo, with 3 and with 4 ranks, on unisono also with 2 hosts of 2 ranks. Once all have results,
it writes this page.

<!-- not run: takes minutes to hours -->
```sh
make conformance                        # everything; continues an interrupted run
make conformance SUITE="--again"        # forget all results and start again
make conformance SUITE="--retry"        # forget only the failures
make conformance SUITE="--backend unisono --ranks 3 --only all_to_all"
make conformance SUITE="--hosts 2"      # ranks 0 and 1 on one host, 2 and 3 on another
make conformance SUITE="--part 2/5"     # the second of five parts
```

The results are in build/conformance, one line per test, with a log of the ranks' output. They stay
when unisono changes: use `--again`.

The run differs from torch's own in these points:

- Tests that torch restricts to the name gloo (timeouts, batches of messages, coalesced and sparse
  all_reduce, scatter_object_list) or mpi (all_to_all of CPU tensors) run on every backend.
- Tests of accumulated gradients create a CPU model only for the name gloo; they see that name.
- `skip_if_small_worldsize`, which skips tests with fewer than 8 ranks, is off.
- A test passes only if every rank exits cleanly; torch checks rank 0.
- torch's tests check profiles only on backends that they know; unisono's profiles are tested in
  tests/torch_backend/test_features_torch_keeps_to_gloo.py.
- Tests that need a GPU are skipped before ranks start; ranks are forked, not spawned.
- Hosts are simulated: UNISONO_HOSTID tells each rank which one it is on. Ranks of different hosts
  share no memory and communicate by UCX over the loopback interface. Each test first checks this.
"""


def write(results: Results, torch_version: str) -> None:
    """Write the page."""
    PAGE.write_text("\n".join(_lines(results, torch_version)) + "\n")


def counts(results: Results) -> list[str]:
    """The table of how many passed, failed and were skipped."""
    rows = [
        (status, *(_count(known.values(), status) for known in results.values()))
        for status in STATUSES
    ]
    return _table(("", *(job.name for job in results)), rows)


def _lines(results: Results, torch_version: str) -> Iterable[str]:
    yield _INTRODUCTION
    yield f"## Results with torch {torch_version}\n"
    yield from counts(results)
    yield f"| commit | {' | '.join(map(_commits, results.values()))} |"
    yield "\n## Failures\n"
    yield from _failures(results) or ["None."]
    yield "\n## Skipped on unisono, passed on gloo\n"
    yield from _wanting(results) or ["None."]
    yield "\n## Reasons for skips\n"
    yield from _table(("reason", *(job.name for job in results)), _skips(results))


def _commits(known: dict[str, Result]) -> str:
    return ", ".join(sorted({result.commit for result in known.values()}))


def _failures(results: Results) -> list[str]:
    return [
        f"- {job.name}: `{result.test}`: {result.reason}{_lifted(result)}"
        for job, known in results.items()
        for result in known.values()
        if result.status == "failed"
    ]


def _lifted(result: Result) -> str:
    return f" (torch itself does not run it there: {result.lifted})" if result.lifted else ""


def _wanting(results: Results) -> list[str]:
    passed = {
        (job.ranks, result.test)
        for job, known in results.items()
        for result in known.values()
        if job.backend == "gloo" and result.status == "passed"
    }
    tests: dict[str, list[str]] = defaultdict(list)
    for job, known in results.items():
        for result in known.values():
            name = f"`{result.test}`"
            missing = result.status == "skipped" and (job.ranks, result.test) in passed
            if job.backend != "gloo" and missing and name not in tests[result.reason]:
                tests[result.reason].append(name)
    return [f"- {reason}: {', '.join(names)}" for reason, names in tests.items() if names]


def _skips(results: Results) -> list[tuple[str | int, ...]]:
    columns = [
        Counter(
            _plain(result.reason, job) for result in known.values() if result.status == "skipped"
        )
        for job, known in results.items()
    ]
    total: Counter[str] = sum(columns, Counter())
    return [(reason, *(column[reason] for column in columns)) for reason, _ in total.most_common()]


def _plain(reason: str, job: Job) -> str:
    """A reason without the names of the backends."""
    reason = reason.replace(f"requires backend {job.backend} ", "requires the backend ")
    return "disabled by torch, with a link to an issue" if "disabled by torch" in reason else reason


def _count(results: Iterable[Result], status: str) -> int:
    return sum(result.status == status for result in results)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str | int]]) -> list[str]:
    lines = [heads, ["---", *("---:" for _ in heads[1:])], *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]
