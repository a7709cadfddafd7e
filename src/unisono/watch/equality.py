"""Numbers that should be equal on all ranks but are not.

Every few forward passes each rank takes a fingerprint of everything that should be equal on all
ranks: parameters, buffers, the state of optimizers. An all_reduce of 16 bytes shows whether all are
equal; the fingerprints themselves are exchanged only if they are not.
"""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook

from unisono.comm.on_rows.mismatches import find_minority
from unisono.comm.shared_memory.error_texts import with_global_ranks
from unisono.errors import name_ranks
from unisono.watch.report import Report, add_history
from unisono.watch.stacks import calling_line
from unisono.watch.steps import each_ddp

Tell = Callable[[Report, bool], object]
"""(report, whether this rank logs it)"""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_COLUMNS = 61  # a prime, so that exchanged rows get into other columns
_WEIGHTS = tuple(pow(3, 40 + column, 2**61 - 1) for column in range(_COLUMNS))
_MOST_NAMED = 8

_optimizers: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
"""Those that have made a step, and when they made the last one. One that the program has replaced
stays until Python collects it, which it does at different times on different ranks."""
_hooks: dict[Any, Any] = {}


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A checksum of a tensor's bits, in order, on its device."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    words = flat.view(_WORDS.get(flat.element_size(), torch.int64))
    whole = words.numel() // _COLUMNS * _COLUMNS
    columns = words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    columns[: words.numel() - whole] += words[whole:]
    return (columns * torch.tensor(_WEIGHTS, device=tensor.device)).sum()


