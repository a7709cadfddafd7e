"""Weight updates parameter by parameter, in the shape of vLLM's and OpenRLHF's calls.

For each parameter the trainer announces name, type and shape by calls from outside, the workers
receive, and the trainer broadcasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch

from unisono.collectives.encoding import torch_dtype
from unisono.comm.base import Communicator, dtype_name
from unisono.errors import WeightMismatch, WeightUpdateError
from unisono.training.deferral import defer_signals
from unisono.training.weights.description import differences_table, tensor_text
from unisono.training.weights.protocol import UpdateProtocol

TRAINER = 0
"""The rank that sends."""


class WeightUpdateGroup:
    """The trainer and all workers, for updates parameter by parameter.

    Each parameter is at once what the worker makes of it, and a failure leaves engines with parts
    of two versions. Between `begin_weight_update` and `end_weight_update`, on every rank, an update
    is done by all engines or by none.

    `init_weight_update_group` makes one of processes that have nothing in common; here it is made
    of a group that there is, `comm`, and ends with it. `store` is what is held until then.

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
        """The group; a `WeightSender` and `WeightReceiver`s work over it as well."""
        self._store = store
        self._protocol = UpdateProtocol(comm)
        self._all_or_none = False

    @property
    def rank(self) -> int:
        """0 for the trainer."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """The trainer and all workers."""
        return self.comm.size

    def begin_weight_update(self) -> None:
        """From here to `end_weight_update` all or none. Every rank calls it; nothing is sent.
        Raises WeightUpdateError if that has begun already.

        >>> with unisono.training.WeightUpdateGroup(comm.split([0, 1])) as group:
        ...     group.begin_weight_update()
        ...     group.end_weight_update()
        """
        if self._all_or_none:
            raise WeightUpdateError("begin_weight_update was called twice: end the first update")
        self._all_or_none = True

    def broadcast(self, tensor: torch.Tensor, src: int = TRAINER, stream: Any = None) -> None:
        """Send `tensor`, a parameter, to all workers, who `receive` it at this time. The trainer's
        side.

        `src` must be 0, and `stream` is there for programs that pass one to vLLM's groups: work is
        done in the order of torch's current stream.

        Raises WeightMismatch on every rank where a worker was told another type or shape, and
        WeightUpdateError where a worker failed, died or fell behind. Between `begin_weight_update`
        and `end_weight_update` that ends the update: every engine keeps what it had.

        >>> with unisono.training.WeightUpdateGroup(comm.split([0, 1])) as group:
        ...     if group.rank == 0:
        ...         group.broadcast(torch.ones(2))
        ...     else:
        ...         assert group.receive("w", "float32", [2]).tolist() == [1, 1]
        """
        if src != TRAINER or self.rank != TRAINER:
            raise ValueError(
                f"rank {self.rank} cannot send from rank {src}: the trainer, rank {TRAINER}, "
                "sends, and workers receive by update_weight"
            )

        def prepare() -> torch.Tensor:
            if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "full_tensor"):
                raise TypeError(f"{type(tensor).__name__} is not a whole tensor: gather it first")
            return tensor.detach().to(self._device).contiguous()

        self._move("", prepare)

    def receive(self, name: str, dtype: torch.dtype | str, shape: Iterable[int]) -> torch.Tensor:
        """The parameter `name` that the trainer broadcasts at this time: of this `dtype` and
        `shape`, or it is refused on every rank. A worker's side. Raises as `broadcast`.

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
            raise ValueError("the trainer, rank 0, does not receive: it calls broadcast")

        def prepare() -> torch.Tensor:
            known = torch_dtype(str(dtype).removeprefix("torch."))
            return torch.empty(tuple(shape), dtype=known, device=self._device)

        return self._move(str(name), prepare)

    def end_weight_update(
        self,
        prepare: Callable[[], None] = lambda: None,
        commit: Callable[[], None] = lambda: None,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        """Vote on the update that `begin_weight_update` began. Every rank calls it.

        `prepare` may fail. Where it does not on any rank, every rank calls `commit`; otherwise, and
        where a rank dies before the decision, every rank calls `undo`.

        Raises WeightUpdateError, on every rank, where the update was not done: its `committed` is
        then False.

        >>> done = []
        >>> with unisono.training.WeightUpdateGroup(comm.split([0, 1])) as group:
        ...     group.begin_weight_update()
        ...     group.end_weight_update(commit=lambda: done.append("commit"))
        >>> done
        ['commit']
        """
        protocol = self._protocol
        began, self._all_or_none = self._all_or_none, False

        def prepare_if_begun() -> None:
            if not began:
                raise ValueError("end_weight_update without begin_weight_update")
            prepare()

        with protocol.update():
            protocol.open_vote()
            try:
                protocol.attempt(prepare_if_begun)
                protocol.decide(commit)
            finally:
                if not protocol.committed:
                    with defer_signals():
                        undo()

    def close(self) -> None:
        """Leave the group, and give back the port.

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
        """Where parameters travel."""
        if self.comm.backend == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _move(self, name: str, prepare: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Broadcast one parameter, once all ranks have prepared a tensor that fits. A failure ends
        an update of all or none."""
        try:
            with torch.no_grad(), self._protocol.update(in_place=not self._all_or_none):
                prepared = self._protocol.attempt(prepare)
                tensor = torch.empty(0) if prepared is None else prepared
                self._agree(name, tensor)
                self.comm.broadcast(tensor, TRAINER)
        except BaseException:
            self._all_or_none = False
            raise
        return tensor

    def _agree(self, name: str, tensor: torch.Tensor) -> None:
        """Hear what all ranks have in mind, and raise on all of them where it does not fit."""
        protocol = self._protocol
        begun, names, *tensors = protocol.gather(
            self._all_or_none, name, dtype_name(tensor), tuple(tensor.shape)
        )
        problems = {}
        for rank, (here, told) in enumerate(zip(begun, names, strict=True)):
            if here != begun[TRAINER]:
                called = "called" if here else "not called"
                problems[rank] = f"begin_weight_update was {called}, unlike on rank {TRAINER}"
            elif rank != TRAINER and told != names[TRAINER + 1]:
                first = f"rank {TRAINER + 1} {names[TRAINER + 1]!r}"
                problems[rank] = f"it was told to receive {told!r}, and {first}"
        protocol.raise_problems(problems)
        texts = [tensor_text(*each) for each in zip(*tensors, strict=True)]
        differences = [
            (names[rank], texts[TRAINER], f"rank {rank}: {text}")
            for rank, text in enumerate(texts)
            if text != texts[TRAINER]
        ]
        if differences:
            raise WeightMismatch(differences_table(differences), differences=differences)
