"""Losses of the codec: mel spectra, adversarial and feature matching losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Window length -> mel bands. Few bands for short windows: more would ask for bands narrower than a bin.
BANDS = {64: 10, 128: 20, 256: 40, 512: 64, 1024: 80, 2048: 128}
Features = Sequence[Tensor]


def mel_filters(sample_rate: int, window: int, bands: int) -> Tensor:
    """Return triangular filters [window // 2 + 1, bands] with peak 1, evenly spaced in mel."""
    top = 2595 * math.log10(1 + sample_rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, bands + 2) / 2595) - 1)
    bins = torch.linspace(0, sample_rate / 2, window // 2 + 1)[:, None]
    low, peak, high = edges[:-2], edges[1:-1], edges[2:]
    return torch.minimum((bins - low) / (peak - low), (high - bins) / (high - peak)).clamp(min=0)


def spectrum(samples: Tensor, window: Tensor) -> Tensor:
    """Return the STFT of samples [n, N] as [n, bins, steps, 2] (real, imaginary), fp32, a quarter window per step."""
    length = len(window)
    found = torch.stft(samples.float(), length, length // 4, window=window, center=True, return_complex=True)
    return torch.view_as_real(found)


class MelLoss(nn.Module):
    """Sum over window lengths of the mean absolute difference of log10 mel spectra."""

    def __init__(self, sample_rate: int, bands: dict[int, int] | None = None) -> None:
        super().__init__()
        self.bands = bands or BANDS
        for length, count in self.bands.items():
            self.register_buffer(f"window_{length}", torch.hann_window(length), persistent=False)
            self.register_buffer(f"filters_{length}", mel_filters(sample_rate, length, count), persistent=False)

    def forward(self, made: Tensor, wanted: Tensor) -> Tensor:
        total = made.new_zeros((), dtype=torch.float32)
        for length in self.bands:
            with torch.no_grad():
                target = self.log_mel(wanted, length)
            total = total + (self.log_mel(made, length) - target).abs().mean()
        return total

    def log_mel(self, samples: Tensor, length: int) -> Tensor:
        window: Tensor = getattr(self, f"window_{length}")
        filters: Tensor = getattr(self, f"filters_{length}")
        magnitude = (spectrum(samples, window).square().sum(-1) + 1e-9).sqrt()
        # Without a floor near the quantisation noise of 16 bits, digital silence outweighs the speech.
        floor = 1e-3 * math.sqrt(length / 64)
        return (magnitude.transpose(1, 2) @ filters).clamp(min=floor).log10()


def discriminator_loss(real: Features, fake: Features) -> Tensor:
    """Least squares: logits of recordings to one, of resynthesis to zero."""
    parts = [(1 - r).square().mean() + f.square().mean() for r, f in zip(real, fake, strict=True)]
    return torch.stack(parts).sum()


def deception_loss(fake: Features) -> Tensor:
    return torch.stack([(1 - f).square().mean() for f in fake]).sum()


def feature_loss(real: Features, fake: Features) -> Tensor:
    """Mean absolute difference of the discriminators' inner activations, summed over layers."""
    return torch.stack(
        [(r.detach() - f).abs().mean(dtype=torch.float32) for r, f in zip(real, fake, strict=True)]
    ).sum()
