"""Calls on CUDA tensors, as far as a machine without a GPU can test them: which path a call takes,
the lifetime of mappings, the conductor's work in other processes' memory, and rejected calls. The
driver is replaced at its one import (tests/replaced_driver.py); processes and their memory are
real."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ranks import RankPool, attempt
from unisono.comm.communicator import Communicator
from unisono.comm.cuda.routing import (
    RankGpu,
    choose_way,
    decode_gpu,
    describe_no_way,
    why_no_mapping,
)
from unisono.comm.factory import connect_on_host
from unisono.comm.meeting.board import FileBoard
from unisono.errors import CollectiveMismatch, GroupAborted

FLOATS = 5000


def gpu(host: str, uuid: str, refusal: str = "") -> RankGpu:
    return RankGpu(host, uuid, "NVIDIA H200", f"{host}{uuid}", refusal)


# -- ways ------------------------------------------------------------------------------------------


def test_ranks_that_share_a_gpu_take_ours() -> None:
    assert choose_way([gpu("a", "x")] * 3) == "shared"


def test_ranks_with_a_gpu_each_take_nccl_on_one_host_or_several() -> None:
    assert choose_way([gpu("a", "x"), gpu("a", "y")]) == "nccl"
    assert choose_way([gpu("a", "x"), gpu("b", "y")]) == "nccl"


def test_the_rest_is_refused_by_name() -> None:
    gpus = [gpu("a", "x"), gpu("a", "x"), gpu("b", "y")]
    assert choose_way(gpus) is None
    text = describe_no_way(gpus)
    for said in ("ranks 0 and 1 on NVIDIA H200 x of host a", "rank 2 on NVIDIA H200 y of host b"):
        assert said in text


def test_what_ranks_tell_of_their_gpus_survives_the_way() -> None:
    assert decode_gpu(gpu("a", "x", "no").encode()) == gpu("a", "x", "no")


def test_one_rank_without_mappings_is_named() -> None:
    assert why_no_mapping([gpu("a", "x")] * 2) == ""
    assert why_no_mapping([gpu("a", "x"), gpu("a", "x", "MIG")]) == "rank 1: MIG"


def test_nothing_of_cuda_is_loaded_before_the_first_cuda_tensor() -> None:
    code = (
        "import sys, unisono, torch; comm = unisono.init(); comm.all_reduce(torch.ones(2)); "
        "print([name for name in sys.modules if 'comm.cuda' in name or name.startswith('cuda')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


# -- memory of a GPU that is not torch's -----------------------------------------------------------


class DeviceArray:
    """An array of another library on a GPU, as DLPack shows it: with CUDA as its device."""

    dtype = numpy.dtype("float64")

    def __dlpack__(self) -> Any:
        described = numpy.zeros(2).__dlpack__()
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # the device's type follows the data's address
        ctypes.c_int32.from_address(address(described, b"dltensor") + 8).value = 2
        return described


@pytest.mark.ranks(2)
def test_an_array_on_a_gpu_is_refused_by_all(comm: Communicator) -> None:
    for call in (
        lambda: comm.all_reduce(DeviceArray()),  # type: ignore[arg-type]
        lambda: comm.all_gather(numpy.empty(4), DeviceArray()),  # type: ignore[arg-type]
        lambda: comm.broadcast([DeviceArray()], 0, async_op=True),  # type: ignore[list-item]
    ):
        with pytest.raises(TypeError, match="only torch tensors may be on a GPU"):
            call()
    with pytest.raises(TypeError, match="DeviceArray"):
        comm.send(DeviceArray(), comm.next)  # type: ignore[arg-type]
    comm.all_reduce(there := numpy.ones(2))
    assert there.tolist() == [2, 2]


@pytest.mark.ranks(2)
def test_one_rank_with_an_array_on_a_gpu_ends_the_call_for_all(comm: Communicator) -> None:
    with comm.split([0, 1], label="one of two") as group:
        tensor: Any = DeviceArray() if comm.rank else numpy.ones(2)
        with pytest.raises(TypeError if comm.rank else CollectiveMismatch):
            group.all_reduce(tensor)


# -- a conductor in others' memory -----------------------------------------------------------------


class Rank:
    """One rank with a replaced driver, and an orchestra that has met its peers."""

    def __init__(self, comm: Communicator, folder: str) -> None:
        import replaced_driver

        os.environ["REPLACED_DRIVER_FOLDER"] = folder
        self.driver = replaced_driver.install()
        self.driver.log.clear()
        self.driver.refuses_export = False
        from unisono.collectives.objects import all_gather_object
        from unisono.comm.cuda.conducting import Flags, Orchestra, flags_bytes
        from unisono.comm.cuda.driver import load_driver
        from unisono.comm.cuda.regions import ExportedMemory

        self.comm, self.folder = comm, folder
        self.exported = ExportedMemory(load_driver())
        self._gather = all_gather_object
        owners = all_gather_object(f"process {os.getpid()}", comm)
        memory = comm.transport.allocate(flags_bytes(comm.size))
        assert memory is not None
        group = comm.transport.group  # type: ignore[attr-defined]
        self.flags = Flags(load_driver(), group, comm.rank, comm.size, memory)
        self.orchestra = Orchestra(load_driver(), comm.rank, owners, self.flags)

    def allocate(self, *values: float) -> int:
        """Memory that begins with these values."""
        base: int = self.driver.allocate(4 * FLOATS, self.folder)
        self.driver.view(base, len(values), numpy.float32)[:] = values
        return base

    def call(self, rows: list[tuple[int, int]], make_tasks: Any) -> str:
        """One call: meet, let the conductor work, follow. Returns what the conductor could not
        open."""
        from unisono.comm.cuda.driver import DriverError
        from unisono.comm.cuda.regions import decode_memory, encode_memory

        self.orchestra.arrive(0)
        mine = encode_memory(self.exported.describe(rows), 4)
        memory = [decode_memory(row, 4) for row in self._gather(mine, self.comm)]
        refusal = ""
        self.orchestra.forget(memory)
        if self.comm.rank == 0:
            try:
                located = self.orchestra.locate(memory, make_tasks())
            except DriverError as error:
                refusal = error.code
            else:
                self.orchestra.conduct(located, 0)
        refusal = self._gather(refusal, self.comm)[0]
        if not refusal:
            self.orchestra.follow(0)
        return str(refusal)


def all_reduce(size: int, count: int) -> Any:
    from unisono.comm.cuda.conducting import Task
    from unisono.comm.reductions import Reduction

    everyone = [(rank, 0, 0) for rank in range(size)]
    return lambda: [Task(everyone, everyone, 4 * count, Reduction("sum"), "float32")]


def test_the_conductor_reduces_in_everybodys_memory(
    cuda_pool: RankPool, memory_folder: str
) -> None:
    assert cuda_pool.run(reduce_and_copy, 3, memory_folder) == [None] * 3


def reduce_and_copy(comm: Communicator, folder: str) -> None:
    from unisono.comm.cuda.conducting import Task

    rank = Rank(comm, folder)
    base = rank.allocate(*(10.0**comm.rank * number for number in range(1, 4)))
    row = base + 4, 8  # the second and third number
    assert rank.call([row], all_reduce(comm.size, 2)) == ""
    first = 10.0**comm.rank
    assert rank.driver.view(base, 4, numpy.float32).tolist() == [first, 222, 333, 0]

    # each rank's number to the others, pair by pair, as in an all_gather
    output = rank.allocate(-1, -1, -1, -1)
    tasks = [Task([(s, 0, 0)], [(r, 1, 4 * s) for r in range(3)], 4) for s in range(3)]
    assert rank.call([(base, 4), (output, 12)], lambda: tasks) == ""
    assert rank.driver.view(output, 4, numpy.float32).tolist() == [1, 10, 100, -1]
    rank.orchestra.close()
    opened = [line for line in rank.driver.log if line.startswith("open")]
    closed = [line for line in rank.driver.log if line.startswith("close")]
    assert len(opened) == len(closed) == (4 if comm.rank == 0 else 0)


def test_memory_is_opened_once_and_closed_when_it_has_gone(
    cuda_pool: RankPool, memory_folder: str
) -> None:
    assert cuda_pool.run(free_and_allocate, 2, memory_folder) == [None] * 2


def free_and_allocate(comm: Communicator, folder: str) -> None:
    from unisono.comm.cuda.conducting import mappings_of_this_process

    rank = Rank(comm, folder)
    for turn in range(4):
        base = rank.allocate(1.0, 2.0)
        for _ in range(3):
            assert rank.call([(base, 8)], all_reduce(2, 2)) == ""
        assert rank.driver.view(base, 2, numpy.float32).tolist() == [8, 16], turn
        rank.driver.free(base)
    kept = rank.allocate(1.0)
    for _ in range(3):  # every call checks one allocation
        rank.call([(kept, 4)], all_reduce(2, 1))
    if comm.rank == 0:
        assert len(mappings_of_this_process()) == 1
        assert sum(line.startswith("open") for line in rank.driver.log) == 5
    rank.orchestra.close()
    assert len(mappings_of_this_process()) == 0


def test_two_groups_share_what_is_open(cuda_pool: RankPool, memory_folder: str) -> None:
    assert cuda_pool.run(use_two_groups, 2, memory_folder) == [None] * 2


def use_two_groups(comm: Communicator, folder: str) -> None:
    from unisono.comm.cuda.conducting import mappings_of_this_process

    first = Rank(comm, folder)
    with comm.split([0, 1], label="second") as group:
        second = Rank(group, folder)
        base = first.allocate(1.0)
        for rank in (first, second, first):  # the driver refuses to open a handle twice
            assert rank.call([(base, 4)], all_reduce(2, 1)) == ""
        assert first.driver.view(base, 1, numpy.float32).tolist() == [8]
        first.orchestra.close()
        assert len(mappings_of_this_process()) == (1 if comm.rank == 0 else 0)
        assert second.call([(base, 4)], all_reduce(2, 1)) == ""
        second.orchestra.close()
    assert len(mappings_of_this_process()) == 0


def test_memory_that_is_held_stays_open(cuda_pool: RankPool, memory_folder: str) -> None:
    assert cuda_pool.run(hold_memory, 2, memory_folder) == [None] * 2


def hold_memory(comm: Communicator, folder: str) -> None:
    """As engines hold a trainer's weights while a group uses them, too."""
    from unisono.collectives.objects import all_gather_object
    from unisono.comm.cuda.conducting import mappings_of_this_process
    from unisono.comm.cuda.regions import decode_memory, encode_memory

    rank = Rank(comm, folder)
    base = rank.allocate(3.0)
    told = all_gather_object(encode_memory(rank.exported.describe([(base, 4)]), 1), comm)
    (region,) = decode_memory(told[1], 1).regions
    owner = f"process {all_gather_object(os.getpid(), comm)[1]}"
    mappings = mappings_of_this_process()
    assert rank.call([(base, 4)], all_reduce(2, 1)) == ""
    if comm.rank == 0:
        address = mappings.hold(owner, region)
        assert address == mappings.find(owner, region) == mappings.hold(owner, region)
    comm.barrier()
    rank.driver.free(base)
    base = rank.allocate(1.0)
    for _ in range(3):  # the owner says that it has freed it
        assert rank.call([(base, 4)], all_reduce(2, 1)) == ""
    if comm.rank == 0:
        assert len(mappings) == 2
        assert rank.driver.view(address, 1, numpy.float32).tolist() == [6]
        mappings.let_go(owner, region.number)
        assert len(mappings) == 2
        mappings.let_go(owner, region.number)
        assert len(mappings) == 1
    rank.orchestra.close()
    assert len(mappings) == 0


