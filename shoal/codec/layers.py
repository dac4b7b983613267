"""Causal building blocks of the codec. Activations are [n, channels, time]; `past` supplies the left context."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.codec.config import KERNEL, WindowTransformerConfig
from shoal.codec.streaming import Past
from shoal.kernels.rms_norm import RMSNorm
from shoal.kernels.rope import rope_table, rotate


class Snake(nn.Module):
    """Snake activation x + sin²(αx)/α with one frequency per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.alpha * x).square() * (self.alpha + 1e-9).reciprocal()


class CausalConv(nn.Module):
    """Convolution with a left context of (kernel - 1) * dilation + 1 - stride steps and no lookahead."""

    def __init__(
        self, channels: int, out: int, kernel: int, *, stride: int = 1, dilation: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, out, kernel, stride=stride, dilation=dilation, groups=groups)
        self.steps = (kernel - 1) * dilation + 1 - stride

    def forward(self, x: Tensor, past: Past) -> Tensor:
        return self.conv(past.join(x, self.steps))


class CausalUpsample(nn.Module):
    """Transposed convolution; with kernel = 2 x stride, an output depends on the current and the previous input."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(channels, out, kernel, stride=stride)
        self.steps = kernel // stride - 1
        self.stride = stride

    def forward(self, x: Tensor, past: Past) -> Tensor:
        # Outputs before the first new input were emitted by earlier calls; those after the last belong to the next.
        out: Tensor = self.conv(past.join(x, self.steps))
        first = self.steps * self.stride
        return out[..., first : first + x.shape[-1] * self.stride]


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            (
                Snake(channels),
                CausalConv(channels, channels, KERNEL, dilation=dilation),
                Snake(channels),
                CausalConv(channels, channels, 1),
            )
        )

    def forward(self, x: Tensor, past: Past) -> Tensor:
        return x + apply_layers(self.block, x, past)


class ConvNeXt(nn.Module):
    def __init__(self, dim: int, mlp_ratio: int = 4) -> None:
        super().__init__()
        self.dwconv = CausalConv(dim, dim, KERNEL, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, mlp_ratio * dim)
        self.pwconv2 = nn.Linear(mlp_ratio * dim, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 1e-6))

    def forward(self, x: Tensor, past: Past) -> Tensor:
        h = self.norm(self.dwconv(x, past).transpose(1, 2))
        h = self.gamma * self.pwconv2(F.gelu(self.pwconv1(h)))
        return x + h.transpose(1, 2)


class LayerScale(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class WindowAttention(nn.Module):
    def __init__(self, config: WindowTransformerConfig) -> None:
        super().__init__()
        inner = config.n_head * config.head_dim
        self.wqkv = nn.Linear(config.dim, 3 * inner, bias=False)
        self.wo = nn.Linear(inner, config.dim, bias=False)
        self.head_dim = config.head_dim
        self.steps = config.window_size - 1

    def forward(self, x: Tensor, table: Tensor, mask: Tensor, past: Past) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(-3)
        q, k = rotate(q, table), rotate(k, table)
        keys, values = (self._join(t, past) for t in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask)
        return self.wo(out.transpose(1, 2).flatten(-2))

    def _join(self, x: Tensor, past: Past) -> Tensor:
        """Prepend the left context to x and store the end of x: [n, T, heads, d] -> [n, heads, steps + T, d]."""
        joined = past.join(x.flatten(-2).transpose(1, 2), self.steps)
        return joined.unflatten(1, (-1, self.head_dim)).transpose(-1, -2)


class WindowFeedForward(nn.Module):
    def __init__(self, dim: int, intermediate: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, intermediate, bias=False)
        self.w3 = nn.Linear(dim, intermediate, bias=False)
        self.w2 = nn.Linear(intermediate, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class WindowLayer(nn.Module):
    def __init__(self, config: WindowTransformerConfig) -> None:
        super().__init__()
        self.attention = WindowAttention(config)
        self.feed_forward = WindowFeedForward(config.dim, config.intermediate_size)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention_layer_scale = LayerScale(config.dim)
        self.ffn_layer_scale = LayerScale(config.dim)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor, past: Past) -> Tensor:
        x = x + self.attention_layer_scale(self.attention(self.attention_norm(x), table, mask, past))
        return x + self.ffn_layer_scale(self.feed_forward(self.ffn_norm(x)))


class WindowTransformer(nn.Module):
    """Sliding-window transformer with absolute positions, because bf16 rotary tables are not shift invariant."""

    TABLE_STEP = 4096

    def __init__(self, config: WindowTransformerConfig, steps_per_frame: int = 1) -> None:
        super().__init__()
        self.config = config
        self.steps_per_frame = steps_per_frame
        self.layers = nn.ModuleList(WindowLayer(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.register_buffer("table", torch.empty(0, device="cpu"), persistent=False)
        self.table: Tensor

    def forward(self, x: Tensor, past: Past) -> Tensor:
        seen = past.position
        start = torch.zeros(1, dtype=torch.long, device=x.device) if seen is None else seen * self.steps_per_frame
        table = self.table[start[:, None] + torch.arange(x.shape[-1], device=x.device)]
        mask = window_mask(start, x.shape[-1], self.config.window_size)
        h = x.transpose(1, 2)
        for layer in self.layers:
            h = layer(h, table, mask, past)
        normed: Tensor = self.norm(h)
        return normed.transpose(1, 2)

    def reserve(self, frames: int) -> None:
        """Grow the rotary table for streams of `frames` frames; never shrinks it."""
        positions = frames * self.steps_per_frame
        if len(self.table) < positions:
            length = -(-positions // self.TABLE_STEP) * self.TABLE_STEP
            device = self.norm.weight.device
            self.table = rope_table(length, self.config.head_dim, self.config.rope_base, device)


def window_mask(start: Tensor, steps: int, window: int) -> Tensor:
    """Return the mask [n, 1, steps, window - 1 + steps], true where query i sees key j; streams are at `start` [n].

    Keys begin window - 1 steps before the first query; those from before the start of the stream are masked.
    """
    query = torch.arange(steps, device=start.device)[:, None]
    key = torch.arange(window - 1 + steps, device=start.device)[None, :]
    in_window = (key >= query) & (key < query + window)
    in_stream = key >= window - 1 - start[:, None, None]
    return (in_window & in_stream)[:, None]


class Resample(nn.ModuleList):
    """A down- or upsampling layer and a ConvNeXt block, as modules 0 and 1 like in checkpoints."""

    def __init__(self, change: nn.Module, dim: int) -> None:
        super().__init__((change, ConvNeXt(dim)))

    def forward(self, x: Tensor, past: Past) -> Tensor:
        return apply_layers(self, x, past)


def apply_layers(layers: nn.ModuleList, x: Tensor, past: Past) -> Tensor:
    """Apply layers in order; stateless layers take only x."""
    for layer in layers:
        x = layer(x) if isinstance(layer, Snake) else layer(x, past)
    return x
