"""Muon for weight matrices, after Keller Jordan's description; AdamW does the rest."""

from __future__ import annotations

import torch
from torch import Tensor

# Quintic coefficients that push singular values towards 1 quickly rather than exactly.
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """matrix [..., m, n], m <= n, with its singular values drawn to about 1.

    Every iterate is P @ matrix with P a polynomial of the Gram matrix, so the loop stays at m x m and the
    wide matrix is touched twice, not ten times.
    """
    a, b, c = QUINTIC
    matrix = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    gram = matrix @ matrix.mT
    total = torch.eye(matrix.shape[-2])
    for _ in range(steps):
        square = gram @ gram
        factor = a * torch.eye(matrix.shape[-2]) + b * gram + c * square
        total = factor @ total
        gram = factor @ gram @ factor
    return total @ matrix


class Muon(torch.optim.Optimizer):
    def __init__(self, params: list[Tensor], lr: float = 0.02, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group["lr"], group["momentum"])

    def _update(self, param: Tensor, lr: float, momentum: float) -> None:
        state = self.state[param]
        if not state:
            state["average"] = torch.zeros_like(param)
        average = state["average"].lerp_(param.grad, 1 - momentum)
        update = param.grad.lerp(average, momentum).flatten(1)
        rows, columns = update.shape
        if rows > columns:
            update = orthogonalise(update.mT).mT * (rows / columns) ** 0.5
        else:
            update = orthogonalise(update)
        param.add_(update.reshape(param.shape), alpha=-lr)
