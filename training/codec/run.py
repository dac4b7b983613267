"""Codec training run: schedule of codes and discriminators, learning rates, and files."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

import training.run
from training.codec.compile import make_runner
from training.codec.files import save_codec, save_whole
from training.codec.plan import Mode, Pace
from training.codec.quantiser import revive
from training.codec.trainer import Trainer
from training.codec.validation import validate
from training.run import Every

COMPANIONS = "companions.safetensors"
PARTS = ("discriminators", "classifier")


@dataclass
class Run(training.run.Run[Trainer]):
    log_every: int = 200
    mode: Mode | None = None

    refreshing = Every(5.0, first=5.0)
    validation = Every(75.0, first=5.0)
    checkpoints = Every(60.0, first=5.0)

    @property
    def pace(self) -> Pace:
        return self.trainer.pace

    def step(self) -> None:
        plan = self.trainer.plan
        if not plan.freeze_codes and self.pace.step >= plan.free_steps and self.pace.quantised_from < 0:
            self.trainer.begin_codes()
        self._choose_mode()
        if self.pace.step % 10 == 0:
            self._set_weights()
        assert self.runner is not None
        self.runner()

    def _choose_mode(self) -> None:
        coded = self.pace.quantised_from >= 0
        adversary = coded and (self.pace.adversary_since >= 0 or self.share >= self.trainer.plan.adversary_from)
        wanted = Mode(coded, adversary)
        if wanted == self.mode and self.runner is not None:
            return
        if adversary and self.pace.adversary_since < 0:
            self.pace.adversary_since = self.pace.step
        self.mode, self.runner = wanted, None
        self._set_weights()
        self.runner = make_runner(self.trainer, wanted, capture=self.capture)
        self.marked = (self.pace.step, time.monotonic())
        self.write({"mode": vars(wanted), "step": self.pace.step})

    def _set_weights(self) -> None:
        """Set the learning rate: cosine over the run, warmed up at the start and after codebook initialisation."""
        plan, step = self.trainer.plan, self.pace.step
        cosine = plan.final_share + (1 - plan.final_share) * 0.5 * (1 + math.cos(math.pi * self.share))
        warm = min(1.0, (step - self.pace.ramp_from + 10) / plan.warm_up)
        self.trainer.set_rate(cosine * warm * self.pace.rate_scale)
        if self.pace.adversary_since >= 0:
            self.trainer.adversary_weight.fill_(min(1.0, (step - self.pace.adversary_since) / plan.adversary_ramp))

    def tend(self) -> None:
        """Reset codes that are not used."""
        trainer, plan = self.trainer, self.trainer.plan
        if self.mode is None or not self.mode.codes or self.pace.step % plan.revive_every:
            return
        moved = 0
        if self.share < plan.revive_until and not plan.freeze_codes:
            moved = revive(trainer.codec, trainer.uses, trainer.queries)
        if moved:
            self.write({"step": self.pace.step, "revived": moved})
        trainer.uses.zero_()

    def refresh(self) -> None:
        self.trainer.reel.refresh()

    def corpus(self) -> dict[str, float]:
        return {"hours": round(self.trainer.reel.hours, 1)}

    def validate(self) -> None:
        if self.pace.quantised_from < 0:
            return
        books = self.trainer.plan.config.num_codebooks
        depths = sorted({min(depth, books) for depth in (6, 8)} | {books})
        self.write({"step": self.pace.step, "validation": validate(self.trainer, depths)})

    def saved(self) -> None:
        """Write the averaged codec, and the discriminators and classifier for a later run with `--start`."""
        save_codec(self.trainer.ema, self.out)
        save_companions(self.trainer, self.out / COMPANIONS)


def save_companions(trainer: Trainer, path: Path) -> None:
    """Write the discriminators and the phoneme classifier in fp16."""
    tensors = {
        f"{part}.{name}": value.half().contiguous()
        for part in PARTS
        for name, value in getattr(trainer, part).state_dict().items()
    }
    save_whole(tensors, path)


def load_companions(trainer: Trainer, path: Path) -> None:
    """Read what `save_companions` wrote, if it is there."""
    if path.exists():
        tensors = {name: value.float() for name, value in load_file(path).items()}
        for part in PARTS:
            own = {k.removeprefix(f"{part}."): v for k, v in tensors.items() if k.startswith(f"{part}.")}
            module = getattr(trainer, part)
            shapes = {name: value.shape for name, value in module.state_dict().items()}
            fitting = {name: value for name, value in own.items() if shapes.get(name) == value.shape}
            # Discriminators whose width has changed are initialised again.
            module.load_state_dict(fitting, strict=False)
