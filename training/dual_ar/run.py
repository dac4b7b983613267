"""Language model training run: learning rates, selection of the best weights, and files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import training.run
from shoal.model.dual_ar import DualAR
from training.dual_ar.compile import make_runner
from training.dual_ar.files import save_language_model
from training.dual_ar.plan import Pace
from training.dual_ar.trainer import Trainer
from training.encode import About
from training.int8 import int8_rounded
from training.run import Every


@dataclass(kw_only=True)
class Run(training.run.Run[Trainer]):
    about: About
    written: int = -1  # the step of the best weights that are on disk

    finish_seconds = 20.0
    refreshing = Every(3.0, first=0.0)
    validation = Every(30.0, first=20.0)
    checkpoints = Every(60.0, first=60.0)

    @property
    def pace(self) -> Pace:
        return self.trainer.pace

    def go(self) -> None:
        """Run until the time is over. The best weights are written even if the run fails."""
        if self.pace.began_share < 0:
            self.pace.began_share = self.share
        try:
            super().go()
        finally:
            self.export()

    def step(self) -> None:
        self.set_rate()
        if self.runner is None:
            self.runner = make_runner(self.trainer, capture=self.capture)
        self.trainer.feed()
        self.runner()

    def set_rate(self) -> None:
        """Set the learning rate: warm-up, constant, then linear decay to the end."""
        plan, pace = self.trainer.plan, self.pace
        warm = min(1.0, (pace.step - pace.ramp_from + 1) / plan.warm_up)
        left = (1 - self.share) / ((1 - max(pace.began_share, 0.0)) * plan.decay_share)
        self.trainer.set_rate(warm * max(plan.final_share, min(1.0, left)) * pace.rate_scale)

    def look_at_the_clock(self) -> None:
        # Synchronizes, so that the host does not run minutes ahead of the wall clock that drives the schedule.
        self.trainer.stats()
        super().look_at_the_clock()

    def refresh(self) -> None:
        self.trainer.library.refresh()

    def corpus(self) -> dict[str, float]:
        library = self.trainer.library
        hours = library.frames * self.about.frame_length / self.about.sample_rate / 3600
        passes = self.pace.step * self.trainer.positions.numel() / library.filled
        return {"hours": round(hours, 2), "passes": round(passes, 2)}

    def validate(self) -> None:
        found = self.trainer.validate()
        kept = self.trainer.keep_if_best(found["score"])
        self.write({"step": self.pace.step, "validation": found, "best": kept})

    def saved(self) -> None:
        if self.pace.best_step != self.written:
            self._save_best({"step": self.pace.best_step, "score": self.pace.best_score})

    def export(self) -> None:
        """Write the best weights so far, and the loss after int8 rounding."""
        trainer = self.trainer
        if not trainer.best:
            return
        trainer.ema.load_state_dict(trainer.best)
        found = {"fp32": trainer.validate(), "int8": trainer.validate(int8_rounded(trainer.ema))}
        self.write({"best_step": self.pace.best_step, "storage": found})
        self._save_best({"step": self.pace.best_step, **found})

    def _save_best(self, trained: dict[str, Any]) -> None:
        """Save the best weights so far as a model, so that they can be used before training ends."""
        best = DualAR(self.trainer.plan.config)
        best.load_state_dict(self.trainer.best)
        save_language_model(self.out / "best", best, self.about, trained)
        self.written = self.pace.best_step
