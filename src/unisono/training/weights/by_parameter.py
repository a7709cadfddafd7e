"""Weight updates parameter by parameter, in the shape of vLLM's and OpenRLHF's calls.

For each parameter the workers are told name, dtype and shape by remote calls; the trainer
broadcasts and the workers receive. A worker has a model with `load_weights(pairs)`, like vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch

from unisono.collectives.encoding import torch_dtype
from unisono.comm.communicator import Communicator
from unisono.comm.tensors import dtype_name
from unisono.errors import WeightMismatch, WeightUpdateError
from unisono.training.weights.plan import differences_table, tensor_text
from unisono.training.weights.protocol import UpdateProtocol

TRAINER = 0
"""The rank that sends."""


class WeightUpdateGroup:
    """The trainer, rank 0, and all workers, for updates parameter by parameter.

    A worker loads each parameter when it arrives, and a failure leaves engines with parts of two
    versions. For updates that all engines take or none does, make a `WeightSender` and
    `WeightReceiver`s over `comm`.

    `init_weight_update_group` makes one from unrelated processes. This class makes one from an
    existing group, `comm`, and closes it at the end; `store` is kept until then. Cost: a broadcast
    for each parameter.

    >>> group = unisono.training.WeightUpdateGroup(comm.split([0, 1]))
    >>> if group.rank == 0:
    ...     group.broadcast(torch.arange(3))
    ... else:
    ...     assert group.receive("w", "int64", [3]).tolist() == [0, 1, 2]
    >>> group.size
    2
    >>> group.close()
    """

    def __init__(self, comm: Communicator, store: Any = None) -> None:
        self.comm = comm
        """The group."""
        self._store = store
        self._protocol = UpdateProtocol(comm)

    @property
    def rank(self) -> int:
        """0 for the trainer."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The trainer and all workers."""
        return self.comm.size

    def broadcast(self, tensor: torch.Tensor, src: int = TRAINER, stream: Any = None) -> None:
        """Send `tensor`, a parameter, from the trainer to all workers, which `receive` it. `src`
        must be 0; `stream`, which programs pass to vLLM's groups, is ignored.

        Raises WeightMismatch on every rank if a worker was told another dtype or shape, and
        WeightUpdateError if a worker failed, died or timed out.

        >>> with unisono.training.WeightUpdateGroup(comm.split([0, 1])) as group:
        ...     if group.rank == 0:
        ...         group.broadcast(torch.ones(2))
        ...     else:
        ...         assert group.receive("w", "float32", [2]).tolist() == [1, 1]
        """
        if src != TRAINER or self.rank != TRAINER:
            raise ValueError(
                f"rank {self.rank} cannot send from rank {src}: only the trainer, rank {TRAINER}, "
                "sends, and workers receive with update_weight"
            )

        def prepare() -> torch.Tensor:
            if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "full_tensor"):
                raise TypeError(f"{type(tensor).__name__} is not a whole tensor: gather it first")
            return tensor.detach().to(self._device).contiguous()

        self._move("", prepare)

    def receive(self, name: str, dtype: torch.dtype | str, shape: Iterable[int]) -> torch.Tensor:
        """Receive the parameter `name` on a worker. Raises what `broadcast` raises, on every rank,
        if the trainer's tensor does not have this `dtype` and `shape`.

        >>> with unisono.training.WeightUpdateGroup(comm.split([0, 1])) as group:
        ...     try:
        ...         if group.rank == 0:
        ...             group.broadcast(torch.ones(2))
        ...         else:
        ...             group.receive("w", torch.float64, [2])
        ...     except unisono.WeightMismatch as error:
        ...         error.differences
        (('w', 'float32 (2,)', 'rank 1: float64 (2,)'),)
        """
        if self.rank == TRAINER:
            raise ValueError("the trainer, rank 0, cannot receive: call broadcast there")

        def prepare() -> torch.Tensor:
            known = torch_dtype(str(dtype).removeprefix("torch."))
            return torch.empty(tuple(shape), dtype=known, device=self._device)

        return self._move(str(name), prepare)

    def close(self) -> None:
        """Leave the group and release the port.

        >>> unisono.training.WeightUpdateGroup(comm.split([0, 1])).close()
        """
        self._protocol.close()
        self.comm.close()
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _device(self) -> torch.device:
        """The device on which parameters are sent."""
        if self.comm.backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _move(self, name: str, prepare: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Broadcast one parameter after all ranks have prepared a tensor that fits."""
        with torch.no_grad(), self._protocol.update(in_place=True):
            prepared = self._protocol.attempt(prepare)
            tensor = torch.empty(0) if prepared is None else prepared
            self._agree(name, tensor)
            self.comm.broadcast(tensor, TRAINER)
        return tensor

    def _agree(self, name: str, tensor: torch.Tensor) -> None:
        """Compare what all ranks are about to do, and raise on all of them if it does not fit."""
        protocol = self._protocol
        names, *tensors = protocol.gather(name, dtype_name(tensor), tuple(tensor.shape))
        first = f"rank {TRAINER + 1} {names[TRAINER + 1]!r}"
        protocol.raise_problems(
            {
                rank: f"it was told to receive {told!r}, and {first}"
                for rank, told in enumerate(names)
                if rank != TRAINER and told != names[TRAINER + 1]
            }
        )
        texts = [tensor_text(*each) for each in zip(*tensors, strict=True)]
        differences = [
            (names[rank], texts[TRAINER], f"rank {rank}: {text}")
            for rank, text in enumerate(texts)
            if text != texts[TRAINER]
        ]
        if differences:
            raise WeightMismatch(differences_table(differences), differences=differences)


class WeightUpdateExtension:
    """A worker's side, for vLLM's workers:
    `LLM(..., worker_extension_cls="unisono.training.WeightUpdateExtension")`.

    vLLM mixes it into its worker class; `collective_rpc` calls these methods on every worker, in
    the shape of vLLM's and OpenRLHF's own calls.

    A parameter is loaded when it arrives. See also `WeightUpdateWorker`.

    >>> from types import SimpleNamespace
    >>> served = {}
    >>> class Worker(unisono.training.WeightUpdateExtension):  # what vLLM makes of its own
    ...     rank = 0
    ...     model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=served.update))
    >>> if comm.rank == 0:
    ...     with unisono.training.init_weight_update_group("127.0.0.1", port, 0, 2) as group:
    ...         group.broadcast(torch.ones(2))
    ... else:
    ...     worker = Worker()
    ...     worker.init_weight_update_group("127.0.0.1", port, rank_offset=1, world_size=2)
    ...     worker.update_weight("w", "float32", [2])
    ...     assert served["w"].tolist() == [1, 1]
    ...     worker.close_weight_update_group()
    """

    # vLLM does not call __init__ of this class, and rejects names that its workers already have.
    _weights_group: WeightUpdateGroup | None = None

    def _weights_model(self) -> tuple[Any, int]:
        """The model, and this worker's number in its engine."""
        import torch.distributed as dist

        worker: Any = self
        in_world = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if in_world else int(getattr(worker, "rank", 0))
        return worker.model_runner.model, rank

    def init_weight_update_group(
        self,
        master_address: str,
        master_port: int | str,
        rank_offset: int,
        world_size: int,
        group_name: str = "weights",
        backend: str = "auto",
        **options: Any,
    ) -> None:
        """Join the trainer's group with the function of the same name: at `master_address` and
        `master_port`, as `group_name`, on `backend`, with its other options. This worker is rank
        `rank_offset` + its number in its engine, of `world_size`, the trainer and all workers.

        Raises what that function raises, and WeightUpdateError if the worker is already in such a
        group.

        >>> from types import SimpleNamespace
        >>> worker = unisono.training.WeightUpdateWorker(SimpleNamespace(load_weights=dict))
        >>> worker.init_weight_update_group("127.0.0.1", port, comm.rank, world_size=2)
        >>> worker.close_weight_update_group()
        """
        from unisono.training.weights.meeting import init_weight_update_group

        if self._weights_group is not None:
            raise WeightUpdateError(
                "this worker is already in a weight update group: call "
                "close_weight_update_group first"
            )
        self._weights_group = init_weight_update_group(
            *(master_address, master_port, rank_offset, world_size, group_name, backend),
            worker_rank=self._weights_model()[1],
            **options,
        )

    def init_process_group(
        self,
        master_address: str,
        master_port: int | str,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "auto",
        use_ray: bool = False,
    ) -> None:
        """OpenRLHF's name for `init_weight_update_group`: `master_address`, `master_port`,
        `rank_offset`, `world_size`, `group_name` and `backend` are the same.

        Raises the same, and ValueError for `use_ray`: Ray's own collectives are not used.

        >>> from types import SimpleNamespace
        >>> worker = unisono.training.WeightUpdateWorker(SimpleNamespace(load_weights=dict))
        >>> worker.init_process_group("127.0.0.1", port, comm.rank, 2, "weights")
        >>> worker.close_weight_update_group()
        """
        if use_ray:
            raise ValueError("unisono does not use Ray's collectives: leave out use_ray")
        self.init_weight_update_group(
            master_address, master_port, rank_offset, world_size, group_name, backend
        )

    def update_weight(
        self, name: str, dtype: torch.dtype | str, shape: Iterable[int], empty_cache: bool = False
    ) -> None:
        """Receive the parameter `name`, of `dtype` and `shape`, which the trainer broadcasts at the
        same time, and load it.

        Raises WeightMismatch on every rank if the trainer broadcasts another dtype or shape, and
        WeightUpdateError if a rank failed, died or timed out, or this model cannot load it.
        `empty_cache` frees unused CUDA memory afterwards.

        >>> from types import SimpleNamespace
        >>> worker = unisono.training.WeightUpdateWorker(SimpleNamespace(load_weights=dict))
        >>> worker.update_weight("w", torch.int64, (2,))
        Traceback (most recent call last):
            ...
        unisono.errors.WeightUpdateError: call init_weight_update_group first
        """
        group = self._joined_weights_group()
        weight = group.receive(name, dtype, shape)
        try:
            self._weights_model()[0].load_weights([(name, weight)])
        except Exception as error:
            raise WeightUpdateError(
                f"rank {group.rank} could not load {name!r}, and may hold parts of two versions: "
                f"{type(error).__name__}: {error}",
                failed={group.rank: str(error)},
            ) from error
        if empty_cache and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def close_weight_update_group(self) -> None:
        """Leave the group; the worker can then join another. Does nothing without a group.

        >>> from types import SimpleNamespace
        >>> worker = unisono.training.WeightUpdateWorker(SimpleNamespace(load_weights=dict))
        >>> worker.close_weight_update_group()
        """
        group, self._weights_group = self._weights_group, None
        if group is not None:
            group.close()

    def _joined_weights_group(self) -> WeightUpdateGroup:
        if self._weights_group is None:
            raise WeightUpdateError("call init_weight_update_group first")
        return self._weights_group


class WeightUpdateWorker(WeightUpdateExtension):
    """The methods of `WeightUpdateExtension` for any `model` with `load_weights(pairs)`.
    `worker_rank` is the worker's number in its engine.

    >>> from types import SimpleNamespace
    >>> worker = unisono.training.WeightUpdateWorker(SimpleNamespace(load_weights=dict))
    """

    def __init__(self, model: Any, worker_rank: int = 0) -> None:
        if not callable(getattr(model, "load_weights", None)):
            raise TypeError(f"{type(model).__name__} has no load_weights(pairs)")
        self._model, self._worker_rank = model, worker_rank

    def _weights_model(self) -> tuple[Any, int]:
        return self._model, self._worker_rank
