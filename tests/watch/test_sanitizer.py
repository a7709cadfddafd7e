"""The sanitizer: what it proves, and correct programs in which it must find nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from torch_names import since_2_13
from unisono import watch
from unisono.comm.communicator import Communicator
from unisono.training import GradientSync
from unisono.watch.report import Report
from unisono.watch.sanitizer.exchange import Exchange
from unisono.watch.sanitizer.replicas import fingerprint
from unisono.watch.sanitizer.verdicts import Judgement
from user_programs import WriteProgram


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128])
@pytest.mark.parametrize("rows", [70, 7000])
def test_a_fingerprint_knows_every_bit(dtype: torch.dtype, rows: int) -> None:
    tensor = (torch.randn(rows, 61) > 0).to(dtype)
    same = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == same
    assert fingerprint(tensor.t().contiguous().t()) == same  # in any memory layout
    for place in (0, 61, rows * 61 - 1):
        other = tensor.clone().view(-1)
        other[place] = 1 - int(other[place].real)
        assert fingerprint(other) != same
    assert fingerprint(torch.arange(5)) != fingerprint(torch.arange(5).flip(0))
    assert fingerprint(torch.empty(0, dtype=dtype)) == 0


# -- correct programs, in which a proof fails the test ---------------------------------------------


def train(model: Any, optimizer: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()


def seed_apart() -> None:
    torch.manual_seed(100 + dist.get_rank())


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.ranks(2, sanitize=True)
def test_ddp_with_statistics(process_group: Any, make: Any) -> None:
    model = DistributedDataParallel(small())
    seed_apart()
    train(model, make(model.parameters(), lr=0.01))


@pytest.mark.ranks(2, backend="gloo", sanitize=True)
def test_ddp_that_accumulates_clips_and_schedules(process_group: Any) -> None:
    model = DistributedDataParallel(small(), gradient_as_bucket_view=True)
    seed_apart()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for _ in range(4):
        for last in (False, False, True):
            with contextlib.nullcontext() if last else model.no_sync():
                model(torch.randn(8, 4)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        scheduler.step()


class Branches(torch.nn.Module):
    """Ranks use different layers, and two layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.layers[dist.get_rank() % 2]
        return torch.as_tensor(self.layers[2](chosen(x)))


@pytest.mark.ranks(2, sanitize=True)
def test_unused_and_tied_parameters(process_group: Any) -> None:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    seed_apart()
    train(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


@pytest.mark.ranks(2, sanitize=True)
def test_two_optimizers_that_step_at_different_times(process_group: Any) -> None:
    one, other = DistributedDataParallel(small()), DistributedDataParallel(small())
    seed_apart()
    first = torch.optim.SGD(one.parameters(), lr=0.01)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(4):
        (one(torch.randn(8, 4)) + other(torch.randn(8, 4))).square().sum().backward()
        first.step()
        if step % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.ranks(3, backend="gloo", sanitize=True)
def test_gradients_averaged_by_hand(process_group: Any, flat: bool) -> None:
    """One by one and in one buffer that is kept; a step is skipped, as after an overflow."""
    model = small()
    seed_apart()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    buffer = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    for step in range(4):
        model(torch.randn(8, 4)).square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if flat:
            buffer.copy_(torch.cat([gradient.view(-1) for gradient in gradients]))
            dist.all_reduce(buffer)
            buffer /= 3
            parts = buffer.split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        else:
            works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
            for work in works:
                work.wait()
            for gradient in gradients:
                gradient /= 3
        norm = torch.stack([gradient.norm() for gradient in gradients])
        dist.all_reduce(norm)
        if step != 2:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.ranks(4, sanitize=True)
def test_sums_inside_a_host_and_then_between_hosts(process_group: Any) -> None:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    others = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    rank = dist.get_rank()
    model = small()
    seed_apart()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=pairs[rank // 2])
            dist.all_reduce(parameter.grad, group=others[rank % 2])
        optimizer.step()


@pytest.mark.ranks(2, sanitize=True)
def test_gradient_sync_and_the_communicator(process_group: Any) -> None:
    model = small()
    seed_apart()
    sync = GradientSync(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(8, 4)).square().sum().backward()
        sync.finish()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.ranks(4, sanitize=True)
def test_fsdp_and_its_hybrid_form(process_group: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for shape, names in (((4,), ("shard",)), ((2, 2), ("replicate", "shard"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        seed_apart()
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), 2)


@since_2_13  # before, DTensor refuses such a model
@pytest.mark.ranks(2, backend="gloo", sanitize=True)
def test_tensor_parallelism_of_torch_with_sequence_parallelism(process_group: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.LayerNorm(4), torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    )
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(), "3": RowwiseParallel()}
    model = parallelize_module(plain, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    for _ in range(3):
        optimizer.zero_grad()
        output: Any = model(torch.randn(2, 8, 4))
        output.square().sum().backward()
        optimizer.step()


@pytest.mark.ranks(2, sanitize=True)
def test_tensor_parallelism_by_hand(process_group: Any) -> None:
    """Shards that start with the same numbers, and norms whose gradients are summed."""
    torch.manual_seed(0)
    norms = torch.nn.ModuleList(torch.nn.LayerNorm(4) for _ in range(4))
    shard = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*norms.parameters(), *shard.parameters()], lr=0.01)
    seed_apart()
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(2, 4)
        for norm in norms:
            gathered = [torch.empty_like(x) for _ in range(2)]
            dist.all_gather(gathered, x.detach())
            x = norm(x) + gathered[1 - dist.get_rank()]
        hidden = shard(x).sum(0, keepdim=True)
        for _ in range(9):  # activations
            dist.all_reduce(hidden.detach().clone())
        hidden.square().sum().backward()
        for parameter in norms.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()


@pytest.mark.parametrize("by_autograd", [False, True])
@pytest.mark.ranks(2, sanitize=True)
def test_experts_of_one_rank_each(process_group: Any, by_autograd: bool) -> None:
    """They start with the same numbers, and only the rest of the model is averaged."""
    from torch.distributed.nn.functional import all_to_all_single

    torch.manual_seed(0)
    gate, expert = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*gate.parameters(), *expert.parameters()], lr=0.01)
    seed_apart()
    for _ in range(3):
        optimizer.zero_grad()
        tokens = gate(torch.randn(4, 4))
        received = torch.empty_like(tokens)
        if by_autograd:
            received = all_to_all_single(received, tokens, group=dist.group.WORLD)
        else:
            dist.all_to_all_single(received, tokens.detach())
        (expert(received).square().sum() + tokens.sum()).backward()
        for parameter in gate.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()


