"""Optimisers whose learning rate a captured graph can read, and gradients held to what is usual."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BETAS = (0.8, 0.99)


def adam(weights: list[nn.Parameter], rate: float, device: torch.device) -> torch.optim.AdamW:
    if device.type != "cuda":
        return torch.optim.AdamW(weights, lr=rate, betas=BETAS, weight_decay=0.0)
    held = torch.tensor(rate, device=device)
    return torch.optim.AdamW(weights, lr=held, betas=BETAS, weight_decay=0.0, fused=True, capturable=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """In place where the rate is a tensor: a captured graph holds that very one."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def hold_gradients(gradients: list[Tensor], usual_norm: Tensor) -> Tensor:
    """Hold a step's gradients to three times the usual norm, which is kept up to date; returns their norm."""
    # Where silence meets speech the norms amplify by hundreds each, and a gradient can leave fp32 altogether (seen
    # at the fresh codec and again after 16,000 steps). Such a step says nothing: it is left out, not scaled down,
    # since infinity times zero would end the run.
    for gradient in gradients:
        gradient.nan_to_num_(0.0, 0.0, 0.0)
    norm = torch.nn.utils.get_total_norm(torch._foreach_clamp_min(torch._foreach_clamp_max(gradients, 1e9), -1e9))
    usual = torch.where(usual_norm > 0, usual_norm, norm)
    share = torch.where(norm > 30 * usual, torch.zeros_like(norm), (3 * usual / (norm + 1e-6)).clamp(max=1.0))
    torch._foreach_mul_(gradients, share)
    usual_norm.copy_(usual.lerp(torch.minimum(norm, 3 * usual), 0.02))
    return norm
