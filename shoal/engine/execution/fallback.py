"""Backend fallback: the fastest backend that works on this machine, and the next one when it fails.

graph        fused kernels, a whole frame in one CUDA graph
fused        the same kernels, launched one by one
plain-graph  PyTorch operators in CUDA graphs; runs on every GPU and with all weights
native       C++ on a CPU, a whole step in one call
eager        PyTorch operators; runs everywhere

A size of a backend that fails is left out while others remain. A backend that fails in service is tried again later.
"""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, NoReturn, cast

from shoal.config import DEFAULT_TOKEN_BUDGET, EngineConfig
from shoal.engine.execution.fixed_size import FixedSizeRunner
from shoal.engine.execution.graphs import FusedRunner, unsupported
from shoal.engine.execution.native import NativeRunner
from shoal.engine.execution.plain_graphs import PlainGraphRunner
from shoal.engine.execution.retry import RetryTimer
from shoal.engine.execution.runner import EagerRunner, Launcher, PipelinedRunner
from shoal.engine.scheduling.scheduler import Batch, StepOutput
from shoal.errors import InvalidRequest, describe_error, device_errors
from shoal.model.slow import Head
from shoal.native.library import Context, NativeUnavailable

logger = logging.getLogger(__name__)

Backend = Literal["graph", "fused", "plain-graph", "native", "eager"]
BACKENDS: tuple[Backend, ...] = ("graph", "fused", "plain-graph", "native", "eager")


