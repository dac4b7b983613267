"""The codec's networks in training form: activations are [batch, time, channels], convolutions matrix products.

The weights are those of the modules of `shoal.codec`; a test compares both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.codec.dac import Codec, DacBlock
from shoal.codec.layers import CausalConv, CausalUpsample, ConvNeXt, ResidualUnit, Snake, WindowTransformer
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.rope import rotate


def shifted(x: Tensor, count: int, step: int = 1) -> Tensor:
    """[n, T, C] -> [n, T, count * C]: each step with the inputs (count - 1) ... 0 times `step` steps before it."""
    padded = F.pad(x, (0, 0, (count - 1) * step, 0))
    return torch.cat([padded[:, k * step : k * step + x.shape[1]] for k in range(count)], dim=-1)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer in x's dtype, with rows padded to 16 bytes so that tensor cores can be used."""
    short = -x.shape[-1] % 8
    if short:
        x, weight = F.pad(x, (0, short)), F.pad(weight, (0, short))
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def snake(layer: Snake, x: Tensor) -> Tensor:
    alpha, wide = layer.alpha.view(-1), x.float()
    curved: Tensor = wide + torch.sin(alpha * wide).square() / (alpha + 1e-9)
    return curved.to(x.dtype)


def convolve(layer: CausalConv, x: Tensor) -> Tensor:
    conv = layer.conv
    kernel, stride, dilation = conv.kernel_size[0], conv.stride[0], conv.dilation[0]
    if conv.groups > 1:
        taps = shifted(x, kernel, dilation).unflatten(-1, (kernel, -1))
        return torch.add((taps * conv.weight.squeeze(1).T.to(x.dtype)).sum(2), cast(Tensor, conv.bias).to(x.dtype))
    if conv.out_channels == 1:
        return _to_one_channel(conv, x)
    matrix = conv.weight.transpose(1, 2).flatten(1)
    if stride > 1:
        x = x.unflatten(1, (-1, stride)).flatten(2)
        return product(shifted(x, kernel // stride), matrix, conv.bias)
    return product(shifted(x, kernel, dilation) if kernel > 1 else x, matrix, conv.bias)


def _to_one_channel(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """Project before shifting: shifting first would copy every channel seven times for one output."""
    kernel, steps = conv.kernel_size[0], x.shape[1]
    taps = F.pad(x.float() @ conv.weight[0], (0, 0, kernel - 1, 0))  # fp32: this is the waveform
    mixed = torch.stack([taps[:, k : k + steps, k] for k in range(kernel)]).sum(0)
    return (mixed + cast(Tensor, conv.bias))[..., None]


def upsample(layer: CausalUpsample, x: Tensor) -> Tensor:
    conv, stride = layer.conv, layer.stride
    reach = conv.kernel_size[0] // stride
    # Output block t takes kernel part j from input t - j; `shifted` lists the oldest input first.
    matrix = conv.weight.unflatten(2, (reach, stride)).flip(2).permute(3, 1, 2, 0).flatten(2).flatten(0, 1)
    out = product(shifted(x, reach), matrix, cast(Tensor, conv.bias).repeat(stride))
    return torch.flatten(out.unflatten(-1, (stride, -1)), 1, 2)


def residual(layer: ResidualUnit, x: Tensor) -> Tensor:
    return x + run_layers(layer.block, x)


def conv_next(layer: ConvNeXt, x: Tensor) -> Tensor:
    h = F.layer_norm(convolve(layer.dwconv, x).float(), layer.norm.normalized_shape, None, None, layer.norm.eps)
    h = (h * layer.norm.weight + layer.norm.bias).to(x.dtype)
    h = product(F.gelu(product(h, layer.pwconv1.weight, layer.pwconv1.bias)), layer.pwconv2.weight, layer.pwconv2.bias)
    return x + layer.gamma.to(x.dtype) * h


def transform(layer: WindowTransformer, x: Tensor) -> Tensor:
    steps, window = x.shape[1], layer.config.window_size
    at = torch.arange(steps, device=x.device)
    behind = at[:, None] - at[None, :]
    mask = (behind >= 0) & (behind < window)
    table = layer.table[:steps]
    for one in cast("Sequence[Any]", layer.layers):
        x = x + one.attention_layer_scale.gamma.to(x.dtype) * _attend(one, x, table, mask)
        normed = rms_norm(x, one.ffn_norm.weight, one.ffn_norm.eps).to(x.dtype)
        forward = one.feed_forward
        h = F.silu(product(normed, forward.w1.weight, None)) * product(normed, forward.w3.weight, None)
        x = x + one.ffn_layer_scale.gamma.to(x.dtype) * product(h, forward.w2.weight, None)
    return rms_norm(x, layer.norm.weight, layer.norm.eps).to(x.dtype)


def _attend(layer: Any, x: Tensor, table: Tensor, mask: Tensor) -> Tensor:
    attention = layer.attention
    normed = rms_norm(x, layer.attention_norm.weight, layer.attention_norm.eps).to(x.dtype)
    qkv = product(normed, attention.wqkv.weight, None)
    q, k, v = qkv.unflatten(-1, (3, -1, attention.head_dim)).unbind(-3)
    q, k = rotate(q, table), rotate(k, table)
    seen = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
    return product(seen.transpose(1, 2).flatten(-2), attention.wo.weight, None)


FORMS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    Snake: snake,
    CausalConv: convolve,
    CausalUpsample: upsample,
    ResidualUnit: residual,
    ConvNeXt: conv_next,
    WindowTransformer: transform,
}


def run_layers(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = run_layers(layer.block, x) if isinstance(layer, DacBlock) else FORMS[type(layer)](layer, x)
    return x


def encode_latent(codec: Codec, samples: Tensor, dtype: torch.dtype) -> Tensor:
    """Encode samples [n, N] -> latent before the codebooks [n, frames, dim], fp32."""
    x = run_layers(codec.encoder.block, samples[..., None].to(dtype))
    for stage in codec.quantizer.downsample:
        x = run_layers(cast(nn.ModuleList, stage), x)
    return transform(codec.quantizer.pre_module, x).float()


def decode_latent(codec: Codec, latent: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode latent after the codebooks [n, frames, dim] -> samples [n, N], fp32."""
    return synthesize(codec, upsample_latent(codec, latent, dtype))


def decode_excerpts(codec: Codec, latent: Tensor, starts: Tensor, frames: int, dtype: torch.dtype) -> Tensor:
    """Decode `frames` frames of each row from frame starts[n] on; the window transformer sees the whole row."""
    x = upsample_latent(codec, latent, dtype)
    steps = x.shape[1] // latent.shape[1]
    places = steps * starts[:, None] + torch.arange(steps * frames, device=x.device)
    return synthesize(codec, x.gather(1, places[..., None].expand(-1, -1, x.shape[-1])))


def upsample_latent(codec: Codec, latent: Tensor, dtype: torch.dtype) -> Tensor:
    """Upsample latent [n, frames, dim] -> input of the decoder's convolutions [n, steps, dim]."""
    x = transform(codec.quantizer.post_module, latent.to(dtype))
    for stage in codec.quantizer.upsample:
        x = run_layers(cast(nn.ModuleList, stage), x)
    return x


def synthesize(codec: Codec, x: Tensor) -> Tensor:
    return torch.tanh(run_layers(codec.decoder.model, x).float()).squeeze(-1)
