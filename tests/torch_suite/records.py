"""Test results, kept in a file under build/ so that an interrupted run can continue."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import asdict, dataclass
from pathlib import Path

TORCH = importlib.metadata.version("torch").split("+")[0]
FOLDER = Path(f"build/conformance/torch-{TORCH}")


@dataclass(frozen=True)
class Result:
    """The result of a test: "passed", "failed" or "skipped", with a one-line reason and a
    traceback.

    `lifted` is why torch itself would not have run it on this backend; `commit` is unisono's.
    """

    test: str
    status: str
    reason: str = ""
    detail: str = ""
    seconds: float = 0.0
    lifted: str = ""
    commit: str = ""


@dataclass(frozen=True)
class Job:
    """The suite on one backend with some number of ranks, in blocks on some number of hosts."""

    backend: str
    ranks: int
    hosts: int = 1

    @property
    def name(self) -> str:
        if self.hosts == 1:
            return f"{self.backend} on {self.ranks} ranks"
        return f"{self.backend} on {self.hosts} hosts of {self.ranks // self.hosts} ranks"

    @property
    def path(self) -> Path:
        return FOLDER / f"{self._stem}.jsonl"

    @property
    def log(self) -> Path:
        """The ranks' output."""
        return FOLDER / f"{self._stem}.log"

    @property
    def _stem(self) -> str:
        return f"{self.backend}-{self.ranks}" + ("" if self.hosts == 1 else f"-hosts{self.hosts}")

    def results(self) -> dict[str, Result]:
        """The known results, by test name."""
        if not self.path.exists():
            return {}
        lines = self.path.read_text().splitlines()
        return {result.test: result for result in (Result(**json.loads(line)) for line in lines)}

    def keep(self, result: Result) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def mend(self) -> None:
        """Drop an incomplete last line."""
        if self.path.exists():
            whole, _, _ = self.path.read_text().rpartition("\n")
            self.path.write_text(whole + "\n" if whole else "")

    def forget(self, status: str = "") -> None:
        """Drop all results, or those of one status."""
        kept = [result for result in self.results().values() if status and result.status != status]
        self.path.unlink(missing_ok=True)
        for result in kept:
            self.keep(result)
