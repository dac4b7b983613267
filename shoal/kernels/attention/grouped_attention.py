"""Attention with grouped keys through PyTorch's operator."""

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with q [n, heads, T, d] over k, v [n, kv_heads, S, d] -> [n, heads, T, d] (grouped-query attention)."""
    shared = q.shape[1] // k.shape[1]
    if shared > 1 and not has_grouped_operator(q.device):
        k, v, shared = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1), 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shared > 1)


def has_grouped_operator(device: torch.device) -> bool:
    """Return whether the operator supports `enable_gqa`; on Apple's GPUs not every version of torch does."""
    return device.type != "mps"
