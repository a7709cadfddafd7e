"""GradientSync and sync_gradients: compared with DDP and with one process."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from implementations import on_backends
from unisono import UnisonoError
from unisono.comm.communicator import Communicator
from unisono.comm.shared_memory.record_reader import read_process
from unisono.training import GradientSync, sync_gradients
from unisono.world.world import resolve

BATCH = 12  # divides by 2, 3 and 4 ranks
STEPS = 3
SMALL = 512  # bytes: many buckets

on_both = on_backends(unisono=[1, 2, 3, 4], gloo=[2, 3])


def mlp(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(7)
    layers = [torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(5, 3)).to(dtype)


class Transformer(torch.nn.Module):
    """One layer; the table of tokens is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Embedding(11, 8)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = torch.nn.Linear(8, 11, bias=False)
        self.last.weight = self.table.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = (inputs * 3).long().remainder(11)
        output: torch.Tensor = self.last(self.layer(self.table(tokens)))
        return output


class Lazy(torch.nn.Module):
    """One layer is used only in every other step, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(6, 4)
        self.sometimes = torch.nn.Linear(4, 4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.last = torch.nn.Linear(4, 3)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.first(inputs).tanh())
        self.calls += 1
        if self.calls % 2:
            hidden = self.sometimes(hidden).tanh()
        output: torch.Tensor = self.last(hidden)
        return output


def batches(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(BATCH, 6, generator=generator).to(dtype) for _ in range(STEPS)]


def part(batch: torch.Tensor, comm: Communicator) -> torch.Tensor:
    return batch.chunk(comm.size)[comm.rank]


def loss_of(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


def learn(
    model: Any, inputs: list[torch.Tensor], before_step: Callable[[], Any] = lambda: None
) -> Any:
    """Train; returns the parameters. Not with Adam, which amplifies gradients that would be zero
    without rounding: a transformer has some."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for batch in inputs:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        before_step()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


# -- equal to DDP, and to one process ------------------------------------------------------------


@on_both
def test_as_ddp(process_group: Any, backend: str) -> None:
    for make, bucket_bytes in itertools.product((mlp, Transformer, Lazy), (SMALL, 2**20)):
        learns_as_ddp(backend, make, bucket_bytes)


def learns_as_ddp(backend: str, make: Any, bucket_bytes: int) -> None:
    comm = resolve()
    mine = [part(batch, comm) for batch in batches()]
    theirs = make()
    wrapped = DistributedDataParallel(
        theirs, find_unused_parameters=make is Lazy, bucket_cap_mb=bucket_bytes / 2**20
    )
    expected = learn(wrapped, mine)
    model = make()
    sync = GradientSync(model, bucket_bytes=bucket_bytes, unused="zero")
    got = learn(model, mine, sync.finish)
    # A mean over a power of two is the same however it is computed, and so is a sum of two.
    exact = comm.size in ((1, 2, 4) if backend == "unisono" else (1, 2))
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
    for tensor, other in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor, other, **close)
    alone = learn(make(), batches())
    torch.testing.assert_close(got, alone, rtol=1e-4, atol=1e-5)


@on_both
def test_without_hooks(process_group: Any, backend: str) -> None:
    comm = resolve()
    double = batches(torch.float64)
    model = mlp(torch.float64)
    got = learn(model, [part(batch, comm) for batch in double], lambda: sync_gradients(model))
    torch.testing.assert_close(got, learn(mlp(torch.float64), double))


@pytest.mark.ranks([2, 3])
def test_everyone_starts_from_one_rank(comm: Communicator) -> None:
    model = torch.nn.BatchNorm1d(3)
    with torch.no_grad():
        model.weight += comm.rank
    model.running_mean += comm.rank  # type: ignore[operator]
    GradientSync(model, src=1)
    assert model.weight.tolist() == [2, 2, 2]
    assert model.running_mean.tolist() == [1, 1, 1]  # type: ignore[union-attr, operator]


