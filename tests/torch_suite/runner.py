"""Runs tests of the suite in this process, one after another, and tells how each ended.

Its arguments are a descriptor to write to and, as JSON, the tests to leave out and the part to
run. What it writes are lines of JSON: how many tests there are, then two a test.
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
        orders = json.loads(sys.argv[2])
        done = set(orders["done"])
        names = [name for name in suite.tests() if orders["only"] in name]
        names = names[orders["part"] :: orders["parts"]]
        tell(out, total=len(names))
        for name in names:
            if name not in done:
                tell(out, starts=name)
                lifted = gates.lifted(getattr(suite.Suite, name))
                tell(out, test=name, lifted=lifted, **run(name))


def tell(out: Any, **line: Any) -> None:
    out.write(json.dumps(line) + "\n")


def run(name: str) -> dict[str, Any]:
    """How one test ended: status, reason, detail and seconds."""
    why = gates.why_not(getattr(suite.Suite, name), name, suite.BACKEND)
    if why:
        return {"status": "skipped", "reason": why, "detail": "", "seconds": 0.0}
    start = time.monotonic()
    result = unittest.TestResult()
    suite.Suite(name).run(result)
    seconds = round(time.monotonic() - start, 2)
    for _, text in [*result.errors, *result.failures]:
        return {"status": "failed", "reason": gist(text), "detail": text, "seconds": seconds}
    for _, reason in result.skipped:
        return {"status": "skipped", "reason": reason, "detail": "", "seconds": seconds}
    return {"status": "passed", "reason": "", "detail": "", "seconds": seconds}


def gist(text: str) -> str:
    """The line of a traceback that says what was raised; the first where ranks raised several."""
    inner = text.split("and exception:\n", 1)[-1]
    raised = re.search(r"^(?!Traceback)[A-Za-z_][\w.]*(?::.*)?$", inner, re.MULTILINE)
    return raised.group(0)[:200] if raised else inner.strip().splitlines()[-1][:200]


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # whatever the suite has left behind shall not keep us
