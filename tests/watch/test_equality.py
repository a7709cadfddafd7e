"""Ranks whose numbers differ are named, with the tensor; what is meant to differ is not."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unisono import watch
from unisono.watch.equality import fingerprint, replicated
from user_programs import WriteProgram


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex128])
def test_a_fingerprint_knows_every_bit_and_its_place(dtype: torch.dtype) -> None:
    tensor = (torch.randn(70, 61) > 0).to(dtype)
    same = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == same
    assert fingerprint(tensor.t().contiguous().t()) == same  # in any memory layout
    for place in (0, 61, 70 * 61 - 1):
        other = tensor.clone().view(-1)
        other[place] = 1 - int(other[place].real)
        assert fingerprint(other) != same
    assert fingerprint(torch.arange(5)) != fingerprint(torch.arange(5).flip(0))
    assert fingerprint(torch.empty(0, dtype=dtype)) == 0


def test_shards_and_statistics_are_left_out_and_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].weight.tensor_model_parallel = True  # type: ignore[assignment]
    model._ddp_params_and_buffers_to_ignore = ["1.bias"]  # type: ignore[assignment]
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    found, skipped = replicated(model, (), [optimizer])
    assert skipped == {
        "0.weight": "a shard",
        "1.bias": "skipped on request",
        "1.running_mean": "statistics of each rank's own batches",
        "1.running_var": "statistics of each rank's own batches",
        "1.num_batches_tracked": "statistics of each rank's own batches",
    }
    assert [*found][:2] == ["0.bias", "1.weight"]
    assert {*found} >= {"exp_avg of 0.bias", "exp_avg_sq of 1.weight", "step of 0.bias"}
    assert not any("0.weight" in name for name in found)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_of_every_kind_are_read_or_left_out() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.Linear(2, 2))
    odd = {
        "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "negative": torch._neg_view(torch.arange(3.0)),
        "quantised": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
    }
    for name, tensor in odd.items():
        model[1].register_buffer(name, tensor)
    found, skipped = replicated(model)
    left_out = ["0.bias", "0.weight", "1.meta", "1.quantised", "1.sparse"]
    assert skipped == dict.fromkeys(left_out, "not a dense tensor")
    for name in ("conjugate", "negative"):
        assert fingerprint(found[f"1.{name}"]) == fingerprint(odd[name].clone())


@pytest.mark.ranks(2)
def test_tensor_parallelism(process_group: Any) -> None:
    """What is replicated is compared, and so is its state in optimizers."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    mesh = DeviceMesh.from_group(process_group, "cpu")
    model = parallelize_module(torch.nn.Linear(4, 3), mesh, RowwiseParallel())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    found, skipped = replicated(model, (), [optimizer])
    assert skipped == {"weight": "a shard"}
    assert {*found} == {"bias", "exp_avg of bias", "exp_avg_sq of bias", "step of bias"}
    assert not any(hasattr(tensor, "placements") for tensor in found.values())


class Unreadable(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.detach:
            raise NotImplementedError("of a library that packs its numbers")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("every", [0, 2.5, "3"])
def test_models_are_compared_after_a_whole_number_of_passes(every: Any) -> None:
    with pytest.raises(ValueError, match="every must be a whole number, 1 or more"):
        watch.check_equal(torch.nn.Identity(), every=every)
    watch.stop()


@pytest.mark.ranks(2)
def test_what_cannot_be_read_or_is_on_one_rank_only_ends_no_program(process_group: Any) -> None:
    watch.start()
    model = Rotary() if dist.get_rank() else torch.nn.Linear(4, 1)
    model.register_buffer("packed", torch.ones(2).as_subclass(Unreadable))
    watch.check_equal(model, every=1)
    train(model, 2)
    model = torch.nn.Identity() if dist.get_rank() else torch.nn.Linear(4, 4)
    watch.check_equal(model, every=1)
    model(torch.ones(2, 4))
    assert differences() == []


class Rotary(torch.nn.Module):
    inv_freq: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(4.0), persistent=False)
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.linear(x * self.inv_freq))


