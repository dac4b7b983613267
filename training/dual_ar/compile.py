"""Compile the loss and capture steps as CUDA graphs; on a failure, training continues with plain code."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

from training.capture import as_graph
from training.dual_ar.trainer import Trainer
from training.language import losses
from training.packing import SEMANTIC_BEGIN

logger = logging.getLogger(__name__)


def compile_losses(trainer: Trainer) -> None:
    """Compile the loss; if that fails, train with the uncompiled one."""
    try:
        compiled = torch.compile(losses, dynamic=False, fullgraph=True)
        began = time.monotonic()
        plan = trainer.plan
        columns = torch.zeros(plan.rows, plan.length + 1, 1 + plan.config.num_codebooks, dtype=torch.long)
        columns[..., 0] = SEMANTIC_BEGIN
        columns = columns.to(trainer.device)
        targets = columns[:, 1:].flatten(0, 1)
        with trainer.precision():
            semantic, residual = compiled(trainer.model, columns[:, :-1].clone(), targets, trainer.choose(targets))
        (semantic + residual).backward()
        trainer.losses = compiled
        logger.info("compiled in %.0f s", time.monotonic() - began)
    except Exception as problem:  # noqa: BLE001 - edge to the compiler, which raises anything; plain code trains too
        logger.warning("not compiled: %s", problem)
    trainer.model.zero_grad(set_to_none=True)


def make_runner(trainer: Trainer, *, capture: bool) -> Callable[[], None]:
    """Return a function that runs one step, as a CUDA graph if it can be captured."""
    if not capture or trainer.device.type != "cuda":
        return trainer.step
    return as_graph(trainer.step, trainer.feed)
