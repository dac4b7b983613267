"""Backend fallback: the fastest backend that works on this machine, and the next one when it fails.

graph   fused kernels, a whole frame in one CUDA graph
fused   the same kernels, launched one by one
eager   PyTorch operators; runs everywhere
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
    """Runs steps on one backend; `downgrade` switches to the next one."""

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
        # On a GPU the host plans the next step while the device runs; on a CPU there is nothing to overlap.
        self.lag = 1 if eager.model.device.type == "cuda" else 0
        self.runner = PipelinedRunner(eager, self.lag)
        self._build()

    @property
    def backend(self) -> Backend:
        return self._backends[0]

    @property
    def in_flight(self) -> list[Batch]:
        """Batches that are launched and not yet collected, oldest first."""
        return [step.batch for step in self.runner.pending]

    def run(self, batch: Batch) -> StepOutput:
        """Launch a batch and return the oldest finished step; an empty batch only waits for steps in flight.

        Any error of a backend that has a fallback is raised as a RuntimeError.
        """
        try:
            return self.runner.run(batch)
        except Exception as error:  # edge to compilers and kernels, which raise anything
            if self.backend == "eager" or isinstance(error, RuntimeError):
                raise
            raise RuntimeError(f"backend {self.backend} failed") from error

    def discard(self) -> None:
        """Discard the steps in flight; their sequences have to be recomputed."""
        self.runner.pending.clear()

    def downgrade(self) -> bool:
        """Switch to the next backend and discard the steps in flight; False if there is no other backend."""
        if self.backend == "eager":
            self.discard()
            return False
        logger.error("backend %s failed; falling back to %s", self.backend, self._backends[1])
        self._backends.pop(0)
        self._build()
        return True

    def _build(self) -> None:
        """Build the first backend that can be built."""
        while True:
            try:
                self.runner = PipelinedRunner(self._builders()[self.backend](), self.lag)
                return
            except Exception:  # edge to the compiler, which raises anything; the eager backend needs none
                if self.backend == "eager":
                    raise
                logger.exception("backend %s cannot be built; trying the next one", self.backend)
                self._backends.pop(0)

    def _builders(self) -> dict[Backend, Callable[[], Launcher]]:
        eager, head, buckets = self._eager, self._head, self._buckets
        return {
            "graph": lambda: FusedRunner(eager, head, capture=True, buckets=buckets),
            "fused": lambda: FusedRunner(eager, head, capture=False, buckets=buckets),
            "eager": lambda: eager,
        }


def best_backend(eager: EagerRunner) -> Backend:
    """Return the first backend to try: graphs on a GPU whose kernels support this model."""
    return "graph" if eager.model.device.type == "cuda" and supported(eager.model) else "eager"


def parse_backend(name: str) -> Backend | None:
    """Return the first backend of the setting `rung`, None for `auto`. Raises InvalidRequest."""
    if name == "auto":
        return None
    for backend in BACKENDS:
        if backend == name:
            return backend
    raise InvalidRequest(f"unknown rung {name!r}: use auto, {', '.join(BACKENDS)}")