@pytest.mark.ranks(4)
def test_on_a_part_of_the_ranks(comm: Communicator) -> None:
    half = comm.split([0, 2] if comm.rank % 2 == 0 else [1, 3])
    assert half is not None
    weight = torch.nn.Parameter(torch.zeros(3))
    sync = GradientSync([weight], half)
    (weight * comm.rank).sum().backward()
    sync.finish()
    assert gradient_of(weight).tolist() == [1 + comm.rank % 2] * 3
    sync.close()
    half.close()


# -- overlap ---------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_buckets_set_out_while_backward_runs(comm: Communicator) -> None:
    model = mlp()
    sync = GradientSync(model, bucket_bytes=100)
    begun: list[int] = []
    model[0].register_full_backward_pre_hook(lambda *_: begun.append(len(sync._reductions)))  # type: ignore[index]
    for _ in range(2):
        loss_of(model, torch.ones(2, 6, requires_grad=True)).backward()
        sync.finish()
    assert 0 < begun[1] < len(sync._buckets)


@pytest.mark.ranks(2)
def test_without_overlap_nothing_sets_out_before_finish(comm: Communicator) -> None:
    model = mlp()
    sync = GradientSync(model, overlap=False)
    loss_of(model, torch.ones(2, 6)).backward()
    assert not sync._reductions
    sync.finish()


@pytest.mark.ranks(3)
def test_the_order_is_that_of_rank_0(comm: Communicator) -> None:
    """Ranks use their layers in different orders; the buckets still match."""
    torch.manual_seed(1)
    layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(4)])
    sync = GradientSync(layers, bucket_bytes=1)
    for _ in range(3):
        layers.zero_grad()
        x = torch.ones(1, 4)
        for index in range(4):
            x = layers[(index + comm.rank) % 4](x)
        x.sum().backward()
        sync.finish()
        for parameter in layers.parameters():
            everyone = torch.empty(3, *parameter.shape)
            comm.all_gather(everyone, parameter.grad)
            assert all(torch.equal(everyone[0], theirs) for theirs in everyone)
    assert [bucket.parameters[0].number for bucket in sync._buckets][:2] in ([6, 7], [7, 6])


# -- accumulation ----------------------------------------------------------------------------------


