"""Which gradients were summed or averaged since the last step, over which ranks, and how often.

A gradient counts as reduced if an all_reduce had its memory, or memory that was then copied into it
with the same shape; or if its DDP has reduced it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
import torch.multiprocessing.reductions

from unisono.watch.sanitizer.calls import WatchedCall, tensors_in
from unisono.watch.sanitizer.races import Span, span_of
from unisono.watch.stacks import calling_line
from unisono.watch.steps import each_ddp

_WeakStorage: Any = torch.multiprocessing.reductions.StorageWeakRef
_COPIES = {"copy_", "_to_copy", "clone", "_foreach_copy_", "add_", "_foreach_add_"}
_KEEP_PLACE = {"div", "mul", "_foreach_div", "_foreach_mul"}
_CLEAR = {"zero_", "_foreach_zero_", "fill_"}


Look = Callable[["FollowedDDP", Any], object]


@dataclass(frozen=True)
class GradientReduction:
    """Bytes of a storage that were reduced, by the all_reduce at `site`. `norm` was theirs before,
    if they had been reduced already, at `first_site`. `origin` is the place in the memory that was
    reduced, if they were copied from it."""

    span: Span
    members: tuple[int, ...]
    site: str
    by_user: bool
    first_site: str = ""
    norm: float = 0.0
    origin: int = 0


class FollowedDDP:
    """What is known of a DDP model, whose constructor has begun, and of the module in it; `look` is
    given the inputs of each forward pass."""

    def __init__(self, model: Any, module: Any, look: Look) -> None:
        self.model = ref(model)
        self._look = look
        self.reductions = 0
        self.passes = 0
        self.module_site = ""
        self._is_inside = False
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)
        module.register_forward_pre_hook(self._begin_module)

    @functools.cached_property
    def members(self) -> tuple[int, ...]:
        """The global ranks that have a replica."""
        model: Any = self.model()
        return tuple(dist.get_process_group_ranks(model.process_group))

    @functools.cached_property
    def names(self) -> dict[int, str]:
        """Of the parameters that it reduces, by their id."""
        model: Any = self.model()
        return {
            id(parameter): name
            for name, parameter in model.module.named_parameters()
            if name not in model.parameters_to_ignore and parameter.requires_grad
        }

    def ignores(self, parameter: torch.Tensor) -> bool:
        """Whether it was told to leave this parameter alone."""
        model: Any = self.model()
        named = model.module.named_parameters()
        return any(own is parameter and name in model.parameters_to_ignore for name, own in named)

    def is_averaged(self) -> bool:
        """Whether its hook for communication averages gradients; local SGD's does not."""
        hooks = getattr(self.model(), "_comm_hooks", ())
        return not any("post_localSGD" in getattr(hook, "__name__", "") for hook, _ in hooks)

    def _begin(self, model: Any, inputs: Any) -> None:
        self._is_inside = True
        if not torch.compiler.is_compiling() and model.training and torch.is_grad_enabled():
            self.passes += 1
            self._look(self, inputs)
            if model.require_backward_grad_sync:
                self.reductions += 1

    def _end(self, *_: Any) -> None:
        self._is_inside = False

    def _begin_module(self, module: Any, _: Any) -> None:
        if not self._is_inside and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.module_site = calling_line()


