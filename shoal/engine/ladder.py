"""A ladder, not a cliff: the fastest way to run a step that works on this machine, and the next one if it breaks.

graph   fused kernels, a whole frame in one CUDA graph
fused   the same kernels, launch by launch
eager   plain operators; runs everywhere
"""

import logging
from collections.abc import Callable
from typing import Literal, Protocol

from shoal.engine.graphs import BUCKETS, FusedRunner, supported
from shoal.engine.runner import Runner
from shoal.engine.scheduler import Batch, Drawn
from shoal.errors import InvalidRequest
from shoal.model.slow import Head

logger = logging.getLogger(__name__)

Rung = Literal["graph", "fused", "eager"]
RUNGS: tuple[Rung, ...] = ("graph", "fused", "eager")


class StepRunner(Protocol):
    def run(self, batch: Batch) -> Drawn:
        """Compute a planned step."""


class Ladder:
    """Runs steps on one rung; `step_down` takes the next. The lowest has none below it."""

    def __init__(self, plain: Runner, head: Head, *, first: Rung | None = None) -> None:
        self._plain, self._head = plain, head
        self._rungs = list(RUNGS[RUNGS.index(first or highest(plain)) :])
        self.runner: StepRunner = plain
        self._climb()

    @property
    def rung(self) -> Rung:
        return self._rungs[0]

    def run(self, batch: Batch) -> Drawn:
        """Compute a planned step; whatever a rung with another below it raises is a failure of that rung."""
        try:
            return self.runner.run(batch)
        except Exception as problem:
            if self.rung == "eager" or isinstance(problem, RuntimeError):
                raise
            raise RuntimeError(f"rung {self.rung} failed") from problem

    def step_down(self) -> bool:
        """Give up the present rung after a failure; False if it was the last."""
        if self.rung == "eager":
            return False
        logger.error("rung %s failed; going on with %s", self.rung, self._rungs[1])
        self._rungs.pop(0)
        self._climb()
        return True

    def _climb(self) -> None:
        """Build the highest rung that can be built."""
        while True:
            try:
                self.runner = self._builders()[self.rung]()
                return
            except Exception:  # compilers raise anything; the lowest rung is built from what is there
                if self.rung == "eager":
                    raise
                logger.exception("rung %s cannot be built here", self.rung)
                self._rungs.pop(0)

    def _builders(self) -> dict[Rung, Callable[[], StepRunner]]:
        plain, head = self._plain, self._head
        return {
            "graph": lambda: FusedRunner(plain, head, BUCKETS, capture=True),
            "fused": lambda: FusedRunner(plain, head, BUCKETS, capture=False),
            "eager": lambda: plain,
        }


def highest(plain: Runner) -> Rung:
    """Where to begin: graphs are worth trying on a GPU whose kernels run this model."""
    return "graph" if plain.model.device.type == "cuda" and supported(plain.model) else "eager"


def parse_rung(name: str) -> Rung | None:
    """A setting: a rung to begin with, or `auto` for the highest."""
    if name == "auto":
        return None
    for rung in RUNGS:
        if rung == name:
            return rung
    raise InvalidRequest(f"unknown rung {name!r}: auto, {', '.join(RUNGS)}")