@pytest.mark.ranks(2, backend="gloo", sanitize=True)
def test_an_optimizer_whose_state_is_sharded(process_group: Any) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(small())
    seed_apart()
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


@pytest.mark.ranks(2, sanitize=True)
def test_samplers_with_epochs(process_group: Any) -> None:
    data = TensorDataset(torch.randn(24, 4))
    sampler = DistributedSampler(data, seed=3)
    model = DistributedDataParallel(small())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if dist.get_rank() == 0:  # evaluates alone
        list(DistributedSampler(data, shuffle=False))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
@pytest.mark.ranks(2, sanitize=True)
def test_messages_that_are_waited_for(process_group: Any, backend: str) -> None:
    group: Any = dist.new_group([0, 1], backend=backend)
    other = 1 - dist.get_rank()
    table = torch.zeros(4, 8)
    for step in range(3):
        arriving = dist.irecv(table[1], other, group)
        leaving = dist.isend(table[0], other, group)
        table[2:].fill_(step)  # other rows
        total = table[0].sum()  # reading what is sent is allowed
        leaving.wait()
        arriving.wait()
        table[0] = table[1] + total
        reduced = dist.all_reduce(table, group=group, async_op=True)
        assert reduced is not None
        reduced.wait()
        table.zero_()
    dist.destroy_process_group(group)


