"""Augment examples to resemble recordings of users: level, noise, reverberation, frequency response."""

from __future__ import annotations

import torch
from torch import Tensor

GAIN_DB = (-10.0, 4.0)
SNR_DB = (14.0, 40.0)
RESPONSE_DB = 7.0  # spread of the gain at the control points of the frequency response
RESPONSE_POINTS = 12
REVERB_SECONDS = (0.05, 0.3)  # time until reverberation has fallen by 60 dB
PEAK = 0.97


def augment(samples: Tensor, sample_rate: int, share: float) -> Tensor:
    """Scale samples [n, N] to random levels and augment `share` of the rows. Can be captured."""
    changed = uniform(samples, 0, 1) < share
    samples = torch.where(changed, recorded(samples, sample_rate), samples)
    samples = samples * decibels(uniform(samples, *GAIN_DB))
    peak = samples.abs().amax(1, keepdim=True)
    return samples * (PEAK / peak.clamp(min=PEAK))


def recorded(samples: Tensor, sample_rate: int) -> Tensor:
    """Return samples [n, N] with the response and the noise of a room and a microphone."""
    length = samples.shape[1]
    spectrum = torch.fft.rfft(samples, 2 * length)
    echo = torch.fft.rfft(reverberation(samples, sample_rate), 2 * length)
    heard = torch.fft.irfft(spectrum * echo * response(spectrum), 2 * length)[:, :length]
    level = samples.square().mean(1, keepdim=True).sqrt() / heard.square().mean(1, keepdim=True).sqrt().clamp(min=1e-5)
    heard = heard * level
    noise = torch.randn_like(samples)
    # Half of the noise falls by 6 dB per octave above 1 kHz or so, as in rooms; the other half is white.
    pole = torch.arange(64, device=samples.device)
    low = torch.nn.functional.conv1d(noise[:, None], (0.8**pole / 5)[None, None].flip(-1), padding=63)[:, 0, :length]
    noise = torch.where(uniform(samples, 0, 1) < 0.5, low * 3, noise)
    loud = samples.square().mean(1, keepdim=True).sqrt()
    return heard + noise * loud * decibels(-uniform(samples, *SNR_DB))


def reverberation(samples: Tensor, sample_rate: int) -> Tensor:
    """Return random impulse responses [n, N]: the direct sound and a tail of decaying noise."""
    at = torch.arange(samples.shape[1], device=samples.device) / sample_rate
    tail = torch.randn_like(samples) * torch.exp(-6.9 * at / uniform(samples, *REVERB_SECONDS))
    tail = tail / tail.square().sum(1, keepdim=True).sqrt() * uniform(samples, 0, 0.7)
    return tail + (at == 0)


def response(spectrum: Tensor) -> Tensor:
    """Return a smooth random gain [n, bins] over frequency."""
    points = RESPONSE_DB * torch.randn(len(spectrum), 1, RESPONSE_POINTS, device=spectrum.device)
    points = points * torch.rand(len(spectrum), 1, 1, device=spectrum.device)
    curve = torch.nn.functional.interpolate(points, spectrum.shape[1], mode="linear", align_corners=True)
    return decibels(curve.squeeze(1).clamp(-20, 12))


def uniform(samples: Tensor, low: float, high: float) -> Tensor:
    """Return one random number per row, [n, 1]."""
    return low + (high - low) * torch.rand(len(samples), 1, device=samples.device)


def decibels(value: Tensor) -> Tensor:
    return torch.pow(10.0, value / 20)
