"""A solution of chapter 10's exercises."""

import torch


def share_of_first(a_lse: torch.Tensor, b_lse: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(a_lse - b_lse)


def merge(
    a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.logaddexp(a_lse, b_lse)
    return (a_lse - lse).exp()[:, None] * a + (b_lse - lse).exp()[:, None] * b, lse