def test_memory_that_cannot_be_opened_is_told_before_anything_changes(
    cuda_pool: RankPool, memory_folder: str
) -> None:
    assert cuda_pool.run(lose_memory, 2, memory_folder) == [None] * 2


def lose_memory(comm: Communicator, folder: str) -> None:
    rank = Rank(comm, folder)
    base = rank.allocate(1.0)
    if comm.rank == 1:
        for file in Path(folder).iterdir():
            if file == rank.driver._own[base].path:
                file.unlink()
    comm.barrier()
    assert rank.call([(base, 4)], all_reduce(2, 1)) == "CUDA_ERROR_MAP_FAILED"
    assert rank.driver.view(base, 1, numpy.float32).tolist() == [1]
    rank.orchestra.close()


def test_a_rank_whose_memory_is_not_for_others_says_so(
    cuda_pool: RankPool, memory_folder: str
) -> None:
    assert cuda_pool.run(refuse_export, 1, memory_folder) == [None]


def refuse_export(comm: Communicator, folder: str) -> None:
    rank = Rank(comm, folder)
    rank.driver.refuses_export = True
    memory = rank.exported.describe([(rank.allocate(1.0), 4), (0, 0)])
    assert not memory.can_map
    assert "cuIpcGetMemHandle" in str(rank.exported.refusal)
    assert isinstance(attempt(rank.exported._driver.allocation_of, 5), RuntimeError)


