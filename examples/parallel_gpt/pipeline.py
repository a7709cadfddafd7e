"""One step through the pipeline, one forward, one backward (Narayanan et al., 2021).

A stage begins with as many forward passes as there are stages behind it, then goes backward once
for each further pass: no stage keeps more than that many micro-batches in memory.
"""

from __future__ import annotations

import contextlib
from collections import deque

import torch
from torch.nn import functional

from unisono import Communicator, Work
from unisono.training import GradientSync


class Pipeline:
    """This rank's stage, between its neighbours in `pp`."""

    def __init__(
        self,
        stage: torch.nn.Module,
        syncs: list[GradientSync],
        pp: Communicator,
        like: torch.Tensor,
    ) -> None:
        self.stage, self.syncs, self.pp, self.like = stage, syncs, pp, like
        self.is_first, self.is_last = pp.rank == 0, pp.rank == pp.size - 1
        self.open: deque[tuple[torch.Tensor, torch.Tensor]] = deque()  # inputs and results
        self.sends: list[Work] = []

    def step(self, inputs: list[torch.Tensor], targets: list[torch.Tensor], width: int) -> float:
        """Leave the mean gradient of all micro-batches in the parameters, and return their mean
        loss on the last stage, 0 elsewhere."""
        self.loss = 0.0
        batches = list(zip(inputs, targets, strict=True))
        ahead = min(self.pp.size - 1 - self.pp.rank, len(batches))
        for number in range(len(batches) + ahead):
            if number < len(batches):
                self.forward(*batches[number], width, len(batches))
            if number >= ahead:
                is_last = number == len(batches) + ahead - 1
                with contextlib.ExitStack() as stack:
                    for sync in () if is_last else self.syncs:
                        stack.enter_context(sync.no_sync())
                    self.backward()
        for work in self.sends:
            work.wait()
        self.sends.clear()
        for sync in self.syncs:
            sync.finish()
        return self.loss

    def forward(self, x: torch.Tensor, target: torch.Tensor, width: int, batches: int) -> None:
        if not self.is_first:
            x = self.like.new_empty(*x.shape, width)
            self.pp.recv(x, self.pp.rank - 1)
            x.requires_grad_()
        result = self.stage(x)
        if self.is_last:
            result = functional.cross_entropy(result.flatten(0, 1), target.flatten()) / batches
            self.loss += result.item()
        else:
            self.sends.append(self.pp.isend(result.detach().contiguous(), self.pp.rank + 1))
        self.open.append((x, result))

    def backward(self) -> None:
        x, result = self.open.popleft()
        if self.is_last:
            result.backward()
        else:
            gradient = torch.empty_like(result)
            self.pp.recv(gradient, self.pp.rank + 1)
            result.backward(gradient)
        if not self.is_first:
            self.sends.append(self.pp.isend(x.grad, self.pp.rank - 1))
