"""Runs tests of the suite in this process, one after another, and reports each result.

Its arguments are a descriptor to write to and, as JSON, the tests to leave out and the part to
run. What it writes are lines of JSON: how many tests there are, then two per test.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import unittest
from typing import Any

from torch_suite import gates, suite


def main() -> None:
    with open(int(sys.argv[1]), "w", buffering=1) as out:
        instructions = json.loads(sys.argv[2])
        done = set(instructions["done"])
        names = [name for name in suite.tests() if instructions["only"] in name]
        names = names[instructions["part"] :: instructions["parts"]]
        write_line(out, total=len(names))
        for name in names:
            if name not in done:
                write_line(out, starts=name)
                lifted = gates.lifted(getattr(suite.Suite, name))
                write_line(out, test=name, lifted=lifted, **run(name))


def write_line(out: Any, **line: Any) -> None:
    out.write(json.dumps(line) + "\n")


def run(name: str) -> dict[str, Any]:
    """The result of one test, as the fields of a Result."""
    why = gates.why_not(getattr(suite.Suite, name), name, suite.BACKEND)
    if why:
        return {"status": "skipped", "reason": why}
    start = time.monotonic()
    result = unittest.TestResult()
    suite.Suite(name).run(result)
    seconds = round(time.monotonic() - start, 2)
    for _, text in [*result.errors, *result.failures]:
        return {"status": "failed", "reason": gist(text), "detail": text, "seconds": seconds}
    for _, reason in result.skipped:
        return {"status": "skipped", "reason": reason, "seconds": seconds}
    return {"status": "passed", "seconds": seconds}


def gist(text: str) -> str:
    """The line of a traceback that says what was raised; the first if ranks raised several."""
    inner = text.split("and exception:\n", 1)[-1]
    raised = re.search(r"^(?!Traceback)[A-Za-z_][\w.]*(?::.*)?$", inner, re.MULTILINE)
    return raised.group(0)[:200] if raised else inner.strip().splitlines()[-1][:200]


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # anything that the suite has left behind must not block the exit