def train(model: torch.nn.Module, passes: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(passes):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def differences() -> list[watch.Report]:
    return [report for report in watch.reports() if report.kind == "differs"]


@pytest.mark.ranks(2, backend="gloo")
def test_an_optimizer_that_was_replaced_does_not_count(process_group: Any) -> None:
    """Python may collect it earlier on one rank than on another."""
    watch.start()
    model = Rotary()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    watch.check_equal(model, every=3)
    former = [torch.optim.SGD(model.parameters(), 0.01, momentum=0.9) for _ in range(8)]
    model(torch.ones(2, 4)).sum().backward()
    for optimizer in former:
        optimizer.step()
        if dist.get_rank() == 1:
            optimizer.state.clear()  # as if it were gone
    train(model, 3)
    assert differences() == []


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.provokes
def test_a_buffer_that_differs_is_named(process_group: Any) -> None:
    watch.start()
    model = Rotary()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    assert watch.check_equal(model, every=2) == {}
    train(model, 3)
    assert differences() == []
    if dist.get_rank() == 2:
        model.inv_freq[1] = 7
    train(model, 3)
    (report,) = differences()
    assert report.verdict == (
        "rank 2's inv_freq differs from the others' since a step between 2 and 4 "
        "(3 of 5 tensors do)"
    )
    assert report.culprits == (2,)
    assert "model(torch.ones(2, 4))" in linecache.getline(
        __file__, int(report.site.rpartition(":")[2])
    )


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_two_ranks_with_other_seeds_differ_from_step_0(process_group: Any) -> None:
    watch.start()
    torch.manual_seed(dist.get_rank())
    model = Rotary()
    watch.check_equal(model)
    train(model, 1)
    (report,) = differences()
    assert report.verdict == (
        "linear.weight of ranks 0 and 1 differs since step 0 (2 of 3 tensors do)"
    )
    assert report.culprits == (0, 1)


@pytest.mark.ranks(2)
def test_a_ddp_whose_statistics_differ_is_in_order(process_group: Any) -> None:
    watch.start()
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.BatchNorm1d(4), Rotary()))
    watch.check_equal(model, every=1)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        model(torch.randn(8, 4) + dist.get_rank() + step).sum().backward()
        optimizer.step()
    assert differences() == []


PROGRAM = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
if dist.get_rank() == 1:
    with torch.no_grad():
        model.module.bias += 1
model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
"""


def test_unisono_run_compares_every_ddp(program: WriteProgram) -> None:
    done = program(PROGRAM).run(before=("-m", "unisono", "run", "-n", "3", "--check-equal"))
    assert done.returncode == 0, done.stderr
    verdict = "unisono.watch: rank 1's bias differs from the others' since step 0"
    assert [line for line in done.stderr.splitlines() if verdict in line] == [f"[rank 0] {verdict}"]


@pytest.mark.ranks(2)
@pytest.mark.provokes
def test_a_tensor_written_before_its_send_is_over_is_named(process_group: Any) -> None:
    watch.start(check=True)
    group = dist.new_group([0, 1], backend="gloo")
    tensor = torch.ones(4)
    if dist.get_rank() == 0:
        work = dist.isend(tensor, 1, group)  # the line that the verdict names
        tensor.zero_()
        work.wait()
        dist.send(tensor, 1, group)
        (report,) = watch.reports()
        assert report.kind == "written"
        line = int(report.site.rpartition(":")[2])
        assert "the line that the verdict names" in linecache.getline(__file__, line)
        assert report.verdict.startswith("rank 0 wrote to the tensor of its send to rank 1 (")
    else:
        dist.recv(tensor, 0, group)
        dist.recv(tensor, 0, group)
    dist.destroy_process_group(group)
