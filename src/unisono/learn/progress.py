"""The reader's folder: the exercises as files, and which chapters are solved."""

import json
from dataclasses import dataclass
from pathlib import Path

from unisono.learn.chapters import Chapter


@dataclass(frozen=True)
class Progress:
    """What the reader has done so far, in `folder`."""

    folder: Path

    def file(self, chapter: Chapter) -> Path:
        return self.folder / f"chapter_{chapter.number:02}.py"

    def hand_out(self, chapter: Chapter) -> bool:
        """Write the exercise, unless there is such a file; returns whether it was written."""
        if self.file(chapter).exists():
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file(chapter).write_text(chapter.exercise, encoding="utf-8")
        return True

    def is_begun(self, chapter: Chapter) -> bool:
        """Whether there is an exercise that differs from what was handed out."""
        try:
            return self.file(chapter).read_bytes() != chapter.exercise.encode()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a folder, say, of which the check will tell
            return True

    @property
    def solved(self) -> set[int]:
        """The numbers of the chapters whose checks have passed; none if nobody can read them."""
        try:
            return {int(number) for number in json.loads(self._record.read_text(encoding="utf-8"))}
        except (OSError, ValueError, TypeError):
            return set()

    def note(self, chapter: Chapter, is_solved: bool) -> None:
        """Record whether a chapter is solved."""
        before = self.solved
        now = before | {chapter.number} if is_solved else before - {chapter.number}
        if now != before:
            self._record.write_text(json.dumps(sorted(now)) + "\n", encoding="utf-8")

    @property
    def _record(self) -> Path:
        return self.folder / ".solved.json"
