"""Expert parallelism: tokens travel to the ranks that have their experts, and back (Lepikhin et
al., GShard, 2020; Fedus et al., Switch Transformers, 2021). Of `num_experts`, rank r has the r-th
of equal shares. Every rank first sends how many tokens it has for each expert, in one small
message."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from unisono.collectives.arguments import refuse_type
from unisono.collectives.ragged import all_gather_integers
from unisono.comm.communicator import Communicator, Group
from unisono.training.exchange import exchange_rows
from unisono.world.world import resolve


@dataclass(frozen=True)
class DispatchedTokens:
    """What `dispatch_tokens` delivered to this rank, and what `combine_tokens` needs for the way
    back.

    `tokens` are those for this rank's experts, one expert after the other, from rank 0, 1, ...;
    `counts` has the number of each expert, so that `tokens.split(counts)` has a part for each.
    `dropped`, of the shape of `experts`, says which of this rank's choices had no room; `capacity`
    is the number of tokens that an expert had room for, None for no limit.

    >>> there = unisono.training.dispatch_tokens(torch.ones(1, 4), torch.tensor([[0]]), 2)
    >>> there.counts == ([2] if comm.rank == 0 else [0]), there.capacity
    (True, None)
    """

    tokens: torch.Tensor
    counts: list[int]
    dropped: torch.Tensor
    capacity: int | None
    _comm: Communicator
    _choices: torch.Tensor  # this rank's choices in the order in which they were sent, as c * n + i
    _order: torch.Tensor  # from the order of arrival to that of `tokens`
    _sent: list[int]  # to each rank
    _received: list[int]  # from each rank


def dispatch_tokens(
    tokens: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    group: Group = None,
    *,
    capacity_factor: float | None = None,
) -> DispatchedTokens:
    """Send each token to the ranks of its experts; every rank gets the tokens for its own experts.

    `tokens` has a row for each of this rank's tokens, `experts` the experts that each of them
    chose, of shape (tokens, choices), among all `num_experts` of the `group`; -1 is none. Ranks may
    have different numbers of tokens, including none. Gradients flow back to `tokens`.

    With `capacity_factor` an expert has room for that many times its even share of all ranks'
    choices, rounded up. The first choices of all tokens come before the second ones, and rank 0's
    before rank 1's, as in one process with all tokens in that order. Choices without room are
    dropped, and add nothing in `combine_tokens`.

    Raises ValueError or TypeError, on every rank, for an invalid argument or different capacity
    factors; CollectiveMismatch if numbers of experts or choices, dtypes or widths differ. Cost: an
    all_gather of the counts and an all_to_all of the tokens; in backward another.

    >>> from unisono.training import combine_tokens, dispatch_tokens
    >>> tokens = torch.tensor([[1.0], [2.0]])
    >>> there = dispatch_tokens(tokens, torch.tensor([[0], [1]]), num_experts=2)
    >>> there.tokens.flatten().tolist() == [1.0 + comm.rank] * 2  # of rank 0 and of rank 1
    True
    >>> outputs = [10 * part for part in there.tokens.split(there.counts)]  # for each expert
    >>> combine_tokens(torch.cat(outputs), there)
    tensor([[10.], [20.]])
    """
    comm = resolve(group)
    _check(comm, tokens, experts, num_experts, capacity_factor)
    choices, device = experts.shape[1], tokens.device
    flat = experts.t().reshape(-1)  # all first choices, then all second ones
    choice = torch.arange(choices, device=flat.device).repeat_interleave(len(tokens))
    kinds = flat + num_experts * choice
    mine = torch.bincount(kinds[flat >= 0], minlength=choices * num_experts).tolist()
    wanted = tokens.requires_grad and torch.is_grad_enabled()
    (factor,) = struct.unpack("q", struct.pack("d", capacity_factor or 0))  # its bits
    everyone = all_gather_integers(comm, (int(wanted), factor, *mine), device)
    if len({theirs[1] for theirs in everyone}) > 1:
        given = [struct.unpack("d", struct.pack("q", theirs[1]))[0] or None for theirs in everyone]
        raise ValueError(f"ranks of group {comm.name} have different capacity factors: {given}")
    # (rank, choice, expert): how many there are, and how many of them have room
    counts = torch.tensor(everyone)[:, 2:].reshape(comm.size, choices, num_experts)
    capacity = None
    kept = counts
    if capacity_factor is not None:
        capacity = math.ceil(capacity_factor * int(counts.sum()) / num_experts)
        in_order = counts.transpose(0, 1).reshape(-1, num_experts)
        before = (in_order.cumsum(0) - in_order).reshape(choices, comm.size, num_experts)
        kept = torch.minimum(counts, (capacity - before.transpose(0, 1)).clamp(min=0))
    rows = _rows_to_send(flat, counts[comm.rank], kept[comm.rank])
    dropped = flat >= 0
    dropped[rows] = False
    by_expert = kept.sum(1).reshape(comm.size, comm.size, -1)  # sender, receiver, which of theirs
    sent, received = by_expert[comm.rank].sum(1), by_expert[:, comm.rank].sum(1)
    order = _order_by_expert(by_expert[:, comm.rank]).to(device)
    leaving = tokens[rows % max(len(tokens), 1)]
    if any(theirs[0] for theirs in everyone):
        leaving = _tracked(leaving)
    arrived = exchange_rows(comm, leaving, sent.tolist(), received.tolist())
    return DispatchedTokens(
        tokens=arrived[order],
        counts=by_expert[:, comm.rank].sum(0).tolist(),
        dropped=dropped.reshape(choices, -1).t(),
        capacity=capacity,
        _comm=comm,
        _choices=rows,
        _order=order,
        _sent=sent.tolist(),
        _received=received.tolist(),
    )


def combine_tokens(
    outputs: torch.Tensor, dispatched: DispatchedTokens, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Send the experts' outputs back; every rank gets the weighted sum for each of its tokens.

    `outputs` has a row for each token of `dispatched`, in that order, of any width. `weights` has
    the shape of `experts`; without it the outputs are added. A dropped choice counts as zero.
    Gradients flow back to `outputs` and `weights`.

    Every rank of the group calls it once for each `dispatch_tokens`, in the same order. Raises
    ValueError, on every rank, if shapes do not fit. Cost: an all_to_all of the outputs; in backward
    another.

    >>> from unisono.training import combine_tokens, dispatch_tokens
    >>> there = dispatch_tokens(torch.tensor([[3.0]]), torch.tensor([[0, 1]]), num_experts=2)
    >>> combine_tokens(there.tokens, there, weights=torch.tensor([[0.5, 0.25]]))
    tensor([[2.2500]])
    """
    comm, shape = dispatched._comm, dispatched.dropped.shape
    if len(outputs) != len(dispatched._order):
        comm.reject_call(
            "all_to_all",
            f"{len(outputs)} outputs for {len(dispatched._order)} tokens: pass a row for each of "
            "dispatched.tokens, in their order",
        )
    if weights is not None and weights.shape != shape:
        why = f"weights of shape {tuple(weights.shape)} for experts of shape {tuple(shape)}"
        comm.reject_call("all_to_all", why)
    if comm.size > 1 and torch.is_grad_enabled():
        flags = all_gather_integers(comm, (int(outputs.requires_grad),), outputs.device)
        if (1,) in flags:
            outputs = _tracked(outputs)
    leaving = outputs[dispatched._order.argsort()]
    arrived = exchange_rows(comm, leaving, dispatched._received, dispatched._sent)
    choices = dispatched._choices
    if weights is not None:
        scale = weights.t().reshape(-1)[choices]
        arrived = arrived * scale.reshape(-1, *(1 for _ in arrived.shape[1:]))
    result = arrived.new_zeros((shape[0], *arrived.shape[1:]))
    return result.index_add(0, choices % max(shape[0], 1), arrived).to(outputs.dtype)