class FallbackRunner:
    """Runs steps on one backend; `downgrade` switches to the next one until a retry is due."""

    def __init__(
        self,
        eager: EagerRunner,
        head: Head,
        *,
        first: Backend | None = None,
        buckets: tuple[int, ...] = EngineConfig.buckets,
        token_budget: int | None = None,
        isa: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with `first`, or the best backend. `token_budget` is the setting; None: measured."""
        self._eager, self._head, self._buckets, self._isa = eager, head, buckets, isa
        self._token_budget = token_budget
        usable = [each for each in BACKENDS if each != "native" or eager.model.device.type == "cpu"]
        self._candidates = usable[usable.index(first or best_backend(eager)) :]
        self._built: dict[Backend, Launcher] = {}
        self._retry = RetryTimer(clock)
        self._worked = False  # whether a step succeeded since a size was left out
        self.reasons: dict[Backend, str] = {}  # why a backend is not used
        if first is None and (reason := unsupported(eager.model)) is not None:
            self.reasons["graph"] = reason
        # On a GPU the host plans the next step while the device runs; on a CPU there is nothing to overlap.
        self.lag = 1 if eager.model.device.type == "cuda" else 0
        self.backend: Backend = self._candidates[0]
        self.runner = PipelinedRunner(self._build(), self.lag)

    @property
    def native_context(self) -> Context | None:
        """The library context of the native backend, which the codec shares; None on other backends."""
        return cast(NativeRunner, self.runner.launcher).context if self.backend == "native" else None

    @property
    def in_flight(self) -> list[Batch]:
        """Batches that are launched and not yet collected, oldest first."""
        return [step.batch for step in self.runner.pending]

    @property
    def token_budget(self) -> int:
        """Return the maximum prompt tokens of a step: as set, or what the current backend computes in a few ms."""
        if self._token_budget is not None:
            return self._token_budget
        launcher = self.runner.launcher
        return launcher.token_budget if isinstance(launcher, FusedRunner) else DEFAULT_TOKEN_BUDGET

    @property
    def token_seconds(self) -> float:
        """Return the time of a prompt token on the current backend; infinite if it is not measured."""
        launcher = self.runner.launcher
        return launcher.token_seconds if isinstance(launcher, FusedRunner) else math.inf

    @property
    def frame_seconds(self) -> float:
        """Return the time of a frame of every slot on the current backend; infinite if it is not measured."""
        launcher = self.runner.launcher
        return launcher.frame_seconds if isinstance(launcher, FusedRunner) else math.inf

    @property
    def dropped(self) -> list[str]:
        """Return kind, size and reason of the sizes that the current backend leaves out."""
        launcher = self.runner.launcher
        return launcher.dropped if isinstance(launcher, FixedSizeRunner) else []

    def launch(self, batch: Batch) -> Callable[[], StepOutput]:
        """Launch a batch and return the function that waits for the oldest step in flight and returns its output.

        After an empty batch it waits for any step in flight, otherwise only if `lag` others have been launched since.
        Any error of a backend that has a fallback is raised as a RuntimeError, by either of them.
        """
        if self._retry.due():
            self._upgrade()
        with device_errors(self._raise_failed_step):
            self.runner.launch(batch)
        return partial(self._wait, drain=not batch)

    def _wait(self, *, drain: bool) -> StepOutput:
        with device_errors(self._raise_failed_step):
            output = self.runner.wait(drain=drain)
        self._worked = True
        return output

    def _raise_failed_step(self, error: Exception) -> NoReturn:
        self.reasons[self.backend] = describe_error(error)
        if self.backend == "eager" or isinstance(error, RuntimeError):
            raise error
        raise RuntimeError(f"backend {self.backend} failed") from error

    def discard(self) -> None:
        """Discard the steps in flight; their sequences have to be recomputed."""
        self.runner.pending.clear()

    def downgrade(self) -> bool:
        """Leave out the size that failed, or switch to the next backend; False if there is neither.

        Discards the steps in flight.
        """
        self.discard()
        if self._drop_size():
            return True
        if self.backend == "eager":
            return False
        failed = self.backend
        self.backend = self._candidates[self._candidates.index(failed) + 1]
        self.runner = PipelinedRunner(self._build(), self.lag)
        seconds = self._retry.start()
        logger.error("backend %s failed; using %s and trying again in %.0f s", failed, self.backend, seconds)
        return True

    def _drop_size(self) -> bool:
        """Leave out the size that failed, unless no step has worked since the last failure: size is not the cause."""
        launcher = self.runner.launcher
        if not self._worked or not isinstance(launcher, FixedSizeRunner) or not launcher.drop_failed():
            return False
        self._worked = False
        self._retry.start()
        return True

    def _upgrade(self) -> None:
        """Return to the fastest backend that could be built, with all its sizes. Steps in flight are kept."""
        self._retry.stop()
        fastest = next(each for each in self._candidates if each in self._built)
        # A backend that kept running has worked: if one of its sizes fails again, only that size is left out again.
        self._worked = self._worked and fastest == self.backend
        self.backend = fastest
        self.runner.launcher = launcher = self._built[self.backend]
        self.reasons.pop(self.backend, None)
        if isinstance(launcher, FixedSizeRunner):
            launcher.restore()
        logger.info("trying backend %s again", self.backend)

    def _build(self) -> Launcher:
        """Return the launcher of the current backend, or of the next one that can be built."""
        while self.backend not in self._built:
            with device_errors(self._skip_backend):
                self._built[self.backend] = self._builders()[self.backend]()
        return self._built[self.backend]

    def _skip_backend(self, error: Exception) -> None:
        """Switch to the next backend after the current one could not be built; eager has no next one."""
        if self.backend == "eager":
            raise error
        self.reasons[self.backend] = describe_error(error)
        if isinstance(error, NativeUnavailable):
            logger.warning("backend native is not available, using eager: %s", error)
        else:  # `slow_backends` warns once at the end of the start; this line has the cause
            logger.info("backend %s cannot be built; trying the next one", self.backend, exc_info=error)
        self.backend = self._candidates[self._candidates.index(self.backend) + 1]

    def _builders(self) -> dict[Backend, Callable[[], Launcher]]:
        eager, head, buckets, budget = self._eager, self._head, self._buckets, self._token_budget
        gpu = eager.model.device.type == "cuda"
        return {
            "graph": lambda: FusedRunner(eager, head, capture=True, buckets=buckets, token_budget=budget),
            # `check`: every size is launched once, because kernels are compiled and checked by their first launch.
            "fused": lambda: FusedRunner(eager, head, capture=False, check=gpu, buckets=buckets),
            "plain-graph": lambda: PlainGraphRunner(eager, capture=gpu, buckets=buckets),
            "native": lambda: NativeRunner(eager, head, isa=self._isa),
            "eager": lambda: eager,
        }


def best_backend(eager: EagerRunner) -> Backend:
    """Return the first backend to try: native on a CPU, a graph backend on a GPU, eager elsewhere (mps).

    On a GPU that is graph if the fused kernels support the model, else plain-graph.
    """
    if eager.model.device.type != "cuda":
        return "native" if eager.model.device.type == "cpu" else "eager"
    return "graph" if unsupported(eager.model) is None else "plain-graph"


def parse_backend(name: str) -> Backend | None:
    """Return the first backend of the setting `backend`, None for `auto`. Raises InvalidRequest."""
    if name == "auto":
        return None
    for backend in BACKENDS:
        if backend == name:
            return backend
    raise InvalidRequest(f"unknown backend {name!r}: use auto, {', '.join(BACKENDS)}")
