"""Settings and progress of a language model training run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import training.run
from shoal.model.config import DualARConfig


@dataclass(frozen=True)
class Plan:
    """All settings of a run except the codes."""

    config: DualARConfig
    minutes: float = 20.0
    rows: int = 40
    length: int = 1024
    residual_frames: int = 12_288  # frames of a step, of about 24,000, that the fast transformer is trained on
    seed: int = 0
    matrix_rate: float = 0.015
    rate: float = 2e-3
    weight_decay: float = 0.01
    warm_up: int = 150
    decay_share: float = 0.5
    final_share: float = 0.02
    dropout: float = 0.1
    lowered: float = 0.2
    wrong_frames: float = 0.04
    wrong_codes: float = 0.06
    ema: float = 0.999
    validation_rows: int = 64
    least_hours: float = 20.0
    max_steps: int = 1 << 40
    recoveries: int = 2


@dataclass
class Pace(training.run.Pace):
    began_share: float = -1.0  # fraction of the time that had passed at the first step
    best_score: float = math.inf
    best_step: int = -1
