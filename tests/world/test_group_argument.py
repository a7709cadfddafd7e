"""What `group=` means: a Communicator, a torch process group or None."""

from typing import Any

import pytest
import torch.distributed as dist

import unisono
from unisono.world.world import resolve


def test_one_process_that_started_nothing_is_a_group_of_one() -> None:
    assert (resolve().rank, resolve().size) == (0, 1)


def test_a_launched_process_that_has_not_met_the_others_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(unisono.UnisonoError, match="one of 4 ranks"):
        resolve()


@pytest.mark.ranks(2)
def test_a_communicator_is_itself(comm: Any) -> None:
    assert resolve(comm) is comm


@pytest.mark.ranks(3)
def test_torch_groups_of_ours_unwrap(process_group: Any) -> None:
    assert resolve() is process_group.comm
    few = dist.new_group([0, 2])
    if process_group.rank() == 1:
        with pytest.raises(unisono.UnisonoError, match="member"):
            resolve(few)
    else:
        assert resolve(few).global_ranks == (0, 2)
