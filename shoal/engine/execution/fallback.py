"""A ladder, not a cliff: the fastest way to run a step that works on this machine, and the next one if it breaks.

graph   fused kernels, a whole frame in one CUDA graph
fused   the same kernels, launch by launch
eager   plain operators; runs everywhere
"""

import logging
from collections.abc import Callable
from typing import Literal

from shoal.config import EngineConfig
from shoal.engine.execution.graphs import FusedRunner, supported
from shoal.engine.execution.runner import Launcher, Overlapped, Runner
from shoal.engine.scheduler import Batch, Drawn
from shoal.errors import InvalidRequest
from shoal.model.slow import Head

logger = logging.getLogger(__name__)

Rung = Literal["graph", "fused", "eager"]
RUNGS: tuple[Rung, ...] = ("graph", "fused", "eager")


class Ladder:
    """Runs steps on one rung; `step_down` takes the next. The lowest has none below it."""

    def __init__(
        self,
        plain: Runner,
        head: Head,
        *,
        first: Rung | None = None,
        buckets: tuple[int, ...] = EngineConfig.buckets,
    ) -> None:
        self._plain, self._head, self._buckets = plain, head, buckets
        self._rungs = list(RUNGS[RUNGS.index(first or highest(plain)) :])
        # A GPU works while the host plans; a CPU would only wait for itself.
        self.lag = 1 if plain.model.device.type == "cuda" else 0
        self.runner = Overlapped(plain, self.lag)
        self._climb()

    @property
    def rung(self) -> Rung:
        return self._rungs[0]

    @property
    def under_way(self) -> list[Batch]:
        """Steps that have been launched and have not landed, oldest first."""
        return [flight.batch for flight in self.runner.flights]

    def run(self, batch: Batch) -> Drawn:
        """Launch a planned step, and hand out the oldest that is through; an empty one only waits for the others.

        Whatever a rung with another below it raises is a failure of that rung.
        """
        try:
            return self.runner.run(batch)
        except Exception as problem:
            if self.rung == "eager" or isinstance(problem, RuntimeError):
                raise
            raise RuntimeError(f"rung {self.rung} failed") from problem

    def abandon(self) -> None:
        """Forget what is under way; whoever was in it is computed again."""
        self.runner.flights.clear()

    def step_down(self) -> bool:
        """Give up the present rung after a failure, and whatever is under way; False if it was the last."""
        if self.rung == "eager":
            self.abandon()
            return False
        logger.error("rung %s failed; going on with %s", self.rung, self._rungs[1])
        self._rungs.pop(0)
        self._climb()
        return True

    def _climb(self) -> None:
        """Build the highest rung that can be built."""
        while True:
            try:
                self.runner = Overlapped(self._builders()[self.rung](), self.lag)
                return
            except Exception:  # compilers raise anything; the lowest rung is built from what is there
                if self.rung == "eager":
                    raise
                logger.exception("rung %s cannot be built here", self.rung)
                self._rungs.pop(0)

    def _builders(self) -> dict[Rung, Callable[[], Launcher]]:
        plain, head, buckets = self._plain, self._head, self._buckets
        return {
            "graph": lambda: FusedRunner(plain, head, capture=True, buckets=buckets),
            "fused": lambda: FusedRunner(plain, head, capture=False, buckets=buckets),
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
