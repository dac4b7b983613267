"""Discriminators of the codec: multi-period (waveform folded at prime periods) and multi-resolution (complex STFT).

Both compute in the dtype of their input and store weights in fp32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.codec_losses import spectrum

SLOPE = 0.1
PERIODS = (2, 3, 5, 7, 11)
WINDOWS = (2048, 1024, 512)


@dataclass
class Opinion:
    """Logit maps of all discriminators, and their inner activations for feature matching."""

    logits: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)


class NormedWeight(nn.Module):
    """Weight-normalised parameter: direction and length per output channel."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(shape))
        self.length = nn.Parameter(torch.full((shape[0],), 2**0.5))
        self.bias = nn.Parameter(torch.zeros(shape[0]))

    def weight(self) -> Tensor:
        norm = torch.linalg.vector_norm(self.direction.flatten(1), dim=1)
        scale = (self.length / norm).view(-1, *(1,) * (self.direction.ndim - 1))
        return torch.mul(self.direction, scale)


class TimeConv(NormedWeight):
    """A strided convolution over time as one matrix product: [n, T, channels] -> [n, T / stride, out]."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int = 1) -> None:
        super().__init__(out, kernel * channels)
        self.kernel, self.stride = kernel, stride

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[-1]
        if channels % 8 == 0:
            return self._through_library(x)
        around = self.kernel // 2
        padded = F.pad(x, (0, 0, around, around))
        steps = (x.shape[1] - 1) // self.stride + 1
        reach = (steps - 1) * self.stride + 1
        taps = torch.cat([padded[:, k : k + reach : self.stride] for k in range(self.kernel)], dim=-1)
        # Rows are padded to 16 bytes; otherwise cuBLAS chooses a kernel without tensor cores.
        short = -taps.shape[-1] % 8
        weight = F.pad(self.weight(), (0, short)).to(x.dtype)
        return F.linear(F.pad(taps, (0, short)), weight, self.bias.to(x.dtype))

    def _through_library(self, x: Tensor) -> Tensor:
        """Compute the same as a 2-d convolution of width one, which cuDNN runs without copies of x."""
        plane = x.transpose(1, 2)[..., None]
        weight = self.weight().unflatten(1, (self.kernel, -1)).transpose(1, 2)[..., None]
        weight = weight.to(x.dtype, memory_format=torch.channels_last)
        out = F.conv2d(plane, weight, self.bias.to(x.dtype), (self.stride, 1), (self.kernel // 2, 0))
        return out.squeeze(-1).transpose(1, 2)


class PlaneConv(NormedWeight):
    """A convolution over time and frequency, [n, channels, time, frequency] with channels innermost in memory."""

    def __init__(self, channels: int, out: int, kernel: tuple[int, int], stride: int = 1) -> None:
        super().__init__(out, channels, *kernel)
        self.stride = (1, stride)
        self.padding = (kernel[0] // 2, kernel[1] // 2)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight().to(x.dtype, memory_format=torch.channels_last)
        return F.conv2d(x, weight, self.bias.to(x.dtype), self.stride, self.padding)


class Discriminator(nn.Module, ABC):
    """A stack of convolutions over some view of the samples; the last gives the logits."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @abstractmethod
    def view(self, samples: Tensor) -> Tensor:
        """Return samples [n, N] as the input of the first layer."""

    def forward(self, samples: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        x, features = self.view(samples).to(dtype), []
        for layer in self.layers[:-1]:
            x = F.leaky_relu(layer(x), SLOPE)
            features.append(x)
        return self.layers[-1](x).float(), features


class PeriodDiscriminator(Discriminator):
    """Discriminator over the waveform folded at `period` samples; detects pitch errors."""

    def __init__(self, period: int, width: int = 32) -> None:
        widths = (1, width, 2 * width, 8 * width, 16 * width)
        layers = [TimeConv(a, b, 5, 3) for a, b in pairwise(widths)]
        super().__init__([*layers, TimeConv(16 * width, 16 * width, 5), TimeConv(16 * width, 1, 3)])
        self.period = period

    def view(self, samples: Tensor) -> Tensor:
        whole = F.pad(samples, (0, -samples.shape[-1] % self.period))
        columns: Tensor = whole.unflatten(-1, (-1, self.period)).transpose(1, 2)
        return columns.flatten(0, 1)[..., None]


class SpectrumDiscriminator(Discriminator):
    """Discriminator over the complex STFT, with four adjacent bins as channels."""

    BINS = 4

    def __init__(self, window: int, width: int = 32) -> None:
        layers = [
            PlaneConv(2 * self.BINS, width, (3, 5)),
            PlaneConv(width, width, (3, 5), 2),
            PlaneConv(width, 2 * width, (3, 5), 2),
            PlaneConv(2 * width, 2 * width, (3, 5), 2),
            PlaneConv(2 * width, 2 * width, (3, 3)),
            PlaneConv(2 * width, 1, (3, 3)),
        ]
        super().__init__(layers)
        self.register_buffer("window", torch.hann_window(window), persistent=False)
        self.window: Tensor

    def view(self, samples: Tensor) -> Tensor:
        seen = spectrum(samples, self.window)[:, :-1] * (4 / len(self.window) ** 0.5)
        # Square root of the magnitude: fricatives are 30 dB below vowels and would have no weight otherwise.
        seen = seen * (seen.square().sum(-1, keepdim=True) + 1e-4) ** -0.25
        grouped: Tensor = seen.unflatten(1, (-1, self.BINS)).permute(0, 2, 4, 3, 1).flatten(1, 2)
        return grouped.contiguous(memory_format=torch.channels_last)


class Discriminators(nn.Module):
    def __init__(self, periods: Sequence[int] = PERIODS, windows: Sequence[int] = WINDOWS, width: int = 32) -> None:
        super().__init__()
        by_period: list[Discriminator] = [PeriodDiscriminator(period, width) for period in periods]
        self.members = nn.ModuleList([*by_period, *(SpectrumDiscriminator(window, width) for window in windows)])

    def forward(self, samples: Tensor, dtype: torch.dtype = torch.float32) -> Opinion:
        """Apply all discriminators to samples [n, N]."""
        opinion = Opinion()
        for member in self.members:
            logits, features = member(samples, dtype)
            opinion.logits.append(logits)
            opinion.features += features
        return opinion