def replicated(
    model: torch.nn.Module, skip: Collection[str] = (), optimizers: Iterable[Any] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors that should be equal on all ranks, by name; and why others are not compared. The
    state of a parameter is in the last of its optimizers."""
    inner: Any = model.module if type(model).__name__ == "DistributedDataParallel" else model
    ignored = {*skip, *getattr(inner, "_ddp_params_and_buffers_to_ignore", ())}
    modules = dict(inner.named_modules())
    in_fsdp = {
        id(parameter)
        for module in modules.values()
        if type(module).__name__ == "FullyShardedDataParallel"
        for parameter in module.parameters()
    }

    def reason(name: str, tensor: Any) -> str:
        owner = modules.get(name.rpartition(".")[0])
        if name in ignored:
            return "skipped on request"
        if isinstance(owner, _BatchNorm) and not isinstance(tensor, torch.nn.Parameter):
            return "statistics of each rank's own batches"
        is_part = any(not place.is_replicate() for place in getattr(tensor, "placements", ()))
        of_experts = getattr(tensor, "allreduce", True) is False
        of_tensor_parallel = getattr(tensor, "tensor_model_parallel", False)
        if id(tensor) in in_fsdp or is_part or of_experts or of_tensor_parallel:
            return "a shard"
        return "" if _is_dense(tensor) else "not a dense tensor"

    found, skipped, names = {}, {}, {}
    # Buffers first: what differs in one spreads to the parameters.
    for name, tensor in [*inner.named_buffers(), *inner.named_parameters()]:
        if why := reason(name, tensor):
            skipped[name] = why
        else:
            found[name] = _local(tensor)
            names[tensor] = name
    states = {
        name: optimizer.state[parameter]
        for optimizer in optimizers
        for parameter, name in names.items()
        if parameter in optimizer.state
    }
    for name, state in states.items():
        found |= {
            f"{key} of {name}": _local(value)
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and _is_dense(value)
        }
    return found, skipped


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "placements") else tensor
    return found


def _is_dense(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_meta
    return is_strided and not tensor.is_quantized and not is_lazy(tensor)


class EqualityCheck:
    """Compares a model before its first forward pass in training, and then before every
    `every`-th."""

    def __init__(self, model: Any, every: int, skip: Collection[str], tell: Tell) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number, 1 or more, not {every}")
        self._model, self._every, self._tell = model, every, tell
        self._skip = set(skip)
        self._passes = 0
        self._equal_at: int | None = None
        self._hook = _hooks[self] = model.register_forward_pre_hook(self._before_forward)
        if "optimizers" not in _hooks:
            _hooks["optimizers"] = register_optimizer_step_post_hook(
                lambda optimizer, *_: _optimizers.update({optimizer: time.monotonic()})
            )

    def skipped(self) -> dict[str, str]:
        """What is not compared, and why."""
        return replicated(self._model, self._skip)[1]

    def _before_forward(self, model: Any, _: Any) -> None:
        is_training = model.training and torch.is_grad_enabled()
        joins = getattr(getattr(model, "_join_config", None), "enable", False)
        if torch.compiler.is_compiling() or not is_training or not dist.is_initialized():
            return
        if self._passes % self._every == 0 and not joins:  # otherwise some ranks may be done
            self._compare()
        self._passes += 1

    def _compare(self) -> None:
        group: Any = getattr(self._model, "process_group", None) or dist.group.WORLD
        kinds = {device.type for device in group._device_types}
        device = torch.device("cpu" if "cpu" in kinds else "cuda")
        optimizers = sorted(_optimizers, key=lambda optimizer: _optimizers[optimizer])
        tensors, skipped = replicated(self._model, self._skip, optimizers)
        prints = {}
        for name in tensors.keys() - self._skip:
            with contextlib.suppress(Exception):  # a subclass whose bits cannot be read
                prints[name] = fingerprint(tensors[name]).to(device, non_blocking=True)
        values = torch.stack([*prints.values()]).tolist() if prints else []
        known = dict(zip(prints, values, strict=True))
        digest = zlib.crc32(json.dumps(known, sort_keys=True).encode())
        extremes = torch.tensor([digest, -digest], device=device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
        most, least = extremes.tolist()
        if most != -least:
            told: list[Any] = [None] * group.size()
            dist.all_gather_object(told, known, group)
            if self._look_at(told, [*tensors], skipped, group):
                self._hook.remove()  # once is enough
                return
        self._equal_at = self._passes

    def _look_at(
        self, told: Sequence[dict[str, int]], order: list[str], skipped: dict[str, str], group: Any
    ) -> bool:
        """Report what differs, unless it is only that some tensors are not on all ranks."""
        everywhere = [name for name in order if all(name in known for known in told)]
        self._skip |= {name for known in told for name in known} - {*everywhere}
        odd = [name for name in everywhere if len({known[name] for known in told}) > 1]
        if not odd:
            return False
        culprits = find_minority([known[odd[0]] for known in told])
        what = f"{odd[0]} of {name_ranks(culprits or range(len(told)))} differs"
        if len(culprits) == 1:
            what = f"rank {culprits[0]}'s {odd[0]} differs from the others'"
        since = "since step 0"
        if self._equal_at is not None:
            since = f"since a step between {self._equal_at} and {self._passes}"
        more = f" ({len(odd)} of {len(everywhere)} tensors do)" if len(odd) > 1 else ""
        details = [f"tensors that differ: {_listed(odd)}"] if len(odd) > 1 else []
        skipped = dict.fromkeys(self._skip, "not on all ranks") | skipped
        details += [
            f"not compared, {why}: {_listed(name for name in skipped if skipped[name] == why)}"
            for why in sorted({*skipped.values()})
        ]
        name = "world" if group is dist.group.WORLD else group.group_desc
        found = Report(
            kind="differs",
            verdict=with_global_ranks(f"{what} {since}{more}", dist.get_process_group_ranks(group)),
            group=name,
            backend=_what_runs(group),
            culprits=tuple(culprits) or tuple(range(len(told))),
            site=calling_line(),
            details=tuple(details),
        )
        self._tell(add_history(found, ()), group.rank() == 0)
        return True


def _what_runs(group: Any) -> str:
    """The backend of a torch process group; of a group of ours also if it is called gloo."""
    comm = getattr(group, "comm", None)
    return str(dist.get_backend(group) if comm is None else comm.backend)


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    return ", ".join(known[:_MOST_NAMED]) + more


def check_every_ddp(every: int, tell: Tell) -> None:
    """Check every DDP model that is made from now on."""
    _hooks["models"] = each_ddp(lambda model: EqualityCheck(model, every, (), tell))


def stop_checking() -> None:
    """Stop checking all models."""
    while _hooks:
        _hooks.popitem()[1].remove()


# -- messages: a tensor that is written before its send has finished -------------------------------


def guard_sends(group: Any, tell: Tell) -> None:
    """Make a process group compare the tensors of its sends when they are waited for."""
    send = group.send

    def guarded(tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> Any:
        return _GuardedSend(send(tensors, dst, tag), group, tensors, dst, tell)

    with contextlib.suppress(AttributeError):  # a group of torch's own that could not be watched
        group.send = guarded


class _GuardedSend:
    """A work of torch's, and what it sends."""

    def __init__(
        self, work: Any, group: Any, tensors: Sequence[torch.Tensor], dst: int, tell: Tell
    ) -> None:
        self._work, self._group, self._tensors, self._dst = work, group, tensors, dst
        self._tell = tell
        self._site = calling_line()
        self._before = [int(fingerprint(tensor)) for tensor in tensors]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any) -> Any:
        if self._before != [int(fingerprint(tensor)) for tensor in self._tensors]:
            rank, group = self._group.rank(), self._group
            found = Report(
                kind="written",
                verdict=f"rank {rank} wrote to the tensor of its send to rank {self._dst} "
                f"({self._site}) before waiting for the send ({calling_line()})",
                group=str(group.getGroupDesc() or group.getGroupName()),
                backend=_what_runs(group),
                operation="send",
                culprits=(rank,),
                site=self._site,
            )
            self._tell(add_history(found, ()), True)
        return self._work.wait(*args)
