"""DistributedDataParallel on "unisono": many ranks learn what one process would."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from unisono.comm.meeting import leading
from unisono.comm.shared_memory.record_reader import read_process
from unisono.torch_backend import futures
from unisono.training import compress_ddp_gradients, share_ddp_buckets

pytestmark = pytest.mark.ranks(2)

STEPS = 4
BATCH = 12  # divides by 2, 3 and 4 ranks
PLAIN: dict[str, Any] = {}
MANY_BUCKETS = {"bucket_cap_mb": 0.0005}


class Net(torch.nn.Module):
    """A small net; with `lazy` one of its layers is used only in some steps."""

    def __init__(self, lazy: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = torch.nn.Linear(6, 16, dtype=torch.float64)
        self.second = torch.nn.Linear(16, 16, dtype=torch.float64)
        self.sometimes = torch.nn.Linear(16, 16, dtype=torch.float64)
        self.last = torch.nn.Linear(16, 3, dtype=torch.float64)
        self.lazy = lazy
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(inputs).tanh()).tanh()
        self.calls += 1
        if not self.lazy or self.calls % 2:
            hidden = self.sometimes(hidden).tanh()
        output: torch.Tensor = self.last(hidden)
        return output


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The whole batches of every step, the same on all ranks."""
    generator = torch.Generator().manual_seed(11)
    shapes = ((BATCH, 6), (BATCH, 3))
    return [
        tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        for _ in range(STEPS)
    ]  # type: ignore[return-value]


def mine(batch: torch.Tensor) -> torch.Tensor:
    """This rank's part of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def step(model: Any, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any) -> None:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def learn(
    model: Any, make_optimizer: Callable[..., Any] = adam, part: Callable[..., Any] = mine
) -> list[torch.Tensor]:
    """The parameters, learned from a part of every batch."""
    optimizer = make_optimizer(model)
    for inputs, targets in batches():
        step(model, optimizer, part(inputs), part(targets))
    return [parameter.detach() for parameter in model.parameters()]


def learned_alone(
    lazy: bool = False, make_optimizer: Callable[..., Any] = adam
) -> list[torch.Tensor]:
    """What one process learns from the whole batches."""
    return learn(Net(lazy), make_optimizer, part=lambda batch: batch)


def assert_the_same_everywhere(parameters: list[torch.Tensor]) -> None:
    """Bit by bit."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    assert all(torch.equal(flat, theirs) for theirs in everyone)


def assert_learned(model: torch.nn.Module, expected: list[torch.Tensor], **tolerance: Any) -> None:
    parameters = list(model.parameters())
    assert_the_same_everywhere(parameters)
    torch.testing.assert_close(parameters, expected, **tolerance)


@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        MANY_BUCKETS,
        {"static_graph": True},
        {"static_graph": True, **MANY_BUCKETS},
        {"gradient_as_bucket_view": True, **MANY_BUCKETS},
        {"find_unused_parameters": True, **MANY_BUCKETS},
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
@pytest.mark.ranks([2, 3])
def test_ranks_learn_what_one_process_learns(process_group: Any, options: dict[str, Any]) -> None:
    model = Net()
    learn(DistributedDataParallel(model, **options))
    assert_learned(model, learned_alone())


def test_parameters_that_a_step_does_not_use(process_group: Any) -> None:
    model = Net(lazy=True)
    learn(DistributedDataParallel(model, find_unused_parameters=True, **MANY_BUCKETS))
    assert_learned(model, learned_alone(lazy=True))


def test_a_parameter_that_only_one_rank_uses(process_group: Any) -> None:
    model = Net(lazy=True)
    model.calls = dist.get_rank()  # one step late
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    assert model.sometimes.weight.grad is not None
    assert_the_same_everywhere([model.sometimes.weight.grad])
    assert model.sometimes.weight.grad.abs().sum() > 0


def test_no_sync_gathers_gradients_first(process_group: Any) -> None:
    """Two halves of a batch; only the second is followed by a reduction."""
    model = Net()
    wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
    optimizer = adam(model)
    for inputs, targets in batches():
        optimizer.zero_grad()
        for half, quiet in ((0, True), (1, False)):
            with wrapped.no_sync() if quiet else contextlib.nullcontext():
                output = wrapped(mine(inputs).chunk(2)[half])
                wanted = mine(targets).chunk(2)[half]
                (torch.nn.functional.mse_loss(output, wanted) / 2).backward()
        optimizer.step()
    assert_learned(model, learned_alone())