@on_both
@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync(process_group: Any, backend: str, set_to_none: bool) -> None:
    comm = resolve()
    model = mlp(torch.float64)
    sync = GradientSync(model, bucket_bytes=SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for batch in batches(torch.float64):
        optimizer.zero_grad(set_to_none)
        halves = part(batch, comm).chunk(2)
        for number, half in enumerate(halves):
            with contextlib.nullcontext() if number else sync.no_sync():
                weight = len(half) * len(halves) / len(part(batch, comm)) / 2
                (loss_of(model, half) * weight).backward()
        sync.finish()
        optimizer.step()
    alone = learn(mlp(torch.float64), batches(torch.float64))
    torch.testing.assert_close([parameter.detach() for parameter in model.parameters()], alone)


@pytest.mark.ranks(2)
def test_no_sync_ends_with_an_exception(comm: Communicator) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    sync = GradientSync([weight])

    def fail() -> None:
        with sync.no_sync(), sync.no_sync():
            (weight * comm.rank).sum().backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    (weight * 10).sum().backward()
    sync.finish()
    assert gradient_of(weight).tolist() == [10.5, 10.5]


@pytest.mark.ranks(2)
def test_finish_sends_what_only_no_sync_has_gathered(comm: Communicator) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    sync = GradientSync([weight], op="sum")
    with sync.no_sync():
        (weight * comm.rank).sum().backward()
    sync.finish()
    assert gradient_of(weight).tolist() == [1, 1]


@on_both
def test_half_precision_in_float32(process_group: Any, backend: str) -> None:
    """256 + 1 is 256 in bfloat16; eight small gradients are lost unless they are added in
    float32."""
    comm = resolve()
    for wide, expected in ((True, 264.0), (False, 256.0)):
        weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        sync = GradientSync([("w", weight)], accumulate_float32=wide)
        for _ in range(2):
            weight.grad = None
            with sync.no_sync():
                for scale in (256, 1, 1, 1, 1, 1, 1, 1):
                    (weight * scale).sum().backward()
            weight.sum().backward()
            sync.finish()
            assert gradient_of(weight).dtype is torch.bfloat16
            assert gradient_of(weight).tolist() == [expected] * 3
    assert comm.errored is None


@pytest.mark.ranks(2)
def test_two_passes_without_no_sync_are_refused(comm: Communicator) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    sync = GradientSync([("w", weight)])
    weight.sum().backward()
    with pytest.raises(UnisonoError, match=r"a second gradient for w.*no_sync"):
        weight.sum().backward()
    sync.discard()
    assert weight.grad is None
    weight.sum().backward()
    sync.finish()
    assert gradient_of(weight).tolist() == [1, 1]


@on_both
def test_a_step_that_failed_on_one_rank(process_group: Any, backend: str) -> None:
    """It discards the step, and the others learn of it; even in the first step, and even if earlier
    passes had left gradients. The next step works."""
    comm = resolve()
    weight, bias = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    sync = GradientSync([("weight", weight), ("bias", bias)], bucket_bytes=1)
    last = comm.size - 1
    for _ in range(2):
        with sync.no_sync():
            (weight + bias).sum().backward()
        if comm.rank == last:
            sync.discard()
        else:
            (weight + bias).sum().backward()
            with pytest.raises(
                UnisonoError, match=rf"no gradient for weight \(on 1 of {comm.size}"
            ):
                sync.finish()
        weight.grad = bias.grad = None
        ((weight + bias) * comm.rank).sum().backward()
        sync.finish()
        torch.testing.assert_close(gradient_of(weight), torch.full((2,), last / 2))
        weight.grad = bias.grad = None
    sync.close()


@pytest.mark.ranks(2)
def test_a_closed_one_leaves_gradients_alone(comm: Communicator) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    sync = GradientSync([weight])
    sync.close()
    sync.close()
    (weight * comm.rank).sum().backward()
    assert gradient_of(weight).item() == comm.rank


# -- parameters without gradients ------------------------------------------------------------------


@on_both
def test_unused_parameters_are_named_on_every_rank(process_group: Any, backend: str) -> None:
    comm = resolve()
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    sync = GradientSync(model, bucket_bytes=1)
    last = comm.size - 1
    for _ in range(2):  # the group goes on
        model.zero_grad()
        used = ["a"] if comm.rank == last else ["a", "b"]
        torch.stack([model[name](torch.ones(2)).sum() for name in used]).sum().backward()
        where = f"1 of {comm.size} ranks" + ", this one too" * (comm.rank == last)
        with pytest.raises(UnisonoError, match=rf"no gradient for b.weight \(on {where}\), b.bias"):
            sync.finish()
    model.zero_grad()
    with pytest.raises(UnisonoError, match=r"a\.weight"):
        sync_gradients(model)


@on_both
@pytest.mark.parametrize("order", ["lonely first", "lonely last"])
def test_ranks_that_disagree_count_as_zero(process_group: Any, backend: str, order: str) -> None:
    comm = resolve()
    shared, lonely, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    both = [lonely, shared] if order == "lonely first" else [shared, lonely]
    sync = GradientSync([*both, unused], bucket_bytes=1, unused="zero", op="sum")
    for _ in range(3):
        for parameter in (shared, lonely, unused):
            parameter.grad = None
        loss = shared.sum()
        if comm.rank == 0:
            loss = loss + 5 * lonely.sum()
        loss.backward()
        sync.finish()
        assert gradient_of(shared).tolist() == [comm.size] * 3
        assert gradient_of(lonely).tolist() == [5.0] * 3
        assert unused.grad is None


@pytest.mark.ranks([2, 3])
def test_a_rank_without_a_batch(comm: Communicator) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    sync = GradientSync([weight], unused="zero", op="sum")
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for step in range(1, 4):
        optimizer.zero_grad()
        if comm.rank < step:
            weight.sum().backward()
        sync.finish()
        optimizer.step()
    done = sum(min(step, comm.size) for step in range(1, 4))
    assert weight.tolist() == [1.0 - done] * 3


# -- kinds of parameters ---------------------------------------------------------------------------


@on_both
def test_dtypes_keep_to_themselves(process_group: Any, backend: str) -> None:
    """For each dtype a value that another would lose; also odd sizes, empty and transposed
    tensors."""
    comm = resolve()
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
    values = (2.0**-40 + 1, 2.0**-20 + 1, 2.0**100, 2.0**-10 + 1, 1 - 2j)
    parameters, wanted = [], []
    for dtype, value in zip(dtypes, values, strict=True):
        for shape in ((3,), (0, 2), (), (5, 3)):
            parameters.append(torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
            wanted.append(torch.full(shape, value, dtype=dtype))
    parameters.append(torch.nn.Parameter(torch.zeros(4, 6).t()))
    wanted.append(torch.arange(24.0).view(6, 4))
    for bucket_bytes in (16, 2**20):
        sync = GradientSync(parameters, bucket_bytes=bucket_bytes)
        for _ in range(2):
            for parameter, value in zip(parameters, wanted, strict=True):
                parameter.grad = None
                parameter.backward(value.clone())
            sync.finish()
            for parameter, value in zip(parameters, wanted, strict=True):
                assert gradient_of(parameter).dtype is value.dtype
                if comm.size in (1, 2, 4):
                    assert torch.equal(gradient_of(parameter), value)
                else:
                    torch.testing.assert_close(gradient_of(parameter), value)
        sync.close()


@on_both
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_gradients_that_lie_in_the_same_memory(
    process_group: Any, backend: str, bucket_bytes: int
) -> None:
    """The gradient through views of parameters is one tensor, for all of them and for the layers
    before; torch makes it the gradient of several parameters, without a copy."""
    comm = resolve()
    count = 1000
    layer = torch.nn.Parameter(torch.full((count,), 2.0))
    row = torch.nn.Parameter(torch.zeros(1, count))
    column = torch.nn.Parameter(torch.zeros(count, 1))
    short = torch.nn.Parameter(torch.zeros(count - 1))
    everything = [layer, row, column, short]
    sync = GradientSync(everything, bucket_bytes=bucket_bytes, op="sum")
    for _ in range(3):
        for parameter in everything:
            parameter.grad = None
        late = torch.cat([torch.zeros(1), short])
        parts = layer.square(), row.view(count), column.view(count), late
        ((parts[0] + parts[1] + parts[2] + parts[3]) * (comm.rank + 1)).sum().backward()
        sync.finish()
        total = comm.size * (comm.size + 1) / 2
        for parameter, expected in zip(everything, (4 * total, total, total, total), strict=True):
            assert gradient_of(parameter).unique().tolist() == [expected]


@pytest.mark.ranks([1, 3])
def test_gradients_stay_where_the_program_has_put_them(comm: Communicator) -> None:
    row = torch.zeros(5)
    a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    a.grad, b.grad = row[:2], row[2:]
    sync = GradientSync([a, b], op="sum")
    for _ in range(2):
        row.zero_()
        ((a.sum() + b.sum()) * (comm.rank + 1)).backward()
        sync.finish()
        assert row.tolist() == [comm.size * (comm.size + 1) / 2] * 5


@pytest.mark.ranks([2])
def test_gradients_that_are_kept_move_once(comm: Communicator) -> None:
    """After the first step, whose order was unknown, they are in buckets and stay there."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    sync = GradientSync(model, op="sum")
    addresses: list[list[int]] = []
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        (model(torch.ones(1, 3)).sum() * (comm.rank + 1)).backward()
        sync.finish()
        addresses.append([gradient_of(parameter).data_ptr() for parameter in model.parameters()])
    assert addresses[0] == addresses[1] == addresses[2]
    assert set(addresses[0]) == {
        view.data_ptr() for bucket in sync._buckets for view in bucket.views
    }
    assert len(set(addresses[0])) == 8
    assert gradient_of(list(model.parameters())[-1]).tolist() == [3.0] * 3


@on_both
def test_sparse_gradients_are_refused_by_name(process_group: Any, backend: str) -> None:
    model = torch.nn.ModuleDict({"tokens": torch.nn.Embedding(5, 2, sparse=True)})
    sync = GradientSync(model)
    with pytest.raises(TypeError, match=r"the gradient of tokens.weight is sparse_coo"):
        model["tokens"](torch.tensor([1, 2])).sum().backward()
    sync.close()
    resolve().barrier()  # if all ranks raise, the group stays usable


@pytest.mark.ranks(2)
def test_models_that_differ(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=r"number 0 is weight of float32 \(2, 2\) on rank 0, .*3"):
        GradientSync(torch.nn.Linear(2 + comm.rank, 2))
    with pytest.raises(ValueError, match="no more on rank 1"):
        GradientSync(torch.nn.Linear(2, 2, bias=comm.rank == 0))
    comm.barrier()


@pytest.mark.ranks(2)
def test_a_parameter_that_was_frozen(comm: Communicator) -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    sync = GradientSync(model)
    model.bias.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UnisonoError, match="bias required no gradient"):
        sync.finish()


@on_both
def test_options_that_differ(process_group: Any, backend: str) -> None:
    comm = resolve()
    if comm.size == 1:
        return
    model = torch.nn.Linear(2, 2)
    options: Any
    for options in ({"op": "sum"}, {"bucket_bytes": 1}, {"unused": "zero"}):
        with pytest.raises(ValueError, match=r"rank 0 has op='mean', unused=.*, rank 1 has op="):
            GradientSync(model, **(options if comm.rank else {}))
    comm.barrier()


@on_both
def test_one_for_each_parameter(process_group: Any, backend: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    first = GradientSync([("weight", weight)], op="sum")
    with pytest.raises(ValueError, match="weight belongs to another GradientSync"):
        GradientSync([("weight", weight)], op="sum")
    first.close()
    second = GradientSync([weight], op="sum")
    weight.sum().backward()
    second.finish()
    assert gradient_of(weight).tolist() == [resolve().size] * 2


@pytest.mark.ranks(2)
def test_a_parameter_that_came_later(comm: Communicator) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    sync = GradientSync(model)
    model.append(torch.nn.Linear(2, 2, bias=False))
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UnisonoError, match=r"1\.weight was added after this GradientSync was made"):
        sync.finish()


def test_options() -> None:
    model = torch.nn.Linear(2, 2)
    for options, said in (
        ({"unused": "skip"}, "'error' or 'zero'"),
        ({"bucket_bytes": 0}, "bucket_bytes must be positive"),
        ({"op": "max"}, "'mean' or 'sum'"),
    ):
        with pytest.raises(ValueError, match=said):
            GradientSync(model, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        GradientSync(model.requires_grad_(False))


def test_one_process_that_has_started_nothing() -> None:
    model = mlp()
    sync = GradientSync(model)
    got = learn(model, batches(), sync.finish)
    torch.testing.assert_close(got, learn(mlp(), batches()), rtol=0, atol=0)


@pytest.mark.ranks(2)
def test_many_parameters_take_few_calls(comm: Communicator) -> None:
    def calls() -> int:
        return sum(
            record.operation == "all_reduce"
            for group in read_process(os.getpid())
            for rank in group.ranks
            if rank.pid == os.getpid()
            for record in rank.records
        )

    parameters = [torch.nn.Parameter(torch.zeros(100)) for _ in range(200)]
    for parameter in parameters:
        parameter.grad = torch.ones(100)
    before = calls()
    sync_gradients(parameters, bucket_bytes=2**20)
    assert calls() == before + 1