class Reductions:
    """Follows the reductions of all storages."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._wide_calls: Counter[tuple[int, ...]] = Counter()
        self._earlier: dict[Span, tuple[str, float]] = {}
        self._spans: dict[int, list[GradientReduction]] = {}
        self._alive: dict[int, Any] = {}
        self.ddps: WeakKeyDictionary[Any, FollowedDDP] = WeakKeyDictionary()
        self.exchanges_rows = False
        """Whether the program has called all_to_all, as expert parallelism does."""
        self._hook = each_ddp(self._follow)

    def stop(self) -> None:
        """Follow no more models."""
        self._hook.remove()

    def _follow(self, ddp: Any, module: Any) -> None:
        self.ddps[ddp] = FollowedDDP(ddp, module, self._look)

    def take_wide_calls(self) -> Counter[tuple[int, ...]]:
        """How many calls of the user's, by their members, moved more than vectors since the last
        step: those of gradients, and of activations that are sharded."""
        taken, self._wide_calls = self._wide_calls, Counter()
        return taken

    # -- calls and operators ---------------------------------------------------------------------

    def submitted(self, call: WatchedCall) -> bool:
        """Note a call; returns whether its tensor may be copied into gradients."""
        self.exchanges_rows |= call.name == "all_to_all"
        if call.by_user:
            self._wide_calls[call.members] += any(tensor.ndim > 1 for tensor in call.writes)
        if not call.sums or len(call.members) < 2:
            return False
        may_be_flat = False
        for tensor in call.writes:
            span = span_of(tensor) if tensor.is_floating_point() else None
            if span is not None:
                first, norm = self._earlier.get(span, ("", 0.0))
                how = call.members, call.site, call.by_user, first, norm
                self._put(tensor, GradientReduction(span, *how))
                may_be_flat |= call.by_user and tensor.ndim == 1 and tensor.numel() > 1
        return may_be_flat

    def before(self, call: WatchedCall) -> None:
        """A user's call is about to reduce: was one of its tensors reduced before?"""
        self._earlier = {}
        if call.sums and call.by_user:
            for tensor in call.writes:
                span = span_of(tensor)
                known = self._find(span) if span else []
                shared = [each.site for each in known if len({*each.members} & {*call.members}) > 1]
                if span and (shared or self.ddps):  # DDP's reductions have memory of their own
                    norm = float(tensor.detach().float().norm())
                    self._earlier[span] = shared[0] if shared else "", norm

    def _put(self, tensor: torch.Tensor, found: GradientReduction) -> None:
        storage = found.span.storage
        if storage not in self._alive or self._alive[storage].expired():
            self._alive[storage] = _WeakStorage(tensor.untyped_storage())
            self._spans[storage] = []
            if len(self._alive) > 4096:
                for dead in [key for key, weak in self._alive.items() if weak.expired()]:
                    del self._alive[dead], self._spans[dead]
        self._spans[storage] = [
            each for each in self._spans[storage] if not each.span.meets(found.span)
        ] + [found]

    def _find(self, span: Span) -> list[GradientReduction]:
        weak = self._alive.get(span.storage)
        if weak is None or weak.expired():
            return []
        return [each for each in self._spans[span.storage] if each.span.meets(span)]

    def operator(self, name: str, result: Any, args: tuple[Any, ...], named: Any) -> None:
        """An operator has run: reduced numbers may have been copied."""
        if name in _CLEAR:
            for tensor in tensors_in(args[0]):
                self.clear([tensor])
        elif name in _COPIES or name.rstrip("_") in _KEEP_PLACE:
            targets = [*tensors_in(args[0] if name.endswith("_") else result)]
            at = 1 if name in ("copy_", "_foreach_copy_", "add_", "_foreach_add_") else 0
            sources = [*tensors_in(args[at])] if len(args) > at else []
            for target, source in zip(targets, sources, strict=False):
                self._copy(target, source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target is source or target.shape != source.shape:
            return
        span, origin = span_of(target), span_of(source)
        if span and origin and span.storage != origin.storage:
            for each in self._find(origin)[:1]:
                at = each.origin + origin.low
                self._put(target, replace(each, span=span, first_site="", norm=0.0, origin=at))

    def clear(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """These are other numbers now."""
        for tensor in tensors:
            span = span_of(tensor) if tensor is not None else None
            if span is not None and span.storage in self._spans:
                self._spans[span.storage] = [
                    each for each in self._spans[span.storage] if not each.span.meets(span)
                ]

    def of(self, gradient: torch.Tensor | None) -> GradientReduction | None:
        """The last reduction of a gradient."""
        span = span_of(gradient) if gradient is not None else None
        found = self._find(span) if span else []
        return found[-1] if found else None