@pytest.mark.ranks([1, 3])
def test_join_lets_ranks_run_out_of_inputs(process_group: Any) -> None:
    """Rank r has r + 1 inputs; a step averages over the ranks that still have one."""
    world = range(dist.get_world_size())
    data = [(inputs[:1], targets[:1]) for inputs, targets in batches()]
    model = Net()
    wrapped = DistributedDataParallel(model)
    optimizer = sgd(model)
    with wrapped.join(divide_by_initial_world_size=False):
        for inputs, targets in data[: dist.get_rank() + 1]:
            step(wrapped, optimizer, inputs + dist.get_rank(), targets)
    alone = Net()
    optimizer = sgd(alone)
    for number, (inputs, targets) in enumerate(data[: len(world)]):
        left = [rank for rank in world if rank >= number]
        everyones = torch.cat([inputs + rank for rank in left])
        step(alone, optimizer, everyones, targets.repeat(len(left), 1))
    assert_learned(model, [parameter.detach() for parameter in alone.parameters()])


HOOKS: dict[str, tuple[Any, float]] = {
    "allreduce": (default_hooks.allreduce_hook, 1e-12),
    "fp16": (default_hooks.fp16_compress_hook, 2e-2),
    "fp16 and allreduce": (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        2e-2,
    ),
    "built-in allreduce": (dist.BuiltinCommHookType.ALLREDUCE, 1e-12),
    "PowerSGD": (powerSGD_hook.powerSGD_hook, 1e-6),
}


def full_rank() -> powerSGD_hook.PowerSGDState:
    """The rank is so high that nothing is lost: the result is that without compression."""
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=16, start_powerSGD_iter=2, min_compression_rate=0.01
    )


@pytest.mark.parametrize("name", HOOKS)
def test_communication_hooks(process_group: Any, name: str) -> None:
    hook, tolerance = HOOKS[name]
    model = Net()
    wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
    if isinstance(hook, dist.BuiltinCommHookType):
        wrapped._register_builtin_comm_hook(hook)
    else:
        wrapped.register_comm_hook(full_rank() if name == "PowerSGD" else None, hook)
    learn(wrapped, sgd)
    assert_learned(model, learned_alone(make_optimizer=sgd), atol=tolerance, rtol=tolerance)


def first_of(future: Any) -> torch.Tensor:
    tensor: torch.Tensor = future.value()[0]
    return tensor


def test_a_hook_may_wait_for_works_whose_futures_are_then_done(process_group: Any) -> None:
    wrapped = DistributedDataParallel(torch.nn.Linear(2, 2))
    done: list[bool] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch looks at the annotations
        for _ in range(20):
            work, called = dist.all_reduce(torch.ones(3), async_op=True), []
            future = work.get_future()
            chained = future.then(called.append)
            work.wait()
            done.append(future.done() and len(called) == 1 and chained.done())
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(first_of)

    wrapped.register_comm_hook(None, hook)
    for _ in range(50):
        wrapped(torch.ones(1, 2)).sum().backward()
    assert len(done) == 1_000
    assert all(done)


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch with CUDA allows them")
def test_hooks_that_torch_allows_on_nccl_alone_are_refused_by_torch(process_group: Any) -> None:
    wrapped = DistributedDataParallel(Net())
    with pytest.raises(TypeError, match="BF16"):
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)


