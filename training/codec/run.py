"""The loop around the steps: schedule, log, validation, checkpoints."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from training.codec.files import save_codec, save_whole
from training.codec.ladder import make_runner
from training.codec.plan import Diverged, Mode, Pace
from training.codec.quantiser import revive
from training.codec.trainer import Trainer
from training.codec.validation import validate


@dataclass
class Run:
    """The loop around the steps: schedule, log, validation, checkpoints."""

    trainer: Trainer
    out: Path
    began: float
    capture: bool = True
    log_every: int = 200
    validate_seconds: float = 75.0
    checkpoint_seconds: float = 60.0
    refresh_seconds: float = 5.0
    mode: Mode | None = None
    runner: Callable[[], None] | None = None
    recovered: int = 0
    due: dict[str, float] = field(default_factory=dict)
    marked: tuple[int, float] = (0, 0.0)

    @property
    def pace(self) -> Pace:
        return self.trainer.pace

    @property
    def share(self) -> float:
        """Of the whole time, how much is over."""
        return min((time.monotonic() - self.began) / (60 * self.trainer.plan.minutes), 1.0)

    def go(self) -> None:
        """Until the time is over; raises Diverged when recovering did not help."""
        self.due = {name: time.monotonic() + 5 for name in ("validate", "checkpoint", "refresh")}
        while self.share < 1 and self.pace.step < self.trainer.plan.max_steps and not (self.out / "stop").exists():
            try:
                self._advance()
            except Diverged as problem:
                self._recover(problem)
        self.trainer.stats()
        self._validate()
        self._checkpoint()

    def _advance(self) -> None:
        trainer, plan = self.trainer, self.trainer.plan
        if not plan.freeze_codes and self.pace.step >= plan.free_steps and self.pace.quantised_from < 0:
            trainer.begin_codes()
        self._choose_mode()
        if self.pace.step % 10 == 0:
            self._set_weights()
        assert self.runner is not None
        self.runner()
        self.pace.step += 1
        if self.pace.step % self.log_every == 0:
            self._report()
        if self.mode is not None and self.mode.codes and self.pace.step % plan.revive_every == 0:
            self._revive()
        if self.pace.step % 10 == 0:
            self._look_at_the_clock()

    def _choose_mode(self) -> None:
        plan = self.trainer.plan
        coded = self.pace.quantised_from >= 0
        adversary = coded and (self.pace.adversary_since >= 0 or self.share >= plan.adversary_from)
        wanted = Mode(coded, adversary)
        if wanted == self.mode:
            return
        if adversary and self.pace.adversary_since < 0:
            self.pace.adversary_since = self.pace.step
        self.mode, self.runner = wanted, None
        self._set_weights()
        self.runner = make_runner(self.trainer, wanted, capture=self.capture)
        self.marked = (self.pace.step, time.monotonic())
        self.write({"mode": vars(wanted), "step": self.pace.step})

    def _set_weights(self) -> None:
        """Learning rate: a cosine over the whole time, warmed up at the start and after the codebooks are laid out."""
        plan, step = self.trainer.plan, self.pace.step
        cosine = plan.final_share + (1 - plan.final_share) * 0.5 * (1 + math.cos(math.pi * self.share))
        warm = min(1.0, (step - self.pace.ramp_from + 10) / plan.warm_up)
        self.trainer.set_rate(cosine * warm * self.pace.rate_scale)
        if self.pace.adversary_since >= 0:
            self.trainer.adversary_weight.fill_(min(1.0, (step - self.pace.adversary_since) / plan.adversary_ramp))

    def _report(self) -> None:
        stats = self.trainer.stats()
        now = time.monotonic()
        step, then = self.marked
        self.marked = (self.pace.step, now)
        pace = {"step": self.pace.step, "share": round(self.share, 4), "hours": round(self.trainer.reel.hours, 1)}
        self.write({**pace, "ms": round(1000 * (now - then) / max(self.pace.step - step, 1), 2), **stats})

    def _revive(self) -> None:
        trainer = self.trainer
        moved = 0
        if self.share < trainer.plan.revive_until and not trainer.plan.freeze_codes:
            moved = revive(trainer.codec, trainer.uses, trainer.queries)
        if moved:
            self.write({"step": self.pace.step, "revived": moved})
        trainer.uses.zero_()

    def _look_at_the_clock(self) -> None:
        tasks: tuple[tuple[str, float, Callable[[], None]], ...] = (
            ("refresh", self.refresh_seconds, self.trainer.reel.refresh),
            ("validate", self.validate_seconds, self._validate),
            ("checkpoint", self.checkpoint_seconds, self._checkpoint),
        )
        for name, period, work in tasks:
            if time.monotonic() >= self.due[name]:
                work()
                self.due[name] = time.monotonic() + period

    def _validate(self) -> None:
        if self.pace.quantised_from < 0:
            return
        books = self.trainer.plan.config.num_codebooks
        depths = sorted({min(depth, books) for depth in (6, 8)} | {books})
        self.write({"step": self.pace.step, "validation": validate(self.trainer, depths)})

    def _checkpoint(self) -> None:
        """A checkpoint is never half written, and never holds a codec that has diverged."""
        self.trainer.stats()
        self.pace.spent = time.monotonic() - self.began
        temporary = self.out / "state.pt.tmp"
        torch.save(self.trainer.state(), temporary)
        temporary.replace(self.out / "state.pt")
        self.export()  # small beside the state, and all that is left if the machine goes away

    def _recover(self, problem: Diverged) -> None:
        """Go back to the last checkpoint and on with half the learning rate."""
        stored = self.out / "state.pt"
        self.write({"diverged": str(problem)})
        if self.recovered >= self.trainer.plan.recoveries or not stored.exists():
            raise problem
        self.recovered += 1
        scale = self.pace.rate_scale
        self.trainer.load(torch.load(stored, map_location=self.trainer.device, weights_only=True))
        self.pace.rate_scale = scale / 2
        self.pace.ramp_from = self.pace.step
        self.mode = None  # the optimisers hold new tensors, so the step has to be captured again

    def export(self) -> None:
        save_codec(self.trainer.ema, self.out)
        judges = {name: value.half().contiguous() for name, value in self.trainer.judges.state_dict().items()}
        save_whole(judges, self.out / "discriminators.safetensors")

    def write(self, line: dict[str, Any]) -> None:
        line = {"t": round(time.monotonic() - self.began, 1), **line}
        text = json.dumps(line)
        with (self.out / "log.jsonl").open("a") as log:
            log.write(text + "\n")
        print(text, flush=True)
