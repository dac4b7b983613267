"""Speed: compiled networks and captured steps, each with a way back."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch

from training.capture import as_graph
from training.codec.networks import decode_excerpts, encode_latent
from training.codec.plan import Mode
from training.codec.trainer import Trainer

logger = logging.getLogger(__name__)

# A value read by several shifted copies is written out once, not computed again for each.
OPTIONS: dict[str, Any] = {"realize_reads_threshold": 1}


def compile_networks(trainer: Trainer, helper: subprocess.Popen[bytes] | None = None) -> None:
    """Compile both halves; on any failure train with the plain ones.

    `helper` is a process that compiles the decoding half meanwhile; its result is read from the compiler's cache.
    """
    plain = (trainer.encode, trainer.decode)
    try:
        began = time.monotonic()
        if not trainer.coded:
            compile_encoding(trainer)
        if helper is not None:
            helper.wait(timeout=150)
        compile_decoding(trainer)
        logger.info("compiled in %.0f s", time.monotonic() - began)
    except Exception as problem:  # noqa: BLE001 - whatever the compiler raises, plain code still trains
        logger.warning("not compiled: %s", problem)
        trainer.encode, trainer.decode = plain


def compile_encoding(trainer: Trainer) -> None:
    trainer.encode = torch.compile(encode_latent, dynamic=False, fullgraph=True, options=OPTIONS)
    noise = 0.1 * torch.randn(trainer.plan.batch, trainer.plan.length, device=trainer.device)
    with torch.set_grad_enabled(not trainer.plan.freeze_codes):
        latent = trainer.encode(trainer.codec, noise, trainer.dtype)
    if latent.requires_grad:
        latent.square().mean().backward()
    trainer.codec.zero_grad(set_to_none=True)


def compile_decoding(trainer: Trainer) -> None:
    plan = trainer.plan
    trainer.decode = torch.compile(decode_excerpts, dynamic=False, fullgraph=True, options=OPTIONS)
    latent = torch.randn(plan.batch, plan.frames, plan.config.latent_dim, device=trainer.device)
    latent.requires_grad_(not plan.freeze_codes)
    starts = trainer.choose_starts(plan.batch)
    trainer.decode(trainer.codec, latent, starts, plan.heard_frames, trainer.dtype).square().mean().backward()
    trainer.codec.zero_grad(set_to_none=True)


def make_runner(trainer: Trainer, mode: Mode, *, capture: bool) -> Callable[[], None]:
    """A step of this mode, captured as one graph where that works."""

    def step() -> None:
        trainer.step(mode)

    return as_graph(step) if capture and trainer.device.type == "cuda" else step
