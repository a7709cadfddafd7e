"""Data that is prepared once: rank 0 does the work, and the others wait for the result.

If rank 0 fails, no rank waits forever: rank 0 raises its error, and the others say that it failed.

    unisono run -n 4 examples/preprocess_once.py
"""

import json
import shutil
import tempfile
from pathlib import Path

import unisono
from unisono.training import main_process_first

TEXT = "to be or not to be"


def vocabulary(folder: Path, rank: int) -> list[str]:
    """Read from the cache, or computed and put there. Every rank runs the same code."""
    cache = folder / "vocabulary.json"
    with main_process_first():
        if not cache.exists():
            cache.write_text(json.dumps(sorted(set(TEXT.split()))))
            (folder / f"made by rank {rank}").touch()
    return json.loads(cache.read_text())


def what_a_failure_looks_like(rank: int) -> str:
    try:
        with main_process_first():
            raise ValueError("the corpus is damaged")
    except ValueError as error:
        assert rank == 0, "only rank 0 was to run the block"
        return f"ValueError: {error}"
    except unisono.UnisonoError as error:
        assert rank != 0, "rank 0 is to raise its own error"
        return f"UnisonoError: {error}"


def main() -> None:
    comm = unisono.init()
    folder = Path(unisono.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None))
    words = vocabulary(folder, comm.rank)
    assert words == ["be", "not", "or", "to"], f"rank {comm.rank} read {words}"
    makers = [path.name for path in folder.glob("made by *")]
    assert makers == ["made by rank 0"], f"the cache was {makers}"

    message = what_a_failure_looks_like(comm.rank)
    assert "the corpus is damaged" in message, f"rank {comm.rank} was told: {message}"
    everyone = unisono.gather_object(message)  # the group still works
    if comm.rank == 0:
        assert everyone is not None
        print(f"made once, read by {comm.size} ranks: {words}")
        for rank, text in enumerate(everyone):
            print(f"if rank 0 fails, rank {rank} gets {text}")
        shutil.rmtree(folder)
    unisono.shutdown()


if __name__ == "__main__":
    main()
