"""An optimizer whose work and state are sharded over the ranks of a group: ZeRO, stages 1 and 2
(Rajbhandari et al., 2020). A step is a reduce_scatter of the gradients, an update of this rank's
share, and an all_gather of the parameters: the bytes of one all_reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from unisono.collectives.arguments import refuse_type
from unisono.comm.communicator import Communicator, Group
from unisono.comm.work import Work
from unisono.torch_autograd import mark_written, outlasting_inference_mode
from unisono.training import buckets
from unisono.training.clipping import clip_grad_norm
from unisono.training.deferral import defer_signals
from unisono.training.memory import zeros_for
from unisono.world.world import resolve


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


class ShardedOptimizer:
    """Any elementwise optimizer (SGD, Adam, AdamW, ...), sharded over the ranks of `group` (None:
    the world).

    `parameters` is a module, a list of parameters, or a list of dicts with "params" and their own
    options, as for torch's optimizers; `make` is called with this rank's shares. Construction is
    collective, and copies the parameters of rank `src` to all ranks (not with `src=None`). `unused`
    is as in GradientSync, except that with "zero" a parameter without a gradient on any rank is
    updated, too, with zero. It averages the gradients itself: do not use GradientSync or DDP.

    `inner` is the optimizer of this rank's shares; pass it to schedulers. Raises ValueError, on
    every rank, if the ranks' parameters or groups differ.

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
        **options: Any,
    ) -> None:
        buckets.check_options(1, unused, "mean")
        self._comm = resolve(group)
        self._unused = unused
        groups = _groups_of(parameters)
        everything = [parameter for members, _ in groups for parameter in members]
        lengths = [len(members) for members, _ in groups]
        buckets.check_the_same_everywhere(self._comm, everything, f"{unused=}, groups of {lengths}")
        if not everything:
            raise ValueError("no parameter requires a gradient")
        if len({id(parameter.tensor) for parameter in everything}) < len(everything):
            raise ValueError("a parameter is in two groups")
        self._rows: list[_Row] = []
        shares: list[dict[str, Any]] = []
        with outlasting_inference_mode():
            for members, own in groups:
                rows = [_make_row(self._comm, alike) for alike in buckets.group_alike(members)]
                self._rows += rows
                shares.append({"params": [row.share for row in rows], **own})
            for row in self._rows if src is not None else ():
                self._comm.broadcast(row.whole, src or 0)
            self.inner = make(shares, **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of `inner`: change `lr` here."""
        return self.inner.param_groups

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
        for row in self._rows:
            row.load(self._comm)
            assert row.share.grad is not None
            works += [
                self._comm.all_reduce(row.absent, async_op=True),
                self._comm.reduce_scatter(row.share.grad, row.gradients, "avg", async_op=True),
            ]
        _wait_for(works)
        if self._unused == "error":
            buckets.check_used(self._missing(), self._comm)
        norm = None
        if max_norm is not None:
            norm = clip_grad_norm([row.share for row in self._rows], max_norm, self._comm)
        with defer_signals():  # a share that is updated here must reach all ranks
            self.inner.step()
            gathers = [
                self._comm.all_gather(row.whole, row.share.detach(), async_op=True)
                for row in self._rows
            ]
            _wait_for(gathers)
        mark_written(parameter.tensor for row in self._rows for parameter in row.parameters)
        return norm

    def _missing(self) -> list[buckets.MissingGradient]:
        return [
            buckets.MissingGradient(parameter, round(ranks), parameter.tensor.grad is None)
            for row in self._rows
            for parameter, ranks in zip(row.parameters, row.absent.tolist(), strict=True)
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
        """The state of this rank's share. It fits the same rank of a group of the same size.

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = unisono.training.ShardedOptimizer([weight], torch.optim.Adam)
        >>> sorted(optimizer.state_dict())
        ['param_groups', 'state']
        """
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the `state` that `state_dict` returned on the same rank of a group of the same
        size. Raises what the optimizer's own `load_state_dict` raises: ValueError if it does not
        fit.

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = unisono.training.ShardedOptimizer([weight], torch.optim.Adam)
        >>> optimizer.load_state_dict(optimizer.state_dict())
        """
        self.inner.load_state_dict(state)


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


def _make_row(comm: Communicator, parameters: list[buckets.NamedParameter]) -> _Row:
    first = parameters[0].tensor
    sizes = [parameter.tensor.numel() for parameter in parameters]
    length = -(-sum(sizes) // comm.size)
    whole = zeros_for(comm, length * comm.size, first.dtype, first.device)
    gradients = zeros_for(comm, length * comm.size, first.dtype, first.device)
    parts, views = [], []
    begin = 0
    for parameter, size in zip(parameters, sizes, strict=True):
        shape = parameter.tensor.shape
        here = whole[begin : begin + size].view(shape)
        here.copy_(parameter.tensor)
        parameter.tensor.data = here
        parts.append(here)
        views.append(gradients[begin : begin + size].view(shape))
        begin += size
    mine = whole.view(comm.size, length)[comm.rank]
    share = torch.nn.Parameter(mine.clone())
    share.grad = torch.zeros_like(share)
    absent = torch.zeros(len(parameters), device=first.device)
    return _Row(parameters, whole, parts, mine, gradients, views, share, absent)
