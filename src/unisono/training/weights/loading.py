"""Inference workers that take weights by `load_weights(pairs)`, as vLLM's models do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch

from unisono.errors import WeightUpdateError
from unisono.training.weights.meeting import init_weight_update_group
from unisono.training.weights.update_group import WeightUpdateGroup


class LoadsWeights(Protocol):
    """What is asked of a worker's model. It keeps what it needs of each tensor: all of it, or its
    own part where the engine is cut over several workers."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], /) -> Any:
        """Load tensors by name. Raises what it likes where one does not fit."""


class WeightUpdateExtension:
    """A worker's side of updates parameter by parameter, for vLLM's workers:
    `LLM(..., worker_extension_cls="unisono.training.WeightUpdateExtension")`.

    vLLM mixes it into its worker class; `collective_rpc` calls these methods on every worker, in
    the shape of vLLM's and OpenRLHF's own calls.

    Without `begin_weight_update` a parameter is loaded as it comes. With it, parameters are kept
    until `end_weight_update`, and then loaded in every engine or in none: a model that is a
    torch.nn.Module loads them before the vote, and has its old weights back if that fails anywhere;
    another one loads them after it.

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

    # vLLM calls no __init__ of this class, and refuses names that its workers have already.
    _weights_group: WeightUpdateGroup | None = None
    _weights_kept: list[tuple[str, torch.Tensor]] | None = None

    def _weights_model(self) -> tuple[LoadsWeights, int]:
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
        """Join the group in which the trainer sends, by the function of this name: at
        `master_address` and `master_port`, as `group_name`, on `backend`, with its other options.
        This worker is rank `rank_offset` + its number in its engine, of `world_size`, the trainer
        and all workers.

        Raises as that function, and WeightUpdateError if the worker is in such a group already.

        >>> from types import SimpleNamespace
        >>> worker = unisono.training.WeightUpdateWorker(SimpleNamespace(load_weights=dict))
        >>> worker.init_weight_update_group("127.0.0.1", port, comm.rank, world_size=2)
        >>> worker.close_weight_update_group()
        """
        if self._weights_group is not None:
            raise WeightUpdateError(
                "this worker is in a weight update group already: close_weight_update_group first"
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
        """`init_weight_update_group` by OpenRLHF's name for it: `master_address`, `master_port`,
        `rank_offset`, `world_size`, `group_name` and `backend` are the same.

        Raises the same, and ValueError for `use_ray`: Ray's own collectives are not used.

        >>> from types import SimpleNamespace
        >>> worker = unisono.training.WeightUpdateWorker(SimpleNamespace(load_weights=dict))
        >>> worker.init_process_group("127.0.0.1", port, comm.rank, 2, "weights")
        >>> worker.close_weight_update_group()
        """
        if use_ray:
            raise ValueError("unisono does not send over Ray's collectives: leave use_ray out")
        self.init_weight_update_group(
            master_address, master_port, rank_offset, world_size, group_name, backend
        )

    def update_weight(
        self, name: str, dtype: torch.dtype | str, shape: Iterable[int], empty_cache: bool = False
    ) -> None:
        """Receive the parameter `name`, of `dtype` and `shape`, which the trainer broadcasts at
        this time, and load it; between `begin_weight_update` and `end_weight_update` keep it.

        Raises WeightMismatch on every rank where the trainer broadcasts another type or shape, and
        WeightUpdateError where a rank failed, died or fell behind, or this model cannot load it.
        `empty_cache` gives unused memory of CUDA back afterwards.

        >>> from types import SimpleNamespace
        >>> if comm.rank == 0:
        ...     with unisono.training.init_weight_update_group("127.0.0.1", port, 0, 2) as group:
        ...         group.broadcast(torch.arange(2))
        ... else:
        ...     served = {}
        ...     model = SimpleNamespace(load_weights=served.update)
        ...     worker = unisono.training.WeightUpdateWorker(model)
        ...     worker.init_weight_update_group("127.0.0.1", port, rank_offset=1, world_size=2)
        ...     worker.update_weight("w", torch.int64, (2,))
        ...     assert served["w"].tolist() == [0, 1]
        ...     worker.close_weight_update_group()
        """
        group = self._joined_weights_group()
        try:
            weight = group.receive(name, dtype, shape)
        except BaseException:
            self._weights_kept = None
            raise
        if self._weights_kept is not None:
            self._weights_kept.append((name, weight))
            return
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

    def begin_weight_update(self) -> None:
        """Keep parameters from now on, for `end_weight_update`. Raises WeightUpdateError if that
        has begun already, or before the worker has joined.

        >>> from types import SimpleNamespace
        >>> worker = unisono.training.WeightUpdateWorker(SimpleNamespace(load_weights=dict))
        >>> worker.init_weight_update_group("127.0.0.1", port, comm.rank, world_size=2)
        >>> worker.begin_weight_update()
        >>> worker.close_weight_update_group()
        """
        self._joined_weights_group().begin_weight_update()
        self._weights_kept = []

    def end_weight_update(self) -> None:
        """Load what has come, together with all other workers. The trainer calls its group's
        `end_weight_update` at the same time.

        Raises WeightUpdateError on every rank, and every engine keeps what it had, if a model could
        not load, or a rank died before all had voted; `committed` says if that was later.

        >>> from types import SimpleNamespace
        >>> if comm.rank == 0:
        ...     with unisono.training.init_weight_update_group("127.0.0.1", port, 0, 2) as group:
        ...         group.begin_weight_update()
        ...         group.broadcast(torch.ones(2))
        ...         group.end_weight_update()
        ... else:
        ...     served = {}
        ...     model = SimpleNamespace(load_weights=served.update)
        ...     worker = unisono.training.WeightUpdateWorker(model)
        ...     worker.init_weight_update_group("127.0.0.1", port, rank_offset=1, world_size=2)
        ...     worker.begin_weight_update()
        ...     worker.update_weight("w", "float32", [2])
        ...     assert not served
        ...     worker.end_weight_update()
        ...     assert served["w"].tolist() == [1, 1]
        ...     worker.close_weight_update_group()
        """
        group, (model, _) = self._joined_weights_group(), self._weights_model()
        weights, self._weights_kept = self._weights_kept or [], None

        def load() -> None:
            model.load_weights(weights)

        if isinstance(model, torch.nn.Module):
            old = _KeptWeights(model)
            group.end_weight_update(partial(old.keep, load), undo=old.give_back)
        else:
            group.end_weight_update(commit=load)

    def close_weight_update_group(self) -> None:
        """Leave the group; another may be joined. Without a group it does nothing.

        >>> from types import SimpleNamespace
        >>> worker = unisono.training.WeightUpdateWorker(SimpleNamespace(load_weights=dict))
        >>> worker.close_weight_update_group()
        """
        group, self._weights_group, self._weights_kept = self._weights_group, None, None
        if group is not None:
            group.close()

    def _joined_weights_group(self) -> WeightUpdateGroup:
        if self._weights_group is None:
            raise WeightUpdateError("call init_weight_update_group first")
        return self._weights_group


class WeightUpdateWorker(WeightUpdateExtension):
    """What `WeightUpdateExtension` makes of vLLM's workers, around any `model` with `load_weights`.
    `worker_rank` is the worker's number in its engine.

    >>> from types import SimpleNamespace
    >>> worker = unisono.training.WeightUpdateWorker(SimpleNamespace(load_weights=dict))
    """

    def __init__(self, model: LoadsWeights, worker_rank: int = 0) -> None:
        if not callable(getattr(model, "load_weights", None)):
            raise TypeError(f"{type(model).__name__} has no load_weights(pairs)")
        self._model, self._worker_rank = model, worker_rank

    def _weights_model(self) -> tuple[LoadsWeights, int]:
        return self._model, self._worker_rank


class _KeptWeights:
    """A copy of a module's tensors, for the case that it has to have them back."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._tensors: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(self, then: Callable[[], None]) -> None:
        """Copy everything, note where it lies, and do `then`, which may change it."""
        for module in self._model.modules():
            for owner in (module._parameters, module._buffers):
                for name, tensor in owner.items():
                    if tensor is not None:
                        if id(tensor) not in self._copies:
                            self._copies[id(tensor)] = (tensor.data, tensor.data.clone())
                        self._tensors.append((owner, name, tensor))
        then()

    @torch.no_grad()
    def give_back(self) -> None:
        """Put everything back: the tensors, their memory, and what was in it."""
        for owner, name, tensor in self._tensors:
            data, copy = self._copies[id(tensor)]
            data.copy_(copy)
            tensor.data = data
            owner[name] = tensor
