"""examples/parallel_gpt: in every layout its losses are those of one process."""

from __future__ import annotations

import importlib
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import RankPool
from unisono import ProcessGroupManager
from unisono.comm.communicator import Communicator
from unisono.comm.factory import alone

FOLDER = Path(__file__).parents[2] / "examples" / "parallel_gpt"
MODULES = ("layers", "model", "pipeline", "train")
TINY = {
    "width": 16,
    "layers": 4,
    "heads": 4,
    "positions": 8,
    "batch": 8,
    "micro_batches": 2,
    "learning_rate": 1e-2,
    "warm_up": 1,
}
STEPS = 3
REPRESENTATIVE = [
    {},
    {"tp": 2},
    {"cp": 2},
    {"pp": 2},
    {"dp": 2},
    {"tp": 2, "cp": 2},
    {"pp": 2, "dp": 2},
    {"cp": 2, "dp": 2},
    {"pp": 4},
    {"tp": 2, "cp": 2, "pp": 2},
]
ALL = [
    layout
    for sizes in itertools.product((1, 2, 4), repeat=4)
    for layout in [dict(zip(("tp", "cp", "pp", "dp"), sizes, strict=True))]
    if math.prod(sizes) in (4, 8)
]


@pytest.fixture
def example() -> Iterator[Any]:
    """The example's modules, which import each other by bare names, as in a script."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("train")
    finally:
        sys.path.remove(str(FOLDER))
        for name in MODULES:
            sys.modules.pop(name, None)


def named(layout: dict[str, int]) -> str:
    return " ".join(f"{axis}{size}" for axis, size in layout.items() if size > 1) or "alone"


def in_layouts(layouts: list[dict[str, int]], backend: str) -> Any:
    return pytest.mark.parametrize(
        "layout",
        [
            pytest.param(
                layout,
                marks=pytest.mark.ranks(math.prod(layout.values()), backend=backend),
                id=named(layout),
            )
            for layout in layouts
        ],
    )


def losses(example: Any, group: Any, layout: dict[str, int], **changes: Any) -> list[float]:
    config = example.Config(**{**TINY, **changes})
    sizes = {f"{axis}_size": size for axis, size in layout.items()}
    with ProcessGroupManager(**sizes, group=group) as manager:
        return list(example.train(config, manager, STEPS, dtype=torch.float64))


_alone: dict[tuple[tuple[str, Any], ...], list[float]] = {}


def losses_alone(example: Any, **changes: Any) -> list[float]:
    """The losses of one process, which every layout is compared with: computed once by each
    rank."""
    key = tuple(sorted(changes.items()))
    if key not in _alone:
        _alone[key] = losses(example, alone(), {}, **changes)
    return _alone[key]


def check(example: Any, group: Any, layout: dict[str, int], **changes: Any) -> None:
    alone = losses_alone(example, **changes)
    assert losses(example, group, layout, **changes) == pytest.approx(alone, rel=1e-9)


@in_layouts(REPRESENTATIVE, "unisono")
def test_losses_are_those_of_one_process(
    comm: Communicator, example: Any, layout: dict[str, int]
) -> None:
    check(example, comm, layout)


@in_layouts([{"tp": 2}, {"cp": 2, "pp": 2}], "gloo")
def test_on_gloo(process_group: Any, example: Any, layout: dict[str, int]) -> None:
    check(example, process_group, layout)


@in_layouts([{"cp": 2}, {"cp": 4}, {"tp": 2, "cp": 2}, {"cp": 4, "dp": 2}], "unisono")
def test_losses_where_ranks_of_cp_share_heads(
    comm: Communicator, example: Any, layout: dict[str, int]
) -> None:
    alone = losses_alone(example)
    assert losses(example, comm, layout, ulysses=2) == pytest.approx(alone, rel=1e-9)


def logits_and_losses(comm: Communicator, shards: int) -> list[bytes]:
    """Before training and after each step."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(FOLDER))
    train = importlib.import_module("train")
    tiny = train.Config(**TINY, shards=shards)
    wide = train.Config(layers=2, micro_batches=4, shards=shards)
    found = []
    for config, dtype in ((tiny, torch.float32), (wide, torch.float32), (tiny, torch.bfloat16)):
        like = torch.empty(0, dtype=dtype)
        with ProcessGroupManager(tp_size=comm.size, group=comm) as manager:
            stage = train.Stage(config, manager, train.Sequence(config, manager.cp), like)
            tokens = next(train.batches(config, like.device))[:, :-1]
            found.append(stage(tokens).detach().float().numpy().tobytes())
            losses = list(train.train(config, manager, STEPS, dtype=dtype))
            found.append(torch.tensor(losses).numpy().tobytes())
    return found


