"""Speed: compiled networks and captured steps, each with a way back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from training.capture import as_graph
from training.codec.networks import decode_latent, encode_latent
from training.codec.plan import Mode
from training.codec.trainer import Trainer

logger = logging.getLogger(__name__)


def compile_networks(trainer: Trainer) -> None:
    """Compile both halves; on any failure train with the plain ones."""
    plain = (trainer.encode, trainer.decode)
    try:
        # A value read by several shifted copies is written out once, not computed again for each.
        options: dict[str, Any] = {"realize_reads_threshold": 1}
        trainer.encode = torch.compile(encode_latent, dynamic=False, fullgraph=True, options=options)
        trainer.decode = torch.compile(decode_latent, dynamic=False, fullgraph=True, options=options)
        began = time.monotonic()
        with torch.set_grad_enabled(not trainer.plan.freeze_codes):
            noise = 0.1 * torch.randn(trainer.plan.batch, trainer.plan.length, device=trainer.device)
            latent = trainer.encode(trainer.codec, noise, trainer.dtype)
        trainer.decode(trainer.codec, latent, trainer.dtype).square().mean().backward()
        trainer.codec.zero_grad(set_to_none=True)
        logger.info("compiled in %.0f s", time.monotonic() - began)
    except Exception as problem:  # noqa: BLE001 - whatever the compiler raises, plain code still trains
        logger.warning("not compiled: %s", problem)
        trainer.encode, trainer.decode = plain


def make_runner(trainer: Trainer, mode: Mode, *, capture: bool) -> Callable[[], None]:
    """A step of this mode, captured as one graph where that works."""

    def step() -> None:
        trainer.step(mode)

    return as_graph(step) if capture and trainer.device.type == "cuda" else step
