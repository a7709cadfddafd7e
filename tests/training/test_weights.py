"""Weight updates: what arrives is what the trainer holds, whatever its shape, type and sharding."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from unisono import Communicator, WeightMismatch, WeightUpdateError
from unisono.training import WeightReceiver, WeightSender, WeightShard, weight_update
from unisono.training.weights.shards import Box
from unisono.training.weights.transfers import checksum
from unisono.world.world import resolve

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "odd": (3, 7, 5),
    "empty": (0, 4),
    "large": (70, 101),
    "wide": (1, 9001),
    "norm": (33,),
}
PACKED_OR_NOT = [4, 10_000]
"""Numbers of elements: small tensors travel in one row and are always copied out of it."""


def trainer_weights(version: int) -> dict[str, torch.Tensor]:
    """The trainer's weights in a version."""
    return {
        name: (torch.arange(math.prod(shape)) * 7.0 + len(name) * 3 + version * 11)
        .remainder(127)
        .reshape(shape)
        for name, shape in SHAPES.items()
    }


def empty_weights() -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, 255.0) for name, shape in SHAPES.items()}


def assert_has(weights: Any, version: int) -> None:
    for name, expected in trainer_weights(version).items():
        assert torch.equal(weights[name], expected), name


def endpoint(comm: Communicator, weights: Any, sender: Any = None, receiver: Any = None) -> Any:
    """Rank 0's sender, or an engine's receiver, each with its options."""
    if comm.rank == 0:
        return WeightSender(comm, weights, **(sender or {}))
    return WeightReceiver(comm, weights, **(receiver or {}))


# -- what travels ------------------------------------------------------------------------------


