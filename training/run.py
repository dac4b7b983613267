"""Training loop: steps, log, validation, checkpoints, and recovery from divergence.

The wall clock ends a run, so a slow machine gets fewer steps but a finished model. Its folder holds `log.jsonl`,
the results, and `state.pt`, the checkpoint for `--resume`. A file `stop` in it ends the run as if the time were over.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from training.means import Diverged

STATE = "state.pt"


@dataclass
class Pace:
    """Progress of a run, stored in its checkpoint."""

    step: int = 0
    spent: float = 0.0  # seconds, over all parts of a run that was resumed
    rate_scale: float = 1.0
    ramp_from: int = 0  # the step from which the rates warm up


class Plan(Protocol):
    """Time limit of a run, and how often it may recover."""

    @property
    def minutes(self) -> float: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def recoveries(self) -> int: ...


class Trainer(Protocol):
    """Interface of the codec trainer and the language model trainer."""

    device: torch.device

    @property
    def plan(self) -> Plan: ...
    @property
    def pace(self) -> Pace: ...

    def stats(self) -> dict[str, float]:
        """Return running means of the steps. Synchronizes with the device. Raises Diverged."""

    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...


def restore(trainer: Trainer, checkpoint: Path) -> None:
    trainer.load(torch.load(checkpoint, map_location=trainer.device, weights_only=True))


@dataclass(frozen=True)
class Every:
    """Interval of a periodic task and its delay after the start, in seconds."""

    seconds: float
    first: float


@dataclass
class Chore:
    """Periodic task."""

    work: Callable[[], object]
    every: Every
    due: float

    def look(self) -> None:
        if time.monotonic() >= self.due:
            self.work()
            self.due = time.monotonic() + self.every.seconds


T = TypeVar("T", bound=Trainer)


@dataclass
class Run(ABC, Generic[T]):
    trainer: T
    out: Path
    began: float
    capture: bool = True
    log_every: int = 100  # steps
    sync_every: int = 10
    runner: Callable[[], None] | None = None  # runs one step; None if it must be built
    recovered: int = 0
    chores: list[Chore] = field(default_factory=list)
    marked: tuple[int, float] = (0, 0.0)  # step and time from which the next report counts its pace

    finish_seconds: ClassVar[float] = 0.0  # time reserved for the last validation and the files
    refreshing: ClassVar[Every]
    validation: ClassVar[Every]
    checkpoints: ClassVar[Every]

    @abstractmethod
    def step(self) -> None:
        """Run one step, building its runner first if necessary."""

    def tend(self) -> None:
        """Do work between steps, such as resetting unused codes."""

    @abstractmethod
    def refresh(self) -> None:
        """Add new shards of the corpus."""

    @abstractmethod
    def corpus(self) -> dict[str, float]:
        """Return the fields of the log that describe the corpus."""

    @abstractmethod
    def validate(self) -> None: ...

    @abstractmethod
    def saved(self) -> None:
        """Write further files after a checkpoint, so that they survive the loss of the machine."""

    @property
    def pace(self) -> Pace:
        return self.trainer.pace

    @property
    def share(self) -> float:
        """Return the fraction of the training time that has passed."""
        time_for_steps = 60 * self.trainer.plan.minutes - self.finish_seconds
        return min((time.monotonic() - self.began) / max(time_for_steps, 1e-9), 1.0)

    @property
    def over(self) -> bool:
        return self.share >= 1 or self.pace.step >= self.trainer.plan.max_steps or (self.out / "stop").exists()

    def go(self) -> None:
        """Train until the time is over. Raises Diverged when recovery did not help."""
        self._begin()
        while not self.over:
            try:
                self._advance()
            except Diverged as problem:
                self._recover(problem)
        self.trainer.stats()
        self.validate()
        self.checkpoint()

    def _begin(self) -> None:
        now = time.monotonic()
        self.marked = (self.pace.step, now)
        work: tuple[tuple[Callable[[], None], Every], ...] = (
            (self.refresh, self.refreshing),
            (self.validate, self.validation),
            (self.checkpoint, self.checkpoints),
        )
        self.chores = [Chore(do, every, now + every.first) for do, every in work]

    def _advance(self) -> None:
        self.step()
        self.pace.step += 1
        if self.pace.step % self.log_every == 0:
            self._report()
        self.tend()
        if self.pace.step % self.sync_every == 0:
            self.look_at_the_clock()

    def look_at_the_clock(self) -> None:
        for chore in self.chores:
            chore.look()

    def _report(self) -> None:
        stats = self.trainer.stats()
        now, (step, then) = time.monotonic(), self.marked
        self.marked = (self.pace.step, now)
        ms = 1000 * (now - then) / max(self.pace.step - step, 1)
        pace = {"step": self.pace.step, "share": round(self.share, 4), **self.corpus()}
        self.write({**pace, "ms": round(ms, 2), **stats})

    def checkpoint(self) -> None:
        """Write a checkpoint atomically, unless the model has diverged."""
        self.trainer.stats()
        self.pace.spent = time.monotonic() - self.began
        temporary = self.out / f"{STATE}.tmp"
        torch.save(self.trainer.state(), temporary)
        temporary.replace(self.out / STATE)
        self.saved()

    def _recover(self, problem: Diverged) -> None:
        """Continue from the last checkpoint with half the learning rates."""
        stored = self.out / STATE
        self.write({"diverged": str(problem)})
        if self.recovered >= self.trainer.plan.recoveries or not stored.exists():
            raise problem
        self.recovered += 1
        scale = self.pace.rate_scale
        restore(self.trainer, stored)
        self.pace.rate_scale = scale / 2
        self.pace.ramp_from = self.pace.step
        self.runner = None  # the optimisers hold new tensors, so the step has to be captured again

    def write(self, line: dict[str, Any]) -> None:
        """Append one line to the log and print it."""
        text = json.dumps({"t": round(time.monotonic() - self.began, 1), **line})
        with (self.out / "log.jsonl").open("a") as log:
            log.write(text + "\n")
        print(text, flush=True)