# -- expandable segments ---------------------------------------------------------------------------


def test_the_conductor_works_in_expandable_segments(
    cuda_pool: RankPool, memory_folder: str
) -> None:
    assert cuda_pool.run(reduce_in_segments, 3, memory_folder) == [None] * 3


def reduce_in_segments(comm: Communicator, folder: str) -> None:
    from unisono.comm.cuda.conducting import mappings_of_this_process

    rank = Rank(comm, folder)
    view, pieces = rank.driver.view, 150  # more than fit into one message
    floats = pieces * rank.driver.PIECE_BYTES // 4
    base = rank.driver.expand(4 * floats, folder)
    descriptors = len(os.listdir("/proc/self/fd"))
    view(base, floats, numpy.float32)[:] = numpy.arange(floats) + comm.rank
    row = base + 4, 4 * (floats - 1)
    for _ in range(3):
        assert rank.call([row], all_reduce(3, floats - 1)) == ""
    expected = 9 * (3 * numpy.arange(floats, dtype=numpy.float32) + 3)
    expected[0] = comm.rank
    assert numpy.array_equal(view(base, floats, numpy.float32), expected)
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1  # the rendezvous server
    assert rank.driver.log == (["open a segment"] * 2 if comm.rank == 0 else [])

    # A piece in the middle was freed, and another took its place.
    middle = base + 70 * rank.driver.PIECE_BYTES
    rank.driver.free(middle)
    rank.driver.expand(4 * floats, folder, base)
    view(base, floats, numpy.float32)[:] = 1
    for _ in range(3):
        assert rank.call([row], all_reduce(3, floats - 1)) == ""
    assert view(base, floats, numpy.float32)[1:].tolist() == [27] * (floats - 1)
    if comm.rank == 0:
        assert rank.driver.log.count("open a segment") == 4
        assert len(mappings_of_this_process()) == rank.driver.log.count("close a segment") == 2
    rank.orchestra.close()
    assert len(mappings_of_this_process()) == 0