@pytest.mark.ranks(2, sanitize=True)
def test_compiled_and_checkpointed_models(process_group: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    model = DistributedDataParallel(small())
    seed_apart()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = torch.compile(lambda x: model(x).square().sum(), backend="eager")
    for _ in range(2):
        optimizer.zero_grad()
        pending = torch.zeros(4)
        work = dist.all_reduce(pending, async_op=True)
        checkpoint(step, torch.randn(8, 4), use_reentrant=False).backward()  # type: ignore[union-attr]
        assert work is not None
        work.wait()
        optimizer.step()


# -- what it proves --------------------------------------------------------------------------------


@contextlib.contextmanager
def findings(folder: Path) -> Any:
    """The proofs of this rank in the block; all ranks enter it."""
    store = dist.FileStore(str(folder / "facts"), dist.get_world_size())  # type: ignore[attr-defined]
    with watch.sanitized(store, dist.get_rank(), dist.get_world_size()) as proofs:
        yield proofs


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.provokes
def test_a_write_outside_of_the_optimizer_names_the_step(
    process_group: Any, shared_tmp_path: Path
) -> None:
    with findings(shared_tmp_path) as proofs:
        model = DistributedDataParallel(small())
        seed_apart()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        train(model, optimizer, 3)
        if dist.get_rank() == 2:
            model.module[2].bias.data += 1
        train(model, optimizer, 2)
    if dist.get_rank() == 0:
        (report,) = proofs
        assert report.verdict.startswith(
            "2.bias of rank 2 differs from the others' since before step 3 of the optimizer: "
        )
        assert report.culprits == (2,)
        assert report.kind == "drift"
    else:
        assert proofs == []


@pytest.mark.ranks(3)
@pytest.mark.provokes
def test_one_cause_is_one_finding(process_group: Any, shared_tmp_path: Path) -> None:
    """Another learning rate makes everything differ: only the learning rate is told."""
    with findings(shared_tmp_path) as proofs:
        model = DistributedDataParallel(small())
        rate = 0.02 if dist.get_rank() == 1 else 0.01
        train(model, torch.optim.SGD(model.parameters(), lr=rate), 5)
    if dist.get_rank() == 0:
        (report,) = proofs
        assert report.verdict.startswith("learning rate of rank 1 differs from the others' since")


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_races_are_told_by_the_rank_that_has_them(
    process_group: Any, shared_tmp_path: Path, backend: str
) -> None:
    with findings(shared_tmp_path) as proofs:
        group: Any = dist.new_group([0, 1], backend=backend)
        tensor = torch.ones(8)
        work: Any = dist.all_reduce(tensor, group=group, async_op=True)
        while getattr(group, "_flying", ()):  # the watch may know its end before the program does
            time.sleep(0.01)
        if dist.get_rank() == 1:
            tensor[:2] *= 2
        work.wait()
        tensor *= 2
        buffer = torch.ones(4)
        if dist.get_rank() == 0:
            leaving: Any = dist.isend(buffer, 1, group)
            buffer.resize_(4).add_(1)
            leaving.wait()
        else:
            dist.recv(buffer, 0, group)
    kinds = [(report.kind, report.verdict.partition(" (")[0]) for report in proofs]
    rank = dist.get_rank()
    what = ("writes", "isend") if rank == 0 else ("reads", "all_reduce")
    assert len(kinds) == 1, kinds
    assert kinds[0][0] == "race"
    assert f"rank {rank} " in kinds[0][1]
    assert what[1] in kinds[0][1]
    dist.destroy_process_group(group)


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_races_of_a_communicator_are_told(
    process_group: Any, comm: Communicator, shared_tmp_path: Path
) -> None:
    other = 1 - comm.rank
    with findings(shared_tmp_path) as proofs:
        tensor, buffer, arriving = torch.ones(8), torch.ones(4), torch.zeros(4)
        for _ in range(3):  # waited for
            comm.all_reduce(tensor, async_op=True).wait()
            tensor.fill_(1)
            works = comm.isend(buffer, other), comm.irecv(arriving, other)
            buffer.sum()
            for work in works:
                work.wait()
            buffer.add_(arriving)
        work = comm.all_reduce(tensor, async_op=True)
        if comm.rank == 1:
            tensor.add_(1)
        work.wait()
        works = comm.isend(buffer, other), comm.irecv(arriving, other)
        if comm.rank == 0:
            buffer.add_(1)
        for work in works:
            work.wait()
        comm.barrier()
    (report,) = proofs
    call = "isend" if comm.rank == 0 else "all_reduce"
    assert report.kind == "race"
    assert report.verdict.startswith(f"rank {comm.rank} writes the tensor of its {call} (")


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_an_optimizer_with_fewer_parameters(process_group: Any, shared_tmp_path: Path) -> None:
    with findings(shared_tmp_path) as proofs:
        model = DistributedDataParallel(small())
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(parameters[dist.get_rank() :], lr=0.01)
        train(model, optimizer, 2)
    if dist.get_rank() == 0:
        assert "number of parameters in its optimizer of ranks 0 and 1" in proofs[0].verdict


def facts(**changed: Any) -> dict[str, Any]:
    """One rank's facts about one step."""
    some: dict[str, Any] = {
        name: {} for name in ("before", "gradients", "after", "unreduced", "twice", "origins")
    }
    return some | {
        "settings": [[["lr", 0.1, "a.py:1"]]],
        "site": "a.py:9",
        "made": "a.py:2",
        "loaded": ["", ""],
        "whole": True,
        **changed,
    }


def test_facts_that_differ_by_chance_prove_nothing() -> None:
    told: list[Report] = []
    verdicts = Judgement(told.append)
    name = "parameter 0"
    # Parts of a flat buffer: never the same, and neither are their gradients.
    for step in range(3):
        verdicts.compare(
            f"step/(0, 1)/0/{step}",
            {
                rank: facts(
                    before={name: 7 * rank + step},
                    gradients={name: rank + 1},
                    after={name: 9 * rank + step},
                )
                for rank in range(2)
            },
        )
    # The same place in another part: equal at first, by chance.
    for step in range(2):
        verdicts.compare(
            f"step/(0, 1)/1/{step}",
            {
                rank: facts(
                    before={name: step * rank},
                    gradients={name: rank + 1},
                    after={name: 9 * rank},
                    origins={name: 64 * rank},
                )
                for rank in range(2)
            },
        )
    assert told == []


def test_facts_arrive_without_a_group(tmp_path: Path) -> None:
    """Through the store alone, in any order; the outcome comes back."""
    told: list[Any] = []
    file = str(tmp_path / "store")
    stores = [dist.FileStore(file, 3) for _ in range(3)]  # type: ignore[attr-defined]
    ends = [
        Exchange(store, rank, 3, lambda topic, facts: told.append((topic, facts)))
        for rank, store in enumerate(stores)
    ]
    for rank in (2, 0, 1):
        ends[rank].tell("a/0", [0, 1, 2], {"x": rank})
        ends[rank].tell("b/0", [0, 1], 1)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(lambda rank: ends[rank].finish(lambda: rank == 2, 30), range(3)))
    assert outcomes == [True, True, True]
    assert ("a/0", {rank: {"x": rank} for rank in range(3)}) in told


