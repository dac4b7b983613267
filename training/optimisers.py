"""Optimisers whose learning rate a captured graph can read, and clipping relative to a running norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def held_rate(rate: float, device: torch.device) -> float | Tensor:
    """Return the rate, on a GPU as a tensor whose current value a captured graph reads."""
    return torch.tensor(rate, device=device) if device.type == "cuda" else rate


def adam(
    weights: list[nn.Parameter], rate: float, device: torch.device, betas: tuple[float, float]
) -> torch.optim.AdamW:
    on_gpu = device.type == "cuda"
    held = held_rate(rate, device)
    return torch.optim.AdamW(weights, lr=held, betas=betas, weight_decay=0.0, fused=on_gpu or None, capturable=on_gpu)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate, in place if it is a tensor: a captured graph refers to that tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def clip_to_running_norm(
    gradients: list[Tensor], norm: Tensor, running_norm: Tensor, leave_out: float | None = None
) -> None:
    """Clip a step's gradients to three times the running norm, and update that norm.

    A step of more than `leave_out` times the running norm is skipped.
    """
    reference = torch.where(running_norm > 0, running_norm, norm)
    share = (3 * reference / (norm + 1e-6)).clamp(max=1.0)
    if leave_out is not None:
        share = torch.where(norm > leave_out * reference, torch.zeros_like(share), share)
    torch._foreach_mul_(gradients, share)
    running_norm.copy_(reference.lerp(torch.minimum(norm, 3 * reference), 0.02))