@pytest.mark.ranks([2, 3, 4, 8])
@pytest.mark.parametrize("transactional", [True, False])
def test_every_engine_has_the_trainers_weights(comm: Communicator, transactional: bool) -> None:
    if comm.rank == 0:
        weights = trainer_weights(1)
        with WeightSender(comm, weights, transactional=transactional, bucket_bytes=4096) as sender:
            assert sender.update().version == 1
            weights["odd"].copy_(trainer_weights(2)["odd"])
            weights.update(trainer_weights(2))
            assert sender.update().version == 2
            assert sender.update(version=40).version == 40
        return
    served = empty_weights()
    addresses = {name: tensor.data_ptr() for name, tensor in served.items()}
    with WeightReceiver(comm, served) as receiver:
        receiver.update()
        assert_has(served, 1)
        for version in (2, 40):
            receiver.update()
            assert_has(served, 2)
            assert receiver.version == version
    if not transactional:
        assert addresses == {name: tensor.data_ptr() for name, tensor in served.items()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_tensors_may_be_larger_than_a_bucket(comm: Communicator, bucket_bytes: int) -> None:
    full = torch.arange(105, dtype=torch.int16).reshape(5, 3, 7)
    weights = {"w": full if comm.rank == 0 else torch.zeros_like(full)}
    summary = endpoint(comm, weights, sender={"bucket_bytes": bucket_bytes}).update()
    assert (summary.bytes, summary.tensors) == (210, 1)
    assert summary.buckets == {1: 105, 100: 3, 1 << 20: 1}[bucket_bytes]
    assert torch.equal(weights["w"], full)


@pytest.mark.ranks(2)
def test_mixed_types_and_layouts(comm: Communicator) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    kinds = [torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64]
    kinds += [torch.float8_e4m3fn, torch.int64]
    held: dict[str, torch.Tensor] = {str(kind): base.to(kind) for kind in kinds}
    held |= {
        "transposed": base.t(),
        "every second": base[:, ::2],
        "expanded": base[:1].expand(3, 6),
    }
    mine = {name: torch.zeros_like(tensor).contiguous() for name, tensor in held.items()}
    mine["transposed"] = torch.zeros(6, 8)[:, ::2]  # strided here, too
    mine = held if comm.rank == 0 else mine
    endpoint(comm, mine, sender={"bucket_bytes": 64}).update()
    for name, tensor in held.items():
        same = mine[name].contiguous().view(torch.uint8) == tensor.contiguous().view(torch.uint8)
        assert same.all(), name


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transactional", [True, False])
def test_conversion_to_what_the_engines_hold(comm: Communicator, transactional: bool) -> None:
    values = torch.linspace(-3, 3, 1001)
    held = {"a": values, "b": values * 7, "steps": torch.arange(5), "c": values.to(torch.float64)}
    options = {"convert": True, "transactional": transactional, "bucket_bytes": 700}
    mine = {
        "a": torch.zeros(1001, dtype=torch.bfloat16),
        "b": torch.zeros(1001, dtype=torch.float32),
        "steps": torch.zeros(5, dtype=torch.int64),
        "c": torch.zeros(1001, dtype=torch.float16),
    }
    mine = held if comm.rank == 0 else mine
    endpoint(comm, mine, sender=options).update()
    for name, tensor in held.items():
        assert torch.equal(mine[name], tensor.to(mine[name].dtype)), name


@pytest.mark.ranks(2)
def test_a_module_and_what_it_ties(comm: Communicator) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(11, 4)
            self.norm = torch.nn.BatchNorm1d(4)
            self.head = torch.nn.Linear(4, 11, bias=False)
            self.head.weight = self.embed.weight

    torch.manual_seed(comm.rank)
    model = Model()
    names = ["embed.weight", "head.weight", "norm.running_mean", "norm.num_batches_tracked"]
    torch.manual_seed(0)
    expected = Model().state_dict()
    assert set(names) <= set(expected)
    if comm.rank == 0:
        summary = WeightSender(comm, model).update()
        sent = {name: tensor for name, tensor in expected.items() if name != "head.weight"}
        assert summary.bytes == sum(tensor.nbytes for tensor in sent.values()), "tied: sent once"
        return
    embed = model.embed.weight
    WeightReceiver(comm, model).update()
    assert model.embed.weight is embed is model.head.weight, "the parameters stay the same objects"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.ranks(3)
def test_tied_on_the_trainer_and_not_on_an_engine(comm: Communicator) -> None:
    shared = torch.arange(6.0) if comm.rank == 0 else torch.zeros(6)
    mine = {"a": shared, "b": shared, "c": shared}
    if comm.rank == 2:
        mine["b"] = torch.zeros(6)
    endpoint(comm, mine).update()
    assert all(torch.equal(tensor, torch.arange(6.0)) for tensor in mine.values())
    assert mine["a"] is mine["c"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", PACKED_OR_NOT)
def test_views_of_an_engines_weights_change_with_them(comm: Communicator, count: int) -> None:
    if comm.rank == 0:
        WeightSender(comm, {"q": torch.ones(count), "k": torch.full((count,), 2.0)}).update()
        return
    fused = torch.zeros(2 * count)
    WeightReceiver(comm, {"q": fused[:count], "k": fused[count:]}).update()
    assert fused.tolist() == [1.0] * count + [2.0] * count


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", PACKED_OR_NOT)
def test_memory_that_others_look_at_is_overwritten(comm: Communicator, count: int) -> None:
    """NumPy, and processes that share the engine's memory, see the new weights, too."""
    tensor, shared = torch.full((count,), 1.0 - comm.rank), torch.full((count,), 1.0 - comm.rank)
    shared.share_memory_()
    array, where = tensor.numpy(), shared.data_ptr()
    weight_update({"a": tensor, "b": shared}, comm)
    assert array.tolist() == [1] * count
    assert shared.tolist() == [1] * count
    assert shared.data_ptr() == where


@pytest.mark.ranks(3)
@pytest.mark.parametrize("transactional", [True, False])
def test_memory_that_cannot_be_written_is_refused_before_anything_moves(
    comm: Communicator, tmp_path: Path, transactional: bool
) -> None:
    weights = {"a": torch.full((5000,), comm.rank), "b": torch.full((5000,), comm.rank)}
    update = endpoint(comm, weights, {"transactional": transactional}).update
    writable = weights["b"].clone()
    numpy.save(tmp_path / "b.npy", writable.numpy())
    with warnings.catch_warnings():  # torch does not take note of it, and says so
        warnings.simplefilter("ignore", UserWarning)
        mapped = torch.from_numpy(numpy.load(tmp_path / "b.npy", mmap_mode="r"))
    wrong = {"in read-only": mapped, "expanded": writable[:1].expand(5000)}
    for version, why in enumerate(wrong, 1):  # the second time after an update
        if comm.rank == 2:
            weights["b"] = wrong[why]
        before = weights["a"].clone()
        with pytest.raises(WeightUpdateError, match=f"rank 2: .* 'b' is {why}") as caught:
            update()
        assert list(caught.value.failed) == [2]
        assert not caught.value.group_ended
        assert torch.equal(weights["a"], before)
        weights["b"] = writable
        if comm.rank == 0:
            weights["a"] += 1
        update()
        assert weights["a"].eq(version).all()
        assert weights["b"].eq(0).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("count", PACKED_OR_NOT)
def test_memory_that_a_trainer_has_freed(comm: Communicator, count: int) -> None:
    weights = {name: torch.full((count,), 1.0 - comm.rank) for name in "ab"}
    with endpoint(comm, weights) as party:
        party.update()
        if comm.rank == 0:
            weights["b"] = torch.ones(count)
            weights["b"].untyped_storage().resize_(0)
        with pytest.raises(WeightUpdateError, match=r"rank 0: .* 'b' has no memory") as caught:
            party.update()
        assert not caught.value.group_ended
        if comm.rank == 0:
            weights["b"] = torch.full((count,), 2.0)
        party.update()
        assert weights["b"].eq(2).all()


@pytest.mark.ranks(2)
def test_an_engine_without_weights_takes_what_comes(comm: Communicator) -> None:
    held = trainer_weights(3) | {"twin": torch.ones(2)}
    held["other"] = held["twin"]
    if comm.rank == 0:
        WeightSender(comm, held).update()
        return
    taken: dict[str, torch.Tensor] = {}
    WeightReceiver(comm, commit=taken.update).update()
    assert_has(taken, 3)
    assert taken["twin"] is taken["other"]


# -- shards --------------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_commit_that_only_reads_receives_into_the_same_memory(comm: Communicator) -> None:
    weights, seen = trainer_weights(0), []

    def commit(new: dict[str, torch.Tensor]) -> None:
        assert_has(new, version)
        seen.append({name: tensor.data_ptr() for name, tensor in new.items()})

    expected = {
        name: torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
        for name, tensor in weights.items()
    }
    mine = weights if comm.rank == 0 else expected
    with endpoint(comm, mine, receiver={"commit": commit, "reuse": True}) as end:
        for version in (1, 2, 3):
            weights.update(trainer_weights(version))
            end.update()
    assert all(where == seen[0] for where in seen)


@pytest.mark.ranks(6)
def test_sharded_senders_and_engines_with_shards_of_their_own(comm: Communicator) -> None:
    """Three trainer ranks hold uneven rows; two engines hold columns, one holds everything."""
    full = torch.arange(11 * 6, dtype=torch.float32).reshape(11, 6)
    rows = {0: slice(0, 4), 1: slice(4, 5), 2: slice(5, 11)}
    columns = {3: slice(0, 3), 4: slice(3, 6), 5: slice(0, 6)}
    if comm.rank < 3:
        mine = rows[comm.rank]
        weights: dict[str, Any] = {
            "w": WeightShard(full[mine].clone(), (11, 6), (mine.start, 0)),
            "same": torch.full((5,), 7.0),  # on every rank: one of them sends it
        }
        if comm.rank == 1:
            weights["only here"] = torch.ones(2, 2)
        for _ in range(2):
            WeightSender(comm, weights, bucket_bytes=40).update()
        return
    mine = columns[comm.rank]
    part = torch.zeros(11, mine.stop - mine.start)
    weights = {
        "w": WeightShard(part, (11, 6), (0, mine.start)),
        "same": torch.zeros(5),
        "only here": torch.zeros(2, 2),
    }
    summary = WeightReceiver(comm, weights).update()
    assert torch.equal(part, full[:, mine])
    assert weights["same"].eq(7).all()
    assert weights["only here"].eq(1).all()
    assert summary.bytes == part.nbytes + 5 * 4 + 4 * 4
    part.zero_()
    weight_update(weights, comm, src=range(3))
    assert torch.equal(part, full[:, mine])


@pytest.mark.ranks(4)
def test_dtensors_send_and_receive_as_they_lie(process_group: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    comm = resolve(process_group)
    full = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "side"))["half"]
    trains = comm.rank in (0, 2)  # ranks 0 and 2 are one mesh, 1 and 3 another
    by_rows = distribute_tensor(full if trains else full * 0, mesh, [Shard(0)])
    by_columns = distribute_tensor(full if trains else full * 0, mesh, [Shard(1)])
    copied = distribute_tensor(full.t().contiguous() * trains, mesh, [Replicate()])
    if trains:
        held = {"a": torch.nn.Parameter(by_rows), "b": by_columns, "c": copied}
        WeightSender(comm, held).update()
        return
    held = {"a": torch.nn.Parameter(by_columns), "b": by_rows, "c": torch.zeros(6, 7)}
    WeightReceiver(comm, held).update()
    assert torch.equal(held["a"].detach().full_tensor(), full)
    assert torch.equal(held["b"].full_tensor(), full)
    assert torch.equal(held["c"], full.t())


def test_boxes_cut_into_small_ones_lose_nothing() -> None:
    for shape in ((5, 3, 7), (1, 1, 9), (4,), ()):
        for most in (1, 2, 10, 1000):
            pieces = list(Box((10,) * len(shape), shape).split(most))
            seen = torch.zeros(shape)
            for piece in pieces:
                assert piece.count <= most
                where = tuple(
                    slice(begin - 10, begin - 10 + length)
                    for begin, length in zip(piece.offset, piece.shape, strict=True)
                )
                seen[where] += 1
            assert seen.eq(1).all()


# -- what does not fit -----------------------------------------------------------------------------


@pytest.mark.ranks(3)
def test_differences_are_shown_on_every_rank_before_anything_moves(comm: Communicator) -> None:
    held = {"a": torch.ones(2), "b": torch.ones(3, 4), "c": torch.ones(1), "d": torch.ones(4)}
    mine = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
    if comm.rank == 2:
        mine |= {"b": torch.zeros(4, 3), "e": torch.zeros(5), "d": mine["d"].double()}
        del mine["a"]
    party = endpoint(comm, mine if comm.rank else held)
    with pytest.raises(WeightMismatch) as caught:
        party.update()
    text = str(caught.value)
    assert "trainer and engines differ in 4 weight(s); nothing was moved" in text
    assert caught.value.differences[:2] == (
        ("a", "float32 (2,)", "rank 2: -"),
        ("b", "float32 (3, 4)", "rank 2: float32 (4, 3)"),
    )
    assert ("e", "-", "rank 2: float32 (5,)") in caught.value.differences
    if comm.rank:
        assert all(tensor.eq(0).all() for tensor in mine.values())
    comm.barrier()  # the group stays usable
    if comm.rank == 2:  # and an engine may take only a part
        less = {"b": torch.zeros(3, 4)}
        party = WeightReceiver(comm, less, partial=True)
    party.update()
    if comm.rank:
        assert (less if comm.rank == 2 else mine)["b"].eq(1).all()


@pytest.mark.ranks(3)
def test_other_ways_not_to_fit(comm: Communicator) -> None:
    half = torch.ones(2, 4)

    def attempt(senders: Any, mine: Any, match: str, kind: Any = WeightMismatch) -> None:
        if comm.rank < 2:
            party: Any = WeightSender(comm, senders[comm.rank])
        else:
            party = WeightReceiver(comm, mine)
        with pytest.raises(kind, match=match):
            party.update()

    whole = {"w": torch.zeros(4, 4)}
    shards = [{"w": WeightShard(half, (4, 4), (row, 0))} for row in (0, 1)]
    attempt(shards, whole, "the shards of ranks 0 and 1 overlap")
    attempt([shards[0], {}], whole, "8 elements are on no rank")
    attempt([{"w": half}, {"w": half.double()}], {"w": half}, "rank 1: float64")
    tie = torch.zeros(2)
    two = {"a": torch.ones(2), "b": torch.ones(2)}
    attempt([two, {}], {"a": tie, "b": tie}, "tied to a, but not on the trainer")
    attempt([{"w": "text"}, {}], whole, "rank 0: TypeError: .* is a str", WeightUpdateError)
    attempt([{0: half}, {}], whole, "rank 0: TypeError: .* and 0 is a int", WeightUpdateError)
    meta = {"w": torch.ones(4, 4, device="meta")}
    attempt([whole, {}], meta, "rank 2: TypeError: .* is on meta", WeightUpdateError)
    lazy = {"w": torch.ones(4, dtype=torch.complex64).conj()}
    attempt([lazy, {}], whole, "rank 0: TypeError: .* is a lazy conjugate", WeightUpdateError)

    def speechless() -> Iterator[Any]:
        yield "w", half
        raise AssertionError

    attempt([whole, {}], speechless(), "rank 2: AssertionError", WeightUpdateError)
    outside = {"w": WeightShard(half, (4, 4), (3, 0))}
    attempt([outside, {}], whole, r"\(2, 4\) at \(3, 0\) is not inside", WeightUpdateError)


@pytest.mark.ranks(2)
def test_roles_and_options_are_checked(comm: Communicator) -> None:
    with pytest.raises(WeightMismatch, match="needs senders and receivers"):
        WeightSender(comm, {"w": torch.ones(1)}).update()
    with pytest.raises(ValueError, match="bucket_bytes must be positive"):
        WeightSender(comm, {}, bucket_bytes=0)
    with pytest.raises(ValueError, match="needs a commit"):
        WeightReceiver(comm)
    party = endpoint(comm, {"w": torch.ones(1)}, {"transactional": False}, {"prepare": print})
    with pytest.raises(WeightUpdateError, match=r"rank 1: .*need a transactional update"):
        party.update()


# -- beside it ---------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_progress_and_summary(comm: Communicator) -> None:
    seen: list[tuple[int, int]] = []
    weights = trainer_weights(0)
    total = sum(tensor.nbytes for tensor in weights.values())

    def note(done: int, of: int) -> None:
        seen.append((done, of))

    sender = {"progress": note, "bucket_bytes": 5000}
    summary = endpoint(comm, weights, sender, {"progress": note}).update()
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    assert len(seen) == summary.buckets > 3
    assert (summary.bytes, summary.tensors) == (total, 6)  # an empty one is not sent
    assert summary.seconds > 0
    assert "GB/s" in str(summary)


@pytest.mark.ranks(2)
def test_weight_update_in_one_line(comm: Communicator) -> None:
    weights = trainer_weights(5) if comm.rank == 1 else empty_weights()
    options = {"checksum": False, "version": 8} if comm.rank == 1 else {"timeout_s": 20.0}
    assert weight_update(weights, comm, src=1, **options).version == 8
    assert_has(weights, 5)


@pytest.mark.ranks(3, backend="gloo")
def test_on_gloo(process_group: Any) -> None:
    comm = resolve(process_group)
    assert comm.backend == "gloo"
    if comm.rank == 0:
        sender = WeightSender(comm, trainer_weights(1), bucket_bytes=4096)
        assert sender.update().version == 1
        with pytest.raises(WeightUpdateError, match="rank 2: ValueError: no"):
            sender.update()
        sender.update()
        return
    served = empty_weights()
    calls: list[int] = []

    def prepare(staged: Any) -> None:
        calls.append(1)
        if comm.rank == 2 and len(calls) == 2:
            raise ValueError("no")

    receiver = WeightReceiver(comm, served, prepare=prepare)
    receiver.update()
    assert_has(served, 1)
    with pytest.raises(WeightUpdateError, match="rank 2: ValueError: no"):
        receiver.update()
    assert receiver.version == 1
    receiver.update()
    assert receiver.version == 2


def test_the_checksum_sees_every_change() -> None:
    data = torch.arange(3000, dtype=torch.int64)
    for index in (0, 511, 512, 2999):
        changed = data.clone()
        changed[index] ^= 1 << 40
        assert checksum([changed]) != checksum([data])
    swapped = torch.cat([data[512:1024], data[:512], data[1024:]])
    assert checksum([swapped]) != checksum([data]), "rows in the wrong place"
    odd = data.view(torch.uint8)[:4099]
    changed = odd.clone()
    changed[-1] ^= 1
    assert checksum([changed]) != checksum([odd])
    transposed = data.reshape(30, 100).t()
    assert checksum([transposed]) == checksum([transposed.clone()]) != checksum([data])
    assert checksum([data[:0], data]) == checksum([data])
    column = data.view(3, 1000)[:, ::2][:, 7:8]
    assert checksum([column]) == checksum([column.clone()])
    assert checksum([column[1:2]]) == checksum([data[1014:1015]])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("made", [False, True], ids=["made outside", "made inside"])
@pytest.mark.parametrize("updated", [False, True], ids=["updated outside", "updated inside"])
def test_weights_in_inference_mode(comm: Communicator, made: bool, updated: bool) -> None:
    """torch forbids writes to tensors created in inference mode, except in that mode."""
    with torch.inference_mode(made):
        weights = {name: torch.full((4,), 1.0 - comm.rank) for name in "abc"}
    view = weights["a"][:2]
    party = endpoint(comm, weights)
    for version in (1, 2):
        with torch.inference_mode(made):
            if comm.rank == 0:
                for tensor in weights.values():
                    tensor.fill_(version)
        with torch.inference_mode(updated):
            party.update()
        for tensor in (*weights.values(), view):
            assert tensor.unique().tolist() == [version]
            assert tensor.is_inference() == made, "a tensor stays what it was"
        assert party.version == version


@pytest.mark.ranks(3)
def test_an_adapter_has_versions_of_its_own(comm: Communicator) -> None:
    """Beside base weights that stay, over the same group; a failure leaves both as they are."""

    def adapter(version: int) -> dict[str, torch.Tensor]:
        shapes = {"q.lora_A": (2 + version, 8), "q.lora_B": (6, 2 + version)}  # of another rank
        return {name: torch.full(shape, float(version)) for name, shape in shapes.items()}

    if comm.rank == 0:
        sent: dict[str, torch.Tensor] = {}
        with WeightSender(comm, trainer_weights(1)) as base, WeightSender(comm, sent) as adapters:
            assert base.update().version == 1
            for version in (1, 2):
                sent.update(adapter(version))
                assert adapters.update().version == version
            sent.update(adapter(3))
            with pytest.raises(WeightUpdateError, match="rank 2: MemoryError"):
                adapters.update()
            assert base.update().version == 2
            assert adapters.update().version == 3
        return
    served, slots = empty_weights(), {}
    fails: list[int] = []

    def prepare(new: dict[str, torch.Tensor]) -> None:
        if fails and comm.rank == 2:
            raise MemoryError("no slot")

    with (
        WeightReceiver(comm, served) as base_receiver,
        WeightReceiver(comm, prepare=prepare, commit=slots.update) as adapter_receiver,
    ):
        base_receiver.update()
        for version in (1, 2):
            adapter_receiver.update()
            assert adapter_receiver.version == version
        fails.append(1)
        with pytest.raises(WeightUpdateError, match="no slot"):
            adapter_receiver.update()
        fails.clear()
        assert_has(served, 1)
        for name, tensor in adapter(2).items():
            assert torch.equal(slots[name], tensor), name
        assert (base_receiver.version, adapter_receiver.version) == (1, 2)
        base_receiver.update()
        adapter_receiver.update()
        assert (base_receiver.version, adapter_receiver.version) == (2, 3)
        assert torch.equal(slots["q.lora_A"], adapter(3)["q.lora_A"])
