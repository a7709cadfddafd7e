"""A checkpoint that rank 0 writes and that all ranks can rely on afterwards.

The file gets its name only when it is complete. After the barrier every rank can load it. If the
disk is full, rank 0 never reaches the barrier, and the others only learn that it is gone.
main_process_first tells them why, and the program can go on.

    unisono run -n 4 examples/checkpoint.py
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

import unisono
from unisono.training import main_process_first


def save(state: dict[str, torch.Tensor], path: Path) -> None:
    """On rank 0; returns on every rank once the file is there. Raises on every rank if not."""
    with main_process_first():
        if unisono.is_main_process():
            partial = path.with_suffix(".partial")
            torch.save(state, partial)
            os.replace(partial, path)


def save_simply(state: dict[str, torch.Tensor], path: Path) -> None:
    """The same for disks that never fail."""
    if unisono.is_main_process():
        torch.save(state, path)
    unisono.barrier()


def check_loaded(path: Path, expected: dict[str, torch.Tensor], rank: int) -> None:
    loaded = torch.load(path)
    same = all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert same, f"rank {rank} loaded something else from {path.name}"


def main() -> None:
    comm = unisono.init()
    folder = Path(unisono.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None))
    torch.manual_seed(0)
    state = nn.Linear(20, 20).state_dict()

    for how in (save, save_simply):
        path = folder / f"{how.__name__}.pt"
        how(state, path)
        check_loaded(path, state, comm.rank)

    try:
        save(state, folder / "no such folder" / "model.pt")
    except (OSError, RuntimeError) as error:  # rank 0 its own, the others UnisonoError
        message = str(error)
    else:
        raise AssertionError(f"rank {comm.rank} believes in a checkpoint that is not there")
    assert "no such folder" in message, f"rank {comm.rank} was told: {message}"
    unisono.barrier()  # all have read it; the group still works
    if comm.rank == 0:
        print(f"{comm.size} ranks loaded what rank 0 saved, and heard of it when it could not")
        shutil.rmtree(folder)
    unisono.shutdown()


if __name__ == "__main__":
    main()
