"""The first call of a group on CUDA tensors: the ranks exchange which GPUs they have. On several
hosts NCCL moves the tensors, if every rank has its own GPU; messages go through CPU memory."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from unisono.comm.cuda.calls import CudaCalls
from unisono.comm.cuda.conducting import Flags, Orchestra, flags_bytes
from unisono.comm.cuda.cuda_transport import Cuda
from unisono.comm.cuda.driver import Driver, DriverError, DriverMissing, load_driver
from unisono.comm.cuda.kernels import MOST_ROWS
from unisono.comm.cuda.routing import (
    SHARED,
    RankGpu,
    choose_way,
    decode_gpu,
    describe_no_way,
    process_token,
    why_no_mapping,
)
from unisono.comm.engine import GPU_MARK
from unisono.comm.engine.numbers import Operation
from unisono.comm.transport import Transport
from unisono.errors import SegmentError

if TYPE_CHECKING:
    from unisono.comm.shared_memory.engine_transport import EngineTransport

_DESCRIPTION_BYTES = 1024
_cuda: Any = torch.cuda  # torch has no types for it
_dist: Any = dist


def meet_on_gpus(comm: EngineTransport, device: torch.device, operation: Operation) -> Transport:
    """The transport for this group's calls on CUDA tensors. All ranks call it with their first
    one. Raises ValueError, on all of them, if their GPUs allow none."""
    with _cuda.device(device):
        driver, refusal = _prepare(comm)
        properties = _cuda.get_device_properties(device)
        mine = RankGpu(
            comm.host_names[comm.rank],
            str(properties.uuid),
            properties.name,
            process_token(),
            refusal,
        )
        gpus = exchange_gpus(comm, mine, operation)
        way = choose_way(gpus)
        if way is None:
            raise ValueError(describe_no_way(gpus))
        if way != SHARED:
            return _connect_nccl(comm)
        why = why_no_mapping(gpus)
        orchestra = None
        if driver is not None and not why:
            flags, refusal = _share_flags(comm, driver)
            why = why_no_mapping(exchange_gpus(comm, mine._replace(refusal=refusal), operation))
            if flags is not None and not why:
                orchestra = Orchestra(driver, comm.rank, [gpu.token for gpu in gpus], flags)
            elif flags is not None:
                flags.close()
    calls = CudaCalls(comm, device, driver, orchestra)
    if why:
        calls.warn_of_staging(why)
    return Cuda(comm, calls)


def _prepare(comm: EngineTransport) -> tuple[Driver | None, str]:
    """The driver, and why one rank cannot work in all ranks' memory; "": it can."""
    _cuda.current_stream().query()  # so that this thread has a context
    try:
        driver = load_driver()
    except DriverMissing as error:
        return None, f"cuda-bindings is not available: {error}"
    return driver, f"more than {MOST_ROWS} ranks share the GPU" if comm.size > MOST_ROWS else ""


def _share_flags(comm: EngineTransport, driver: Driver) -> tuple[Flags | None, str]:
    """Flags of all ranks, in memory of rank 0; or why this rank has none. All ranks call it."""
    try:
        memory = comm.allocate(0 if comm.rank else flags_bytes(comm.size))
        if memory is None:
            return None, "the ranks share no memory: they are in different PID namespaces"
        return Flags(driver, comm.group, comm.rank, comm.size, memory), ""
    except (SegmentError, DriverError) as error:
        return None, str(error)


def exchange_gpus(comm: EngineTransport, mine: RankGpu, operation: Operation) -> list[RankGpu]:
    row = bytearray(mine.encode().ljust(_DESCRIPTION_BYTES))
    message = torch.frombuffer(row, dtype=torch.uint8)
    everyone = torch.empty(comm.size, _DESCRIPTION_BYTES, dtype=torch.uint8)
    status = comm.group.run(Operation.ALL_GATHER, everyone, message, GPU_MARK, None)
    if status:
        raise comm.exceptions.call_error(status, operation)
    return [decode_gpu(bytes(row.tolist()).rstrip()) for row in everyone]


def _connect_nccl(comm: EngineTransport) -> Transport:
    """An NCCL group of the same ranks. NCCL connects at its first call."""
    from unisono.comm.over_torch.stateless import connect_stateless

    store = _store_in_file(comm) if comm.is_on_one_host else comm.open_store()
    limits = comm.timeout_s, comm.timeout_s
    return connect_stateless("nccl", store, comm.name, comm.rank, comm.size, *limits)


def _store_in_file(comm: EngineTransport) -> Any:
    """A store of the ranks of one host. torch removes its file when the last rank has left."""
    path = torch.zeros(512, dtype=torch.uint8)
    if comm.rank == 0:
        with tempfile.NamedTemporaryFile(prefix="unisono-nccl-", delete=False) as file:
            name = file.name.encode()
        path[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    status = comm.group.run(Operation.BROADCAST, path, path, 0, None)
    if status:
        raise comm.exceptions.call_error(status, Operation.BROADCAST)
    where = bytes(path.tolist()).rstrip(b"\0").decode()
    return _dist.FileStore(where, comm.size)
