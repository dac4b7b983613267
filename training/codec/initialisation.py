"""Initial weights, scaled layer by layer on real audio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from shoal.codec.dac import Codec
from shoal.codec.layers import CausalConv, CausalUpsample, ResidualUnit
from shoal.codec.streaming import NoPast

SPREAD, BRANCH_SPREAD, WAVE_SPREAD = 0.4, 0.12, 0.05


@torch.no_grad()
def initialise(codec: Codec, samples: Tensor) -> None:
    """Initialise weights so that samples [n, N] keep their level through all layers; Snake amplifies larger values."""
    for name, weight in codec.named_parameters():
        if name.endswith("bias"):
            weight.zero_()
        elif name.endswith("gamma"):
            weight.fill_(0.1)
        elif weight.ndim >= 2 and "alpha" not in name:
            weight.normal_(0, weight[0].numel() ** -0.5)
    codec.reserve(samples.shape[-1] // codec.config.frame_length)
    hooks = [layer.register_forward_hook(_level(spread)) for layer, spread in _levelled(codec)]
    past = NoPast()
    latent = codec.encoder(samples[:, None], past)
    for resample, mix in cast("Sequence[tuple[nn.Module, nn.Module]]", codec.quantizer.downsample):
        latent = mix(resample(latent, past), past)
    codec.decoder(codec.quantizer.upscale(codec.quantizer.pre_module(latent, past), past), past)
    for hook in hooks:
        hook.remove()


def _levelled(codec: Codec) -> Iterator[tuple[nn.Module, float]]:
    last = cast(CausalConv, codec.decoder.model[-1])
    branches = [cast(CausalConv, unit.block[-1]).conv for unit in codec.modules() if isinstance(unit, ResidualUnit)]
    for layer in codec.modules():
        if isinstance(layer, CausalConv | CausalUpsample):
            inner = layer.conv
            yield inner, WAVE_SPREAD if layer is last else BRANCH_SPREAD if inner in branches else SPREAD


def _level(spread: float) -> Callable[[nn.Module, object, Tensor], Tensor]:
    def scale(layer: nn.Module, _: object, out: Tensor) -> Tensor:
        factor = spread / (out.std() + 1e-8)
        cast(Tensor, layer.weight).mul_(factor)
        return out * factor

    return scale
