"""An optimizer whose work and state are sharded over the ranks of a group: ZeRO, stages 1 and 2
(Rajbhandari et al., 2020). A step is a reduce_scatter of the gradients, an update of this rank's
share, and an all_gather of the parameters: the bytes of one all_reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unisono.collectives.arguments import refuse_type
from unisono.comm.communicator import Communicator, Group
from unisono.comm.work import Work
from unisono.torch_autograd import mark_written, outlasting_inference_mode
from unisono.training import buckets
from unisono.training.clipping import clip_grad_norm
from unisono.training.contributions import share_of_contributions
from unisono.training.deferral import defer_signals
from unisono.training.memory import views_of, zeros_for
from unisono.world.world import resolve

_BLOCK = 256
"""With contributions, shares are whole blocks: an optimizer may round the last few elements of a
share, which fill no vector, differently; and norms are taken block by block."""


@dataclass
class _Row:
    """The concatenated parameters of one group and dtype, cut into a share for each rank."""

    parameters: list[buckets.NamedParameter]
    whole: torch.Tensor  # what the parameters are views of
    parts: list[torch.Tensor]  # these views
    mine: torch.Tensor  # this rank's part of the whole
    gradients: torch.Tensor
    views: list[torch.Tensor]  # of the gradients
    share: torch.nn.Parameter
    absent: torch.Tensor
    given: list[torch.Tensor] = field(default_factory=list)  # the gradients of each contribution
    lacks: list[torch.Tensor] = field(default_factory=list)  # and which it does not have

    def load(self, comm: Communicator) -> None:
        """Collect the gradients in one row; views of it are already there. Take over new values of
        the parameters, which may come from a checkpoint."""
        self.share.copy_(self.mine)
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if parameter.tensor.data_ptr() != self.parts[index].data_ptr():
                why = f"{parameter.name} has moved since its ShardedOptimizer was made"
                comm.reject_call("all_reduce", f"{why}: move and convert the model first")
            gradient = parameter.tensor.grad
            self.absent[index] = float(gradient is None)
            if gradient is None:
                view.zero_()
            elif gradient.layout is not torch.strided:
                why = f"the gradient of {parameter.name} is {gradient.layout}, not dense"
                refuse_type(comm, "all_reduce", why)
            elif gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
                view.copy_(gradient)
                parameter.tensor.grad = view
        self.lacks.append(self.absent.clone())

    def keep(self, comm: Communicator) -> None:
        """The gradients are those of one contribution."""
        self.load(comm)
        self.given.append(self.gradients.clone())
        for parameter in self.parameters:
            parameter.tensor.grad = None

    def cut(self, state: torch.Tensor, comm: Communicator) -> torch.Tensor:
        """This rank's share of a state of all parameters, whose end may be padded differently."""
        used = sum(parameter.tensor.numel() for parameter in self.parameters)
        if len(state) < used:
            raise ValueError(f"the ranks' states have {len(state)} elements, not {used}")
        whole = state.new_zeros(len(self.whole))
        whole[:used] = state[:used]
        return whole.view(comm.size, -1)[comm.rank].clone()

    def norm(self, comm: Communicator) -> torch.Tensor:
        """The norm of all ranks' shares of the gradients, block by block."""
        assert self.share.grad is not None
        mine = torch.linalg.vector_norm(
            self.share.grad.view(-1, _BLOCK), dim=1, dtype=torch.float64
        )
        comm.all_gather(norms := mine.new_empty(comm.size * len(mine)), mine)
        blocks = -(-sum(part.numel() for part in self.parts) // _BLOCK)
        result: torch.Tensor = torch.linalg.vector_norm(norms[:blocks])
        return result


class ShardedOptimizer:
    """Any elementwise optimizer (SGD, Adam, AdamW, ...), sharded over the ranks of `group` (None:
    the world).

    `parameters` is a module, a list of parameters, or a list of dicts with "params" and their own
    options, as for torch's optimizers; `make` is called with this rank's shares. Construction is
    collective, and copies the parameters of rank `src` to all ranks (not with `src=None`). `unused`
    is as in GradientSync, except that with "zero" a parameter without a gradient on any rank is
    updated, too, with zero. It averages the gradients itself: do not use GradientSync or DDP. A
    `contribution_count` is as in GradientSync, with `contributions()`: the same parameters on any
    number of ranks.

    `inner` is the optimizer of this rank's shares; pass it to schedulers. Raises ValueError, on
    every rank, if the ranks' parameters or groups differ. Cost: a reduce_scatter of the gradients
    and an all_gather of the parameters per step. See also `GradientSync`.

    >>> model = torch.nn.Linear(2, 2)
    >>> optimizer = unisono.training.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> norm = optimizer.step(max_norm=1.0)
    >>> optimizer.zero_grad()
    >>> optimizer.param_groups[0]["lr"]
    0.001
    """

    def __init__(
        self,
        parameters: Any,
        make: Callable[..., torch.optim.Optimizer],
        group: Group = None,
        *,
        unused: str = "error",
        src: int | None = 0,
        contribution_count: int | None = None,
        **options: Any,
    ) -> None:
        buckets.check_options(1, unused, "mean")
        self._comm = resolve(group)
        self._unused, self._contribution_count = unused, contribution_count
        self._own: range | None = None
        if contribution_count is not None:
            self._own = share_of_contributions(contribution_count, self._comm)
        block = 1 if self._own is None else _BLOCK
        groups = _groups_of(parameters)
        everything = [parameter for members, _ in groups for parameter in members]
        lengths = [len(members) for members, _ in groups]
        alike = f"{unused=}, {contribution_count=}, groups of {lengths}"
        buckets.check_the_same_everywhere(self._comm, everything, alike)
        if not everything:
            raise ValueError("no parameter requires a gradient")
        if len({id(parameter.tensor) for parameter in everything}) < len(everything):
            raise ValueError("a parameter is in two groups")
        self._rows: list[_Row] = []
        shares: list[dict[str, Any]] = []
        with outlasting_inference_mode():
            for members, own in groups:
                kinds = buckets.group_alike(members)
                rows = [_make_row(self._comm, kind, block) for kind in kinds]
                self._rows += rows
                shares.append({"params": [row.share for row in rows], **own})
            for row in self._rows if src is not None else ():
                self._comm.broadcast(row.whole, src or 0)
            self.inner = make(shares, **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of `inner`: change `lr` here."""
        return self.inner.param_groups

    def contributions(self) -> Iterator[int]:
        """Yield the numbers of this rank's micro-batches of a step, out of `contribution_count`.

        Raises ValueError without a `contribution_count`.

        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = unisono.training.ShardedOptimizer(
        ...     [weight], torch.optim.SGD, contribution_count=4, lr=1.0
        ... )
        >>> for number in optimizer.contributions():
        ...     (weight * number).sum().backward()
        >>> optimizer.step()
        >>> weight.data
        tensor([-1.5000])
        """
        if self._own is None:
            raise ValueError("contributions() needs an optimizer with contribution_count=")
        self._start_over()
        for number in self._own:
            yield number
            with outlasting_inference_mode():
                for row in self._rows:
                    row.keep(self._comm)

    def _start_over(self) -> None:
        for row in self._rows:
            row.given, row.lacks = [], []

    @outlasting_inference_mode()
    def step(self, max_norm: float | None = None) -> torch.Tensor | None:
        """Average the gradients, update this rank's share, and gather all ranks' shares into every
        model.

        With `max_norm` the averaged gradients are scaled down to at most this norm, over all
        parameters, and the norm before is returned.

        Raises UnisonoError, on every rank and before anything has changed, if `unused="error"` and
        a parameter had no gradient; ValueError if a parameter's memory was replaced. Ctrl-C waits
        for the end of an update that has begun; a second Ctrl-C does not.

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = unisono.training.ShardedOptimizer([weight], torch.optim.SGD, lr=1.0)
        >>> (weight * (comm.rank + 1)).sum().backward()
        >>> optimizer.step()
        >>> weight.data
        tensor([-1.5000, -1.5000])
        """
        works = []
        if self._own is None:
            self._start_over()
        for row in self._rows:
            assert row.share.grad is not None
            gradients: Any = {"contributions": row.given}
            absent: Any = {"contributions": row.lacks}
            if self._own is None:
                row.load(self._comm)
                gradients, absent = {"input": row.gradients}, {}
            works += [
                self._comm.all_reduce(row.absent, async_op=True, **absent),
                self._comm.reduce_scatter(row.share.grad, op="avg", async_op=True, **gradients),
            ]
        _wait_for(works)
        if self._unused == "error":
            buckets.check_used(self._missing(), self._comm, self._contribution_count)
        norm = None if max_norm is None else self._clip(max_norm)
        with defer_signals():  # a share that is updated here must reach all ranks
            self.inner.step()
            gathers = [
                self._comm.all_gather(row.whole, row.share.detach(), async_op=True)
                for row in self._rows
            ]
            _wait_for(gathers)
        mark_written(parameter.tensor for row in self._rows for parameter in row.parameters)
        return norm

    def _clip(self, max_norm: float) -> torch.Tensor:
        shares = [row.share for row in self._rows]
        if self._own is None:
            return clip_grad_norm(shares, max_norm, self._comm)
        norms = torch.stack([row.norm(self._comm) for row in self._rows])
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        torch.nn.utils.clip_grads_with_norm_(shares, max_norm, norm)
        return norm

    def _missing(self) -> list[buckets.MissingGradient]:
        return [
            buckets.MissingGradient(
                parameter, round(ranks), any(bool(each[index]) for each in row.lacks)
            )
            for row in self._rows
            for index, (parameter, ranks) in enumerate(
                zip(row.parameters, row.absent.tolist(), strict=True)
            )
            if ranks
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch's optimizers. `set_to_none` is True by default; with False, zeros instead of
        None save a copy in the next step. Raises nothing.

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = unisono.training.ShardedOptimizer([weight], torch.optim.SGD, lr=1.0)
        >>> weight.sum().backward()
        >>> optimizer.zero_grad()
        >>> weight.grad is None
        True
        """
        for row in self._rows:
            for parameter in row.parameters:
                if set_to_none:
                    parameter.tensor.grad = None
                elif parameter.tensor.grad is not None:
                    parameter.tensor.grad.detach().zero_()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's share. For a group of another size, save all ranks' states.

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = unisono.training.ShardedOptimizer([weight], torch.optim.Adam)
        >>> sorted(optimizer.state_dict())
        ['param_groups', 'state']
        """
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Take over the `state` that `state_dict` returned on the same rank of a group of the same
        size; or, in a group of any size, the list of what it returned on all ranks, in their order:
        after a death, say. Load the model's own checkpoint, too.

        Raises ValueError if the list has not as many elements as the parameters, and what the
        optimizer's own `load_state_dict` raises: ValueError if the state does not fit.

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = unisono.training.ShardedOptimizer([weight], torch.optim.Adam)
        >>> optimizer.load_state_dict(optimizer.state_dict())
        >>> optimizer.load_state_dict(unisono.all_gather_object(optimizer.state_dict()))
        """
        self.inner.load_state_dict(state if isinstance(state, dict) else self._cut_anew(state))

    def _cut_anew(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """This rank's part of the state that a group of another size had."""
        if not states:
            raise ValueError("no states: pass the list of what state_dict returned on all ranks")
        rows = {}
        for index, row in enumerate(self._rows):
            own = rows[index] = dict(states[0]["state"].get(index, {}))
            for key, value in own.items():
                if torch.is_tensor(value) and value.dim():  # not a number of steps
                    own[key] = row.cut(
                        torch.cat([each["state"][index][key] for each in states]), self._comm
                    )
        return {**states[0], "state": rows}


def _wait_for(works: Iterable[Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def _groups_of(parameters: Any) -> list[tuple[list[buckets.NamedParameter], dict[str, Any]]]:
    """The parameters of each group, with the group's own options."""
    if isinstance(parameters, torch.nn.Module):
        return [(buckets.named_parameters_of(parameters), {})]
    parameters = list(parameters)
    if not parameters or not isinstance(parameters[0], dict):
        return [(buckets.named_parameters_of(parameters), {})]
    groups = []
    for group in parameters:
        given = group["params"]
        own = buckets.named_parameters_of([given] if isinstance(given, torch.Tensor) else given)
        groups.append((own, {key: value for key, value in group.items() if key != "params"}))
    return groups


def _make_row(comm: Communicator, parameters: list[buckets.NamedParameter], block: int) -> _Row:
    tensors = [parameter.tensor for parameter in parameters]
    first = tensors[0]
    length = -(-sum(tensor.numel() for tensor in tensors) // (comm.size * block)) * block
    whole = zeros_for(comm, length * comm.size, first.dtype, first.device)
    gradients = zeros_for(comm, length * comm.size, first.dtype, first.device)
    parts, views = views_of(whole, tensors), views_of(gradients, tensors)
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.data = part.copy_(tensor)
    mine = whole.view(comm.size, length)[comm.rank]
    share = torch.nn.Parameter(mine.clone())
    share.grad = torch.zeros_like(share)
    absent = torch.zeros(len(parameters), device=first.device)
    return _Row(parameters, whole, parts, mine, gradients, views, share, absent)
