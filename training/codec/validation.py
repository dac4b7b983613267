"""Validation of the averaged codec on held-out speech."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from training.codec.networks import decode_latent, encode_latent
from training.codec.quantiser import perplexities, quantise
from training.codec.trainer import Trainer


def validate(trainer: Trainer, depths: Sequence[int]) -> dict[str, Any]:
    """Return the mel loss of the averaged codec by number of codebooks, and their perplexities."""
    crops = trainer.reel.held_out_crops(64, trainer.plan.length)
    report: dict[str, Any] = {}
    for depth in depths:
        report[f"mel_{depth}"], codes = _mel_loss(trainer, crops, depth)
    report["perplexity"] = [round(p) for p in perplexities(codes, trainer.plan.config.codebook_size)]
    return report


@torch.no_grad()
def _mel_loss(trainer: Trainer, crops: Tensor, depth: int) -> tuple[float, Tensor]:
    """Return the mel loss with the first `depth` codebooks, and the codes [codebooks, m]."""
    losses, codes = [], []
    for crop in crops.split(trainer.plan.batch):
        active = torch.full((len(crop),), depth, device=trainer.device)
        found = quantise(trainer.ema, encode_latent(trainer.ema, crop, trainer.dtype), active)
        made = decode_latent(trainer.ema, found.latent, trainer.dtype)
        losses.append(trainer.mel(made, crop) * len(crop))
        codes.append(found.codes)
    return round((torch.stack(losses).sum() / len(crops)).item(), 4), torch.cat(codes, 1)