class ExpertParallel(torch.nn.Module):
    """A mixture of experts whose experts are sharded over the ranks of a group.

    `gate` gives a score for each expert of all ranks of the `group`, and is the same on every rank;
    `experts` are this rank's own, the same number on each. A token goes to the `top_k` experts with
    the highest scores; their outputs are weighted by the softmax of those scores. `capacity_factor`
    is that of `dispatch_tokens`. After a call, `dropped` is the fraction of this rank's choices
    that had no room.

    With `loss="mean"` an expert's gradient is that of the mean of the ranks' losses, as with
    GradientSync and DDP for the other parameters; with `loss="sum"` that of their sum. Average the
    other parameters over all ranks that have different tokens, and the experts' over the ranks with
    the same experts: `manager.along("cp", "dp", "ep")` and `manager.cp_dp`.

    Raises ValueError for an invalid `top_k` or `loss`, and what `dispatch_tokens` raises. Cost:
    that of `dispatch_tokens` and `combine_tokens`.

    >>> gate = torch.nn.Linear(4, 6, bias=False)  # with the same weights on every rank
    >>> own = [torch.nn.Linear(4, 4) for _ in range(3)]
    >>> from unisono.training import ExpertParallel
    >>> layer = ExpertParallel(gate, own, top_k=2)
    >>> layer(torch.randn(3, 5, 4)).shape  # this rank's tokens, by the experts of all ranks
    torch.Size([3, 5, 4])
    """

    def __init__(
        self,
        gate: torch.nn.Module,
        experts: Iterable[torch.nn.Module],
        top_k: int = 2,
        group: Group = None,
        *,
        capacity_factor: float | None = None,
        loss: str = "mean",
    ) -> None:
        super().__init__()
        self.gate, self.experts = gate, torch.nn.ModuleList(experts)
        self.comm = resolve(group)
        self.num_experts = len(self.experts) * self.comm.size
        if not 1 <= top_k <= self.num_experts:
            raise ValueError(
                f"top_k must be from 1 to {self.num_experts}, the number of experts, not {top_k}"
            )
        if loss not in ("mean", "sum"):
            raise ValueError(f'loss is {loss!r}: use "mean" or "sum"')
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self.dropped = 0.0
        self._scale = self.comm.size if loss == "mean" else 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The experts' results for `x`, whose last dimension is the width of a token; every rank
        gets those of its own tokens. Raises what `dispatch_tokens` raises.

        >>> layer = unisono.training.ExpertParallel(torch.nn.Linear(4, 2), [torch.nn.Identity()])
        >>> layer(torch.ones(1, 3, 4)).shape
        torch.Size([1, 3, 4])
        """
        tokens = x.reshape(-1, x.shape[-1])
        scores, chosen = self.gate(tokens).topk(self.top_k)
        there = dispatch_tokens(
            tokens, chosen, self.num_experts, self.comm, capacity_factor=self.capacity_factor
        )
        if self.capacity_factor is not None and there.dropped.numel():
            self.dropped = float(there.dropped.float().mean())
        parts = _scale_gradient(there.tokens, self._scale).split_with_sizes(there.counts)
        outputs = torch.cat([each(part) for each, part in zip(self.experts, parts, strict=True)])
        outputs = _scale_gradient(outputs, 1 / self._scale)
        result = combine_tokens(outputs, there, scores.softmax(1))
        return result.reshape(*x.shape[:-1], -1)


# -- where tokens go -------------------------------------------------------------------------------


def _check(
    comm: Communicator, tokens: Any, experts: Any, num_experts: int, factor: float | None
) -> None:
    """Reject invalid arguments, on all ranks."""
    refuse = "all_to_all"
    if not isinstance(tokens, torch.Tensor) or not isinstance(experts, torch.Tensor):
        refuse_type(comm, refuse, "tokens and experts must be torch tensors")
    if experts.is_floating_point() or experts.is_complex() or experts.dtype is torch.bool:
        refuse_type(comm, refuse, f"experts must be integers, not {experts.dtype}")
    if experts.dim() != 2 or not tokens.dim() or len(experts) != len(tokens):
        comm.reject_call(
            refuse,
            f"experts of shape {tuple(experts.shape)} for tokens of shape {tuple(tokens.shape)}: "
            "pass a row of choices for each token",
        )
    if num_experts < 1 or num_experts % comm.size:
        comm.reject_call(
            refuse, f"{num_experts} experts cannot be divided evenly among {comm.size} ranks"
        )
    if factor is not None and not (factor > 0 and math.isfinite(factor)):
        comm.reject_call(refuse, f"capacity_factor must be positive and finite, not {factor!r}")
    if experts.numel() and not -1 <= int(experts.min()) <= int(experts.max()) < num_experts:
        comm.reject_call(
            refuse,
            f"experts has values from {int(experts.min())} to {int(experts.max())}, but valid "
            f"ones are 0 to {num_experts - 1}, and -1 for none",
        )


def _rows_to_send(flat: torch.Tensor, counts: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Which of this rank's choices have room, by expert: the first ones of each choice."""
    none = int((flat < 0).sum())
    order = flat.argsort(stable=True)[none:]
    runs, room = (numbers.t().reshape(-1).to(flat.device) for numbers in (counts, kept))
    before = (runs.cumsum(0) - runs).repeat_interleave(runs)
    place = torch.arange(len(order), device=flat.device) - before
    return order[place < room.repeat_interleave(runs)]


def _order_by_expert(counts: torch.Tensor) -> torch.Tensor:
    """From the order (sender, expert), in which tokens arrive, to (expert, sender)."""
    lengths = counts.reshape(-1)
    number_of_expert = torch.arange(counts.shape[1]).repeat(counts.shape[0])
    return number_of_expert.repeat_interleave(lengths).argsort(stable=True)


# -- how they go -----------------------------------------------------------------------------------


def _tracked(tensor: torch.Tensor) -> torch.Tensor:
    """The same, with a gradient: another rank has one, and its backward pass needs this rank's."""
    if tensor.requires_grad or not torch.is_grad_enabled():
        return tensor
    return tensor.detach().requires_grad_()


def _scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    if factor != 1 and tensor.requires_grad:
        tensor.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]
    return tensor
