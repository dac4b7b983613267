"""Compile the networks and capture steps as CUDA graphs; on a failure, training continues with plain code."""

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

# Store a value that several shifted copies read, instead of computing it for each copy.
OPTIONS: dict[str, Any] = {"realize_reads_threshold": 1}


def compile_networks(trainer: Trainer, helper: subprocess.Popen[bytes] | None = None) -> None:
    """Compile encoder and decoder; if that fails, train with the uncompiled functions.

    `helper` is a process that compiles the decoder concurrently; its result is read from the compiler's cache.
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
    except Exception as problem:  # noqa: BLE001 - edge to the compiler, which raises anything; plain code trains too
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
    """Return a function that runs one step of this mode, as a CUDA graph if it can be captured."""

    def step() -> None:
        trainer.step(mode)

    return as_graph(step) if capture and trainer.device.type == "cuda" else step
