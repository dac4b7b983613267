"""Muon optimiser: orthogonalised momentum, for the matrices inside a transformer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# An odd polynomial that, applied five times, brings singular values from anywhere in (0, 1] close to one.
COEFFICIENTS, ROUNDS = (3.4445, -4.7750, 2.0315), 5


def orthogonalise(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest matrices to [k, m, n] with singular values of about one; computed in `dtype`."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(dtype)
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are orthogonalised in one batch. The rate may be a tensor on the device."""

    def __init__(
        self, weights: Iterable[nn.Parameter], lr: float | Tensor, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(list(weights), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            for weight in group["params"]:
                # Allocated now: a captured step must not allocate state that later steps use.
                self.state[weight]["momentum"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weights in same_shapes(group["params"]):
                self._update(weights, group)

    def _update(self, weights: list[nn.Parameter], group: dict[str, Any]) -> None:
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        held = [self.state[weight]["momentum"] for weight in weights]
        torch._foreach_lerp_(held, gradients, 1 - group["momentum"])
        ahead = torch.stack(gradients).lerp(torch.stack(held), group["momentum"])
        dtype = torch.bfloat16 if ahead.is_cuda else torch.float32
        rows, columns = weights[0].shape
        updates = orthogonalise(ahead, dtype) * (max(1.0, rows / columns) ** 0.5 * group["lr"])
        shrink = 1 - group["lr"] * group["weight_decay"]
        for weight, update in zip(weights, updates, strict=True):
            weight.mul_(shrink).sub_(update)


def same_shapes(weights: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[torch.Size, list[nn.Parameter]] = {}
    for weight in weights:
        groups.setdefault(weight.shape, []).append(weight)
    return list(groups.values())
