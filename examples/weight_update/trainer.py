"""What both examples' trainers do: a few steps towards a text."""

from __future__ import annotations

import socket

import torch
from engine import CONTEXT, LetterModel, encode

TEXT = "the ranks sing in unison, and nobody waits for a voice that does not come. "


def train(model: LetterModel, steps: int) -> float:
    """Learn the text; the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    letters = encode(" " * CONTEXT + TEXT)
    contexts = letters.unfold(0, CONTEXT, 1)[:-1]
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(contexts), letters[CONTEXT:])
        loss.backward()
        optimizer.step()
    return loss.item()


def free_port() -> int:
    """A port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