@pytest.fixture
def roomy_group(process_group: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group that assumes idle cores."""
    monkeypatch.setattr(leading, "_cores", lambda everyone, sharers: 4 * len(everyone))
    return dist.new_group(backend="unisono")


class Embedder(torch.nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Embedding(20, 4, sparse=sparse, dtype=torch.float64)
        self.last = torch.nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.table(tokens))
        return output


def test_sparse_gradients(process_group: Any) -> None:
    tokens = torch.arange(BATCH).remainder(7) * 2  # ranks share some rows, and skip others
    model = Embedder(sparse=True)
    wrapped = DistributedDataParallel(model)
    alone = Embedder(sparse=False)
    for net, inputs in ((wrapped, mine(tokens)), (alone, tokens)):
        optimizer = sgd(net)
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(inputs).square().mean().backward()
            optimizer.step()
    assert model.table.weight.grad is not None
    assert model.table.weight.grad.is_sparse
    assert_learned(model, [parameter.detach() for parameter in alone.parameters()])


def test_buffers_are_those_of_rank_0(process_group: Any) -> None:
    model = torch.nn.BatchNorm1d(3)
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        wrapped(torch.randn(8, 3) + dist.get_rank())
    wrapped.eval()
    wrapped._sync_buffers()
    assert model.running_mean is not None
    assert_the_same_everywhere([model.running_mean])
    assert model.running_mean.abs().max() < 1


def test_buckets_are_reduced_while_backward_runs(process_group: Any) -> None:
    """When the gradient reaches the first layer, those of the last are in flight."""
    model = Net()
    wrapped = DistributedDataParallel(model, **MANY_BUCKETS)
    inputs = torch.ones(2, 6, dtype=torch.float64)
    wrapped(inputs).sum().backward()  # buckets are rebuilt after the first step
    begun: list[int] = []
    model.first.register_full_backward_pre_hook(lambda *_: begun.append(len(reductions())))
    before = len(reductions())
    wrapped(inputs).sum().backward()
    ended_s = time.monotonic()
    (during,) = begun
    assert before < during < len(reductions())
    early = reductions()[before:during]
    assert all(record.arrived_s < ended_s for record in early)


def reductions() -> list[Any]:
    """The records of this rank's all_reduce calls."""
    (group,) = read_process(os.getpid())
    (rank,) = (rank_records for rank_records in group.ranks if rank_records.pid == os.getpid())
    return [record for record in rank.records if record.operation == "all_reduce"]


@pytest.mark.slow
@pytest.mark.ranks(2, timeout_s=400)
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled(process_group: Any) -> None:
    model = Net()
    learn(torch.compile(DistributedDataParallel(model)))
    assert_learned(model, learned_alone())


def wide_net() -> torch.nn.Module:
    """A model whose buckets are large enough to share."""
    torch.manual_seed(5)
    return torch.nn.Sequential(*(torch.nn.Linear(150, 150) for _ in range(4)))


def learn_widely(model: Any) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn((2, 150), generator=generator)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def wrap_widely(options: dict[str, Any]) -> Any:
    return DistributedDataParallel(wide_net(), bucket_cap_mb=0.1, **options)


@pytest.mark.ranks([2, 3])
@pytest.mark.parametrize("options", [PLAIN, {"gradient_as_bucket_view": True}])
def test_buckets_in_shared_memory(process_group: Any, options: dict[str, Any]) -> None:
    comm = process_group.comm
    reduced: list[bool] = []  # whether each large all_reduce used shared memory
    original = comm.all_reduce

    def all_reduce(tensor: Any, *more: Any, **named: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and tensor.nbytes > 1000:
            reduced.append(comm.is_shared(tensor))
        return original(tensor, *more, **named)

    usual = learn_widely(wrap_widely(options))
    model = wrap_widely(options)
    share_ddp_buckets(model)
    comm.all_reduce = all_reduce
    shared = learn_widely(model)
    del comm.all_reduce
    assert len(reduced) > STEPS
    assert all(reduced)
    assert all(map(torch.equal, usual, shared))
    with pytest.raises(TypeError, match="Net is not a DistributedDataParallel"):
        share_ddp_buckets(Net())  # type: ignore[arg-type]


@pytest.mark.ranks(2)
def test_a_wire_format_changes_nothing_on_one_host(process_group: Any) -> None:
    usual = learn_widely(wrap_widely(PLAIN))
    model = wrap_widely(PLAIN)
    with pytest.raises(ValueError, match="unknown wire format"):
        compress_ddp_gradients(model, "int4")  # type: ignore[arg-type]
    compress_ddp_gradients(model, "int8")
    assert all(map(torch.equal, usual, learn_widely(model)))


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4_000_000))

    def forward(self, factor: float) -> torch.Tensor:
        return self.weight.sum() * factor


@pytest.mark.parametrize("options", [PLAIN, {"gradient_as_bucket_view": True}])
def test_buckets_under_way_are_left_to_a_thread_where_cores_are_idle(
    roomy_group: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moving the bucket takes much longer than the rest of the backward pass, at least on the last
    rank."""
    left: list[bool] = []
    add = futures.Completer.add

    def note(self: Any, future: Any, whatever_happens: bool = False) -> None:
        left.append(whatever_happens)
        add(self, future, whatever_happens)

    monkeypatch.setattr(futures.Completer, "add", note)
    model = Scaled()
    weight = model.weight
    wrapped = DistributedDataParallel(model, process_group=roomy_group, **options)
    for step_number in range(4):
        weight.grad = None
        wrapped(float(step_number + dist.get_rank())).backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, torch.full_like(weight, step_number + 0.5))
    assert all(left)
    counts = torch.tensor([len(left)])
    dist.all_reduce(counts)
    assert counts.item() > 0