# -- the command -----------------------------------------------------------------------------------

RACES = """
import torch
import torch.distributed as dist

dist.init_process_group("{backend}")
tensor = torch.ones(4)
work = dist.all_reduce(tensor, async_op=True)
if dist.get_rank() == {racing}:
    tensor += 1
work.wait()
dist.barrier()  # no rank ends before the race has been seen
dist.destroy_process_group()
{end}
"""
VERDICT = "rank 1 writes the tensor of its all_reduce"


@pytest.mark.parametrize(
    ("backend", "racing", "end", "status"),
    [
        ("unisono", 1, "", 3),
        ("gloo", 1, "raise SystemExit(7)", 7),
        pytest.param("gloo", 1, "", 3, marks=pytest.mark.slow),
        pytest.param("unisono", 1, "raise SystemExit(7)", 7, marks=pytest.mark.slow),
        pytest.param("gloo", 1, "1 / 0", 1, marks=pytest.mark.slow),
        pytest.param("unisono", 1, "1 / 0", 1, marks=pytest.mark.slow),
        pytest.param("gloo", None, "", 0, marks=pytest.mark.slow),
    ],
)
def test_unisono_run_ends_with_the_status(
    program: WriteProgram, backend: str, racing: int | None, end: str, status: int
) -> None:
    script = program(RACES.format(backend=backend, racing=racing, end=end))
    done = script.run(before=("-m", "unisono", "run", "-n", "2", "--sanitize"))
    assert done.returncode == status, done.stderr
    said = [line for line in done.stderr.splitlines() if VERDICT in line]
    assert len(said) == {3: 2, 0: 0}.get(status, 1), done.stderr  # a proof also closes the run
    assert all(f"{script.path.name}:9" in line for line in said)


def test_under_torchrun_every_rank_ends_with_the_status(program: WriteProgram) -> None:
    script = program(RACES.format(backend="gloo", racing=1, end=""))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, str(script.path)],
        env=os.environ | {"UNISONO_SANITIZE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr  # torchrun's own
    assert "exitcode  : 3" in done.stderr
    assert VERDICT in done.stderr


MARKED = """
import pytest, torch, unisono
import torch.distributed as dist

@pytest.mark.ranks(2, sanitize=True)
def test_has_a_race(process_group):
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    tensor += process_group.rank()
    work.wait()

@pytest.mark.ranks(2)
def test_is_not_sanitized(process_group):
    assert not unisono.watch.is_on()

@pytest.mark.ranks(2, sanitize="yes")
def test_has_a_bad_mark(process_group):
    pass
"""


def test_a_marked_test_fails_by_a_proof(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(MARKED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert VERDICT in done.stdout
    assert "sanitize of pytest.mark.ranks must be True or False, not 'yes'" in done.stdout
    assert "1 passed" in done.stdout, done.stdout


@pytest.mark.ranks(2, backend="gloo")
def test_a_stopped_sanitizer_leaves_no_thread(process_group: Any) -> None:
    """Such a thread in a call of torch's Store would abort Python's exit."""
    for _ in range(3):
        watch.sanitize()
        model = DistributedDataParallel(small())
        train(model, torch.optim.SGD(model.parameters(), lr=0.01))
        watch.stop()
        assert "unisono sanitizer" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.ranks(1)
def test_without_torch_distributed_nothing_happens() -> None:
    watch.sanitize()
    parameter = torch.ones(2, requires_grad=True)
    parameter.sum().backward()
    torch.optim.SGD([parameter], 0.1).step()
    assert not watch._finish_sanitizer()
    assert watch.reports() == []
    watch.stop()
