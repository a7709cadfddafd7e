"""Clip gradients by their norm over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from unisono.collectives.ragged import device_of
from unisono.comm.communicator import Group
from unisono.math import widen
from unisono.world.world import resolve


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    group: Group = None,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients down, in place, so that their norm over all ranks is at most `max_norm`.

    Each rank of `group` (None: the world) passes the `parameters` of its own shard: the norm, of
    order `norm_type`, is that of all ranks' gradients together, so a parameter that is on several
    ranks counts several times. If all ranks have the same gradients, as with data parallelism, use
    torch's own clip_grad_norm_. Returns the norm before clipping, the same on every rank.

    Raises RuntimeError on every rank if the norm is not finite and `error_if_nonfinite` is set.
    Cost: an all_reduce of one number. See also `sync_gradients`.

    >>> weight = torch.zeros(1, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0 + comm.rank])  # 3 and 4: together a norm of 5
    >>> unisono.training.clip_grad_norm(weight, max_norm=2.5).item()
    5.0
    >>> round(2 * weight.grad.item() - comm.rank, 3)
    3.0
    """
    comm = resolve(group)
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [parameter.grad for parameter in given if parameter.grad is not None]
    device = gradients[0].device if gradients else torch.device(device_of(comm))
    total = torch.zeros((), dtype=torch.float64, device=device)
    if gradients:
        norms = torch.stack([_norm(gradient, norm_type) for gradient in gradients])
        total = torch.linalg.vector_norm(norms, norm_type)
    if norm_type == float("inf"):
        comm.all_reduce(total, "max")
    else:
        total = total**norm_type
        comm.all_reduce(total)
        total = total ** (1.0 / norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {total.item()}")
    torch.nn.utils.clip_grads_with_norm_(given, max_norm, total)
    return total


def _norm(gradient: torch.Tensor, order: float) -> torch.Tensor:
    """A norm that does not overflow in half precision."""
    dtype = widen(gradient.new_empty(0)).dtype
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, order, dtype=dtype)
    return norm.double()
