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
from shoal.engine.execution.runner import EagerRunner, Launcher, PipelinedRunner
from shoal.engine.scheduler import Batch, StepOutput
from shoal.errors import InvalidRequest
from shoal.model.slow import Head

logger = logging.getLogger(__name__)

Backend = Literal["graph", "fused", "eager"]
BACKENDS: tuple[Backend, ...] = ("graph", "fused", "eager")


class FallbackRunner:
    """Runs steps on one backend; `downgrade` takes the next. The lowest has none below it."""

    def __init__(
        self,
        eager: EagerRunner,
        head: Head,
        *,
        first: Backend | None = None,
        buckets: tuple[int, ...] = EngineConfig.buckets,
    ) -> None:
        self._eager, self._head, self._buckets = eager, head, buckets
        self._backends = list(BACKENDS[BACKENDS.index(first or best_backend(eager)) :])
        # A GPU works while the host plans; a CPU would only wait for itself.
        self.lag = 1 if eager.model.device.type == "cuda" else 0
        self.runner = PipelinedRunner(eager, self.lag)
        self._build()

    @property
    def backend(self) -> Backend:
        return self._backends[0]

    @property
    def in_flight(self) -> list[Batch]:
        """Steps that have been launched and have not landed, oldest first."""
        return [flight.batch for flight in self.runner.pending]

    def run(self, batch: Batch) -> StepOutput:
        """Launch a planned step, and hand out the oldest that is through; an empty one only waits for the others.

        Whatever a backend with another below it raises is a failure of that backend.
        """
        try:
            return self.runner.run(batch)
        except Exception as problem:
            if self.backend == "eager" or isinstance(problem, RuntimeError):
                raise
            raise RuntimeError(f"backend {self.backend} failed") from problem

    def discard(self) -> None:
        """Forget what is under way; whoever was in it is computed again."""
        self.runner.pending.clear()

    def downgrade(self) -> bool:
        """Give up the present backend after a failure, and whatever is under way; False if it was the last."""
        if self.backend == "eager":
            self.discard()
            return False
        logger.error("backend %s failed; going on with %s", self.backend, self._backends[1])
        self._backends.pop(0)
        self._build()
        return True

    def _build(self) -> None:
        """Build the best_backend backend that can be built."""
        while True:
            try:
                self.runner = PipelinedRunner(self._builders()[self.backend](), self.lag)
                return
            except Exception:  # compilers raise anything; the lowest backend is built from what is there
                if self.backend == "eager":
                    raise
                logger.exception("backend %s cannot be built here", self.backend)
                self._backends.pop(0)

    def _builders(self) -> dict[Backend, Callable[[], Launcher]]:
        eager, head, buckets = self._eager, self._head, self._buckets
        return {
            "graph": lambda: FusedRunner(eager, head, capture=True, buckets=buckets),
            "fused": lambda: FusedRunner(eager, head, capture=False, buckets=buckets),
            "eager": lambda: eager,
        }


def best_backend(eager: EagerRunner) -> Backend:
    """Where to begin: graphs are worth trying on a GPU whose kernels run this model."""
    return "graph" if eager.model.device.type == "cuda" and supported(eager.model) else "eager"


def parse_backend(name: str) -> Backend | None:
    """A setting: a backend to begin with, or `auto` for the best_backend."""
    if name == "auto":
        return None
    for backend in BACKENDS:
        if backend == name:
            return backend
    raise InvalidRequest(f"unknown backend {name!r}: auto, {', '.join(BACKENDS)}")