def test_a_segment_whose_owner_gives_nothing_out_is_told_before_anything_changes(
    cuda_pool: RankPool, memory_folder: str
) -> None:
    assert cuda_pool.run(refuse_pieces, 2, memory_folder) == [None] * 2


def refuse_pieces(comm: Communicator, folder: str) -> None:
    rank = Rank(comm, folder)
    base = rank.driver.expand(4 * FLOATS, folder)
    rank.driver.view(base, 1, numpy.float32)[:] = 1
    if comm.rank == 1:
        pieces = list(rank.driver._own.values())
        pieces[-1].path.rename(pieces[-1].path.with_name("away"))
    comm.barrier()
    assert "cuMemExportToShareableHandle" in rank.call([(base, 4 * FLOATS)], all_reduce(2, 1))
    assert rank.driver.view(base, 1, numpy.float32).tolist() == [1]
    opened = ["open a segment", "close a segment"]
    assert rank.driver.log == (opened if comm.rank == 0 else [])
    rank.orchestra.close()


# -- flags of streams ------------------------------------------------------------------------------


def test_nobody_waits_for_the_stream_of_a_killed_rank(
    fresh_pool: RankPool, memory_folder: str
) -> None:
    outcomes = fresh_pool.outcomes(lose_a_rank, 3, memory_folder, connected=False)
    assert [outcomes[rank].error for rank in (0, 1)] == [None, None]


def lose_a_rank(rank: int, size: int, path: str, folder: str) -> None:
    comm = connect_on_host(FileBoard(path), rank, size)
    member = Rank(comm, folder)
    base = member.allocate(1.0)
    assert member.call([(base, 4)], all_reduce(size, 1)) == ""
    comm.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32"):  # the flag is not set yet
        member.flags.wait(0, rank, 2)
    end_s = time.monotonic() + 10
    while attempt(member.flags.wait, 0, 2, 1000) is not None:
        assert time.monotonic() < end_s, "the flag of the dead rank is as it was"
        time.sleep(0.001)
    found = [int(line[0]) for line in member.flags._shared]
    assert found == [1, 1, 1 + (1 << 30)]  # and only once, though two ranks saw it
    member.orchestra.close()
    comm.close()


def test_flags_come_in_order_from_several_streams(cuda_pool: RankPool, memory_folder: str) -> None:
    assert cuda_pool.run(use_two_streams, 1, memory_folder) == [None]


