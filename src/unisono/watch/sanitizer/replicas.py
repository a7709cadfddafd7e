"""Facts about each step of an optimizer, about samplers and batches.

Of parameters whose gradients were reduced over a group, and of those in a DDP model: fingerprints
before and after the step, of the gradient, and the hyperparameters, with the lines that set them.
"""

from __future__ import annotations

import gc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DistributedSampler

from unisono.watch.replacements import Replacements
from unisono.watch.sanitizer.calls import harmless, tensors_in
from unisono.watch.sanitizer.reductions import FollowedDDP, Reductions
from unisono.watch.stacks import calling_line

_SMALL_BYTES = 1 << 16
_COLUMNS = 4096
_SETTINGS = (
    *("lr", "weight_decay", "momentum", "betas", "eps", "dampening", "nesterov", "alpha"),
    *("rho", "lambd", "t0", "maximize", "amsgrad", "centered", "decoupled_weight_decay"),
)
_BATCHES = 8
"""Of how many forward passes the batches are compared."""

Tell = Callable[[str, Sequence[int], Any], object]
"""(topic, members, fact)"""


def fingerprint(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bits."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    data = flat.view(torch.uint8)
    if data.numel() > _SMALL_BYTES:
        whole = data.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
        columns = data[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0)
        data = torch.cat([columns.view(torch.uint8), data[whole:]])
    values: Any = data.cpu().numpy()
    return zlib.crc32(values)


class _Settings(dict[str, Any]):
    """A group of parameters of an optimizer that remembers which line set its hyperparameters."""

    def __init__(self, group: dict[str, Any], site: str) -> None:
        super().__init__(group)
        self.sites = dict.fromkeys(_SETTINGS, site)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.sites and self.get(name) != value:
            self.sites[name] = calling_line()
        super().__setitem__(name, value)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


@dataclass
class _Known:
    """What is known of an optimizer."""

    site: str = ""
    steps: int = 0
    loaded: str = ""
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)
    reductions: dict[int, int] = field(default_factory=dict)
    facts: dict[tuple[int, ...], dict[str, Any]] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


