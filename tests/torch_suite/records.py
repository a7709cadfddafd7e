"""How tests ended, kept in a file under build/ so that a run that was cut off can go on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path("build/conformance")


@dataclass(frozen=True)
class Result:
    """How one test ended: "passed", "failed" or "skipped", with a line of why and a traceback."""

    test: str
    status: str
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """The suite on one backend with so many ranks."""

    backend: str
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.backend} on {self.ranks} ranks"

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.backend}-{self.ranks}.jsonl"

    @property
    def log(self) -> Path:
        """What the ranks write."""
        return FOLDER / f"{self.backend}-{self.ranks}.log"

    def results(self) -> dict[str, Result]:
        """What is known, by the test's name. A line that was cut off counts as not written."""
        known = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    result = Result(**json.loads(line))
                    known[result.test] = result
        return known

    def keep(self, result: Result) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def forget(self, status: str = "") -> None:
        """Drop all results, or those of one status."""
        kept = [result for result in self.results().values() if status and result.status != status]
        self.path.unlink(missing_ok=True)
        for result in kept:
            self.keep(result)
