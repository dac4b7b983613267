"""Transformer block shared by the slow and the fast transformer.

Activations are [tokens, dim]: the tokens of all sequences, concatenated. Only attention depends on which token belongs
to which sequence, so the KV cache holds that mapping: a block passes it q, k and v and receives the attention
output.
"""

from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.kernels.rms_norm import RMSNorm
from shoal.kernels.rope import rope_table, rotate
from shoal.model.config import BlockConfig


class KVCache(Protocol):
    """Stores keys and values and computes attention over the visible ones."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [tokens, kv_heads, d] and return the attention output [tokens, heads, d] for q of that shape."""


class Attention(nn.Module):
    """Grouped-query attention with rotary embeddings and optional norms of queries and keys."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.wqkv = nn.Linear(config.dim, config.qkv_rows, bias=False)
        self.wo = nn.Linear(config.n_head * config.head_dim, config.dim, bias=False)
        self.heads = (config.n_head, config.n_local_heads, config.n_local_heads)
        self.head_dim = config.head_dim
        if config.attention_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.normed = config.attention_qk_norm

    def forward(self, x: Tensor, table: Tensor, layer: int, cache: KVCache) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=-2)
        if self.normed:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = cache.attend(layer, rotate(q, table), rotate(k, table), v)
        return self.wo(mixed.flatten(-2))


class GatedFeedForward(nn.Module):
    """SwiGLU feed-forward. Gate and up projection are one matrix, so x is read once."""

    def __init__(self, dim: int, intermediate: int) -> None:
        super().__init__()
        self.w13 = nn.Linear(dim, 2 * intermediate, bias=False)
        self.w2 = nn.Linear(intermediate, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w13(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class TransformerBlock(nn.Module):
    """Pre-norm block: attention, then feed-forward."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = GatedFeedForward(config.dim, config.intermediate_size)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, table: Tensor, layer: int, cache: KVCache) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table, layer, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class TransformerStack(nn.Module):
    """Transformer blocks, their shared rotary table and the final norm, which `run` does not apply."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        table = rope_table(config.max_seq_len, config.head_dim, config.rope_base)
        self.register_buffer("rope_table", table, persistent=False)
        self.rope_table: Tensor

    def run(self, x: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Run all blocks over x [tokens, dim] at positions [tokens] -> [tokens, dim], before the final norm."""
        table = self.rope_table[positions]
        for index, block in enumerate(self.layers):
            x = block(x, table, index, cache)
        return x