class Replicas:
    """Tells facts until `stop`. `hint` is told what is only suspicious."""

    def __init__(self, reductions: Reductions, tell: Tell, hint: Callable[..., object]) -> None:
        self._reductions, self._tell, self._hint = reductions, tell, hint
        self._known: WeakKeyDictionary[Any, _Known] = WeakKeyDictionary()
        self._numbers: Counter[str] = Counter()
        self._samplers: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        self._loaded = ""
        self._replacements = Replacements()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        self._replace(Optimizer, "add_param_group", self._add_group)
        self._replace(Optimizer, "load_state_dict", self._load_optimizer)
        self._replace(Optimizer, "zero_grad", self._zero)
        self._replace(torch.nn.Module, "zero_grad", self._zero)
        self._replace(torch.nn.Module, "load_state_dict", self._load_model)
        self._replace(DistributedSampler, "__init__", self._make_sampler)
        self._replace(DistributedSampler, "__iter__", self._iterate)

    def stop(self) -> None:
        """Look at no more steps."""
        for hook in self._hooks:
            hook.remove()
        self._replacements.undo()

    def _replace(self, owner: Any, name: str, then: Callable[..., object]) -> None:
        def around(original: Any) -> Any:
            def method(this: Any, *given: Any, **named: Any) -> Any:
                result = original(this, *given, **named)
                harmless(then)(this)
                return result

            return method

        self._replacements.replace(owner, name, around)

    # -- what the program does between steps -----------------------------------------------------

    def _add_group(self, optimizer: Any) -> None:
        known = self._known.setdefault(optimizer, _Known())
        known.site = known.site or calling_line()
        group = optimizer.param_groups[-1]
        if type(group) is dict:
            optimizer.param_groups[-1] = _Settings(group, calling_line())

    def _load_optimizer(self, optimizer: Any) -> None:
        known = self._known.setdefault(optimizer, _Known())
        known.loaded = f"Optimizer.load_state_dict was called ({calling_line()})"

    def _load_model(self, model: Any) -> None:
        self._loaded = f"Module.load_state_dict was called ({calling_line()})"

    def _zero(self, owner: Any) -> None:
        if isinstance(owner, Optimizer):
            self._reductions.clear(p.grad for g in owner.param_groups for p in g["params"])
        else:
            self._reductions.clear(parameter.grad for parameter in owner.parameters())

    # -- steps -----------------------------------------------------------------------------------

    @harmless
    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        known = self._known.setdefault(optimizer, _Known())
        known.facts, known.parameters = {}, {}
        left: dict[str, torch.Tensor] = {}
        ddps = [ddp for model, ddp in self._reductions.ddps.items() if hasattr(model, "reducer")]
        calls = self._reductions.take_wide_calls()
        for number, (group, parameter) in enumerate(_parameters(optimizer)):
            self._look_at(known, number, group, parameter, ddps, left)
        for members, fact in known.facts.items():
            fact |= {
                "site": calling_line(),
                "made": known.site,
                "loaded": [self._loaded, known.loaded],
                "whole": len(known.facts) == 1 and not left,
            }
            may_be_sharded = calls.get(members, 0) > len(fact["before"])
            has_all = len(left) <= len(fact["before"]) and len(known.facts) == 1
            if has_all and not may_be_sharded and not self._reductions.exchanges_rows:
                for name, parameter in left.items():
                    self._add(known, fact, name, parameter)
                fact["left"] = [*left]
            if known.steps == 0:
                fact["names"] = self._names(optimizer, ddps)

    def _look_at(
        self,
        known: _Known,
        number: int,
        group: Any,
        parameter: torch.Tensor,
        ddps: list[FollowedDDP],
        left: dict[str, torch.Tensor],
    ) -> None:
        """Add what is known of one parameter to the facts about its group."""
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is not None:  # its hyperparameters are the same on all ranks of the mesh
            members = tuple(sorted(mesh.mesh.flatten().tolist()))
            self._fact(known, members, group)
            return
        ddp = next((each for each in ddps if id(parameter) in each.names), None)
        found = self._reductions.of(parameter.grad)
        name = f"parameter {number}"
        if ddp is not None and len(ddp.members) > 1 and ddp.is_averaged():
            fact = self._fact(known, ddp.members, group)
            name = ddp.names[id(parameter)]
            fact["passes"] = ddp.passes
            if known.reductions.get(id(ddp), 0) == ddp.reductions:
                fact["unreduced"][name] = ddp.module_site
            self._add(known, fact, name, parameter)
            if found and found.by_user and parameter.grad is not None:
                ratio = _norm(parameter.grad) / (found.norm or _norm(parameter.grad) or 1)
                fact["twice"][name] = [found.first_site or "DDP", found.site, ratio]
        elif found is not None and len(found.members) > 1:
            fact = self._fact(known, found.members, group)
            fact["reduced"] = found.site
            fact["origins"][name] = found.origin
            self._add(known, fact, name, parameter)
            if found.first_site and parameter.grad is not None:
                ratio = _norm(parameter.grad) / (found.norm or 1)
                fact["twice"][name] = [found.first_site, found.site, ratio]
        elif _may_be_replica(parameter) and not any(ddp.ignores(parameter) for ddp in ddps):
            left[name] = parameter

    def _fact(self, known: _Known, members: tuple[int, ...], group: Any) -> dict[str, Any]:
        if members not in known.facts:
            known.facts[members] = {
                **{
                    name: {}
                    for name in ("before", "gradients", "after", "unreduced", "twice", "origins")
                },
                "settings": [],
            }
        fact = known.facts[members]
        sites = getattr(group, "sites", {})
        values = [
            [name, _plain(group[name]), sites.get(name, "")] for name in _SETTINGS if name in group
        ]
        if values not in fact["settings"]:
            fact["settings"].append(values)
        return fact

    def _add(self, known: _Known, fact: dict[str, Any], name: str, tensor: torch.Tensor) -> None:
        if not _is_dense(tensor):
            return
        known.parameters[name] = tensor
        fact["before"][name] = fingerprint(tensor)
        gradient = tensor.grad
        if gradient is not None and not _is_dense(gradient):
            gradient = None
        fact["gradients"][name] = 0 if gradient is None else fingerprint(gradient)

    @harmless
    def _after_step(self, optimizer: Any, *_: Any) -> None:
        known = self._known.get(optimizer)
        if known is None or torch.compiler.is_compiling():
            return
        for members, fact in known.facts.items():
            for name in fact["before"]:
                fact["after"][name] = fingerprint(known.parameters[name])
            text = f"step/{members}"
            if members not in known.numbers:
                known.numbers[members] = self._numbers[text]
                self._numbers[text] += 1
            self._tell(f"{text}/{known.numbers[members]}/{known.steps}", members, fact)
        if known.facts:
            self._loaded = known.loaded = ""
        known.facts, known.parameters = {}, {}
        known.reductions = {id(d): d.reductions for d in self._reductions.ddps.values()}
        known.steps += 1
        self._reductions.clear(p.grad for _, p in _parameters(optimizer))

    def _names(self, optimizer: Any, ddps: list[FollowedDDP]) -> dict[str, str]:
        """The names of parameters that are known by number: of the largest module that has them."""
        numbers = {
            id(parameter): f"parameter {number}"
            for number, (_, parameter) in enumerate(_parameters(optimizer))
        }
        found: dict[str, str] = {}
        every = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
        for module in every:
            for name, parameter in module.named_parameters() if "_modules" in vars(module) else ():
                number = numbers.get(id(parameter), "")
                if number and name.count(".") >= found.get(number, "").count("."):
                    found[number] = name
        return found

    # -- data ------------------------------------------------------------------------------------

    def _make_sampler(self, sampler: Any) -> None:
        self._samplers[sampler] = [calling_line(), 0, None, None]

    def _iterate(self, sampler: Any) -> None:
        if not dist.is_initialized():
            return
        known = self._samplers.setdefault(sampler, ["", 0, None, None])
        site, rounds, number, last_epoch = known
        kind = f"sampler/{sampler.num_replicas}/{sampler.shuffle}/{sampler.drop_last}"
        if number is None:
            number = self._numbers[kind]
            self._numbers[kind] += 1
        if rounds == 1 and sampler.shuffle and sampler.epoch == last_epoch:
            self._hint(
                f"the DistributedSampler ({site}) starts its second round in the same order as its "
                "first: set_epoch was not called",
                "call sampler.set_epoch(epoch) before each epoch",
                site,
            )
        known[1:] = [rounds + 1, number, sampler.epoch]
        everyone = range(dist.get_world_size())
        fact = [sampler.seed, sampler.epoch, sampler.shuffle, site]
        self._tell(f"{kind}/{number}/{rounds}", everyone, fact)

    def look_at_batch(self, ddp: FollowedDDP, number: int, inputs: Any) -> None:
        """A DDP model begins a forward pass in training."""
        first = next(tensors_in([*inputs]), None)
        if ddp.passes > _BATCHES or first is None or not _is_dense(first) or not first.numel():
            return
        is_made_up = bool((first == first.view(-1)[0]).all()) if first.is_contiguous() else True
        fact = [None if is_made_up else fingerprint(first), calling_line()]
        self._tell(f"batch/{ddp.members}/{number}/{ddp.passes}", ddp.members, fact)


def _parameters(optimizer: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def _plain(value: Any) -> Any:
    """A hyperparameter as JSON."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)


def _norm(tensor: torch.Tensor) -> float:
    return float(tensor.detach().float().norm())


def _is_dense(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_meta
    return is_strided and not tensor.is_quantized and not is_lazy(tensor)


def _may_be_replica(parameter: torch.Tensor) -> bool:
    """Whether a parameter with a gradient that was not reduced may still be meant as a replica."""
    of_experts = getattr(parameter, "allreduce", True) is False
    is_shard = getattr(parameter, "tensor_model_parallel", False)
    is_flat = type(parameter).__name__ == "FlatParameter"
    return parameter.grad is not None and not (of_experts or is_shard or is_flat)