def use_two_streams(comm: Communicator, folder: str) -> None:
    rank = Rank(comm, folder)
    mine = rank.flags._shared[0]
    rank.flags.write(1, 7)
    mine[0] = 6  # as if the first stream had not come this far
    error = attempt(rank.flags.write, 2, 8)
    assert "cuStreamWaitValue32" in str(error)
    assert mine[0] == 6
    rank.flags.write(1, (1 << 32) - 1)
    rank.flags.write(2, 0)  # the next number, at the end of 32 bits
    assert mine[0] == 0
    rank.flags.release()
    assert mine[0] == 1 << 30
    rank.orchestra.close()


def test_a_gpu_that_cannot_have_the_flags_says_so(cuda_pool: RankPool, memory_folder: str) -> None:
    assert cuda_pool.run(refuse_host_memory, 1, memory_folder) == [None]


def refuse_host_memory(comm: Communicator, folder: str) -> None:
    from unisono.comm.cuda.conducting import Flags

    rank = Rank(comm, folder)
    rank.driver.refuses_host_memory = True
    memory = comm.transport.allocate(64)
    assert memory is not None
    error = attempt(Flags, rank.flags._driver, rank.flags._group, 0, 1, memory)
    rank.driver.refuses_host_memory = False
    assert "cuMemHostRegister" in str(error)
    rank.orchestra.close()


# -- pinned memory ---------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_wait_for_the_own_gpu_ends_with_the_group(comm: Communicator) -> None:
    """The GPU never finishes here; rank 1 ends the group while rank 0 waits."""
    import replaced_driver

    replaced_driver.install()
    from unisono.comm.cuda.driver import Driver

    driver, asked = Driver(), []
    driver._query = lambda stream: (replaced_driver.CUresult.CUDA_ERROR_NOT_READY,)
    with comm.split([0, 1], label="with a busy GPU") as group:
        if comm.rank:
            comm.barrier()
            group.abort("enough")
            return

        def check() -> None:
            if not asked:
                comm.barrier()
            asked.append(1)
            group.barrier() if group.errored else None

        with pytest.raises(GroupAborted, match="enough"):
            driver.finish(0, check)


class CopyingDriver:
    """What PinnedStaging asks of the driver, with CPU memory in place of a GPU's."""

    def finish(self, stream: int, check: Any) -> None:
        pass

    def open_host_memory(self, address: int, size: int) -> int:
        return address

    def copy_to_host(self, host: int, device: int, size: int, stream: int) -> None:
        ctypes.memmove(host, device, size)

    def copy_to_device(self, device: int, host: int, size: int, stream: int) -> None:
        ctypes.memmove(device, host, size)

    def copy_rows_to_device(
        self, device: int, host: int, width: int, height: int, stream: int
    ) -> None:
        for row in range(height):
            ctypes.memmove(device + row * width, host + 2 * row * width, width)


def test_pinned_memory_made_in_inference_mode_serves_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls on rows of an odd number of bytes write to it through torch, in any autograd mode."""
    from unisono.comm.cuda.staging import PinnedStaging

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, pin_memory, **more: empty(*given, **more))
    staging = PinnedStaging(CopyingDriver(), 4096, lambda: None)  # type: ignore[arg-type]
    for is_inference in (True, False, True):
        for count, dtype in ((17, torch.uint8), (3, torch.float32), (9, torch.uint8)):
            with torch.inference_mode(is_inference):
                row = torch.ones(count).to(dtype)
                staging.exchange(row, 0, lambda host: host.numpy().__iadd__(1))
                assert row.eq(2).all()
                staging.start(0)
                taken = staging.take(row)
                assert taken.eq(2).all()
                staging.give(row, taken.add_(1))
                assert row.eq(3).all()


@pytest.mark.ranks(3)
def test_large_rows_pass_through_two_buffers(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from unisono.comm.cuda import staging

    monkeypatch.setattr(staging, "_BUFFER_BYTES", 1000)
    memory = comm.transport.allocate(0 if comm.rank else staging.RELAY_BYTES)
    assert memory is not None
    relay = staging.Relay(CopyingDriver(), memory)  # type: ignore[arg-type]
    for turn, counts in enumerate([(7, 5400, 0, 1), (3, 997, 1000, 2000), (1,), (999, 2)]):
        rows = [torch.full((count,), 7 * comm.rank + turn).to(torch.uint8) for count in counts]
        for row in rows:
            row += torch.arange(row.numel()).to(torch.uint8)
        expected = [row + (7 * (turn % 3 - comm.rank)) for row in rows]
        relay.carry(rows, comm.rank == turn % 3, 0, comm.barrier, lambda: None)
        assert all(map(torch.equal, rows, expected)), turn