def test_virtual_shards_give_the_same_bits_at_any_tp(fresh_pool: RankPool) -> None:
    (alone,) = fresh_pool.run(logits_and_losses, 1, 4)
    for ranks in (2, 4):
        assert fresh_pool.run(logits_and_losses, ranks, 4) == [alone] * ranks
    assert fresh_pool.run(logits_and_losses, 2, 0)[0] != alone, "these inputs do not show the order"


@pytest.mark.slow
@in_layouts(ALL, "unisono")
def test_every_layout_of_4_and_8_ranks(
    comm: Communicator, example: Any, layout: dict[str, int]
) -> None:
    check(example, comm, layout)


WITH_EXPERTS = [
    {"ep": 2},
    {"ep": 4},
    {"tp": 2, "ep": 2},
    {"cp": 2, "ep": 2},
    {"pp": 2, "ep": 2},
    {"dp": 2, "ep": 2},
]


@pytest.mark.slow
@in_layouts(WITH_EXPERTS, "unisono")
def test_losses_with_experts_are_those_of_one_process(
    comm: Communicator, example: Any, layout: dict[str, int]
) -> None:
    check(example, comm, layout, experts=4)


@in_layouts([{"ep": 2}, {"tp": 2, "ep": 2}, {"pp": 2, "ep": 2}], "unisono")
def test_losses_with_experts_that_drop_tokens(
    comm: Communicator, example: Any, layout: dict[str, int]
) -> None:
    limited = {"experts": 4, "capacity_factor": 0.75}
    assert losses_alone(example, **limited) != losses_alone(example, experts=4)
    check(example, comm, layout, **limited)


@in_layouts([{"ep": 2}], "gloo")
def test_experts_on_gloo(process_group: Any, example: Any, layout: dict[str, int]) -> None:
    check(example, process_group, layout, experts=4)


@pytest.mark.ranks(4)
def test_more_micro_batches_than_stages_and_fewer(comm: Communicator, example: Any) -> None:
    alone = losses_alone(example)
    for micro_batches in (1, 8):
        got = losses(example, comm, {"pp": 4}, micro_batches=micro_batches)
        assert got == pytest.approx(alone, rel=1e-9)


@pytest.mark.ranks(2)
def test_it_learns(comm: Communicator, example: Any) -> None:
    config = example.Config(**TINY)
    with ProcessGroupManager(tp_size=2) as manager:
        found = list(example.train(config, manager, 25))
    assert sum(found[-5:]) / 5 < 0.75 * found[0]


@pytest.mark.ranks(4)
def test_layouts_that_do_not_fit(comm: Communicator, example: Any) -> None:
    with pytest.raises(ValueError, match=r"tp x ulysses 4 does not divide heads 6: .* 1, 2, 3, 6"):
        losses(example, comm, {"tp": 4}, heads=6)
    with pytest.raises(ValueError, match=r"ulysses 3 does not divide cp 4"):
        losses(example, comm, {"cp": 4}, heads=6, ulysses=3)
    with pytest.raises(ValueError, match=r"pp 4 does not divide layers 2"):
        losses(example, comm, {"pp": 4}, layers=2)
    with pytest.raises(ValueError, match=r"ep 4 does not divide experts 6: use ep 1, 2, 3, 6"):
        losses(example, comm, {"ep": 4}, experts=6)
    with pytest.raises(ValueError, match=r"What fits: "):
        losses(example, comm, {"tp": 2, "pp": 4})


def script(*arguments: str, ranks: int = 1) -> str:
    start = [] if ranks == 1 else ["-m", "unisono", "run", "-n", str(ranks)]
    done = subprocess.run(
        [sys.executable, *start, "train.py", *arguments],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_as_a_script() -> None:
    assert script("--steps", "1").startswith("step    1  loss 4.")


@pytest.mark.slow
def test_a_script_that_compares_itself_with_one_process() -> None:
    for layout in ("--cp 4 --ulysses 2", "--tp 2 --pp 2 --backend gloo"):
        printed = script(*layout.split(), "--steps", "2", "--compare", ranks=4)
        assert "losses of one process: 4." in printed


@pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a GPU and nccl"
)
def test_on_nccl_with_one_rank() -> None:
    first, *_, last = script("--backend", "nccl", "--steps", "50").splitlines()
    assert float(last.split()[3]) < float(first.split()[3]) - 1


def test_it_is_short() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in FOLDER.glob("*.py"))
    assert lines < 600
