"""Distinguish a request that makes its steps fail from a device on which every step fails.

After a sticky CUDA error, or with a damaged model in memory, every step raises. Failing requests one by one would then
never end: DeviceFailed ends the engine thread instead, and with it the engine process, which the supervisor replaces.
"""

import logging
from collections.abc import Iterable

import numpy as np
import torch

from shoal.engine.execution.fallback import FallbackRunner
from shoal.engine.kv_cache import PagedKV
from shoal.engine.scheduling.scheduler import Batch, Prefill
from shoal.engine.scheduling.sequence import Sequence
from shoal.errors import DeviceFailed
from shoal.model.config import DualARConfig
from shoal.speech import SamplingParams

logger = logging.getLogger(__name__)

PROBE_ID = -1  # id of the sequence that tests the device; requests have ids from 0 on
PROBES = 3  # attempts: the first may run out of memory that a step in flight is about to release
# Consecutive requests that fail alone, or utterances that the codec cannot decode, after which the device counts as
# broken: the short prompt of a probe does not trigger every fault.
MAX_FAILURES = 8


class DeviceHealth:
    """Failures of the device since its last successful step. Used on the engine thread."""

    def __init__(self, runner: FallbackRunner, kv: PagedKV, tables: np.ndarray, config: DualARConfig) -> None:
        self._runner, self._kv, self._tables = runner, kv, tables
        self._token_width = 1 + config.num_codebooks
        self._blamed: set[int] = set()  # ids of the sequences of failed steps since the last step with frames
        self._failures = 0  # requests that failed alone since then

    def record_step(self, has_frames: bool, codec_failures: int) -> None:
        """Forget earlier failures after a step with frames. Raises DeviceFailed when the codec keeps failing."""
        if codec_failures >= MAX_FAILURES:
            raise DeviceFailed(f"{codec_failures} codec calls in a row failed")
        if has_frames:
            self._failures = 0
            self._blamed.clear()

    def record_failed_step(self, sequences: Iterable[Sequence]) -> None:
        """Blame all sequences of a failed step, and raise DeviceFailed when the device no longer responds."""
        self._blamed.update(each.id for each in sequences)
        problem = device_problem(self._kv.keys.device)
        if problem is not None:
            raise DeviceFailed(f"the device does not respond: {problem}", tuple(self._blamed))

    def record_failed_request(self, *, replayed: bool) -> None:
        """Count a request that failed alone. Raises DeviceFailed after too many in a row.

        Replayed requests do not count: they may have crashed an engine process before, and a client that repeats
        such a request must not restart the engine for all others.
        """
        self._failures += not replayed
        if self._failures >= MAX_FAILURES:
            raise DeviceFailed(f"{self._failures} requests in a row failed", tuple(self._blamed))

    def probe(self, slot: int) -> None:
        """Generate one frame of a short prompt in `slot`, whose sequence must not be in flight. Raises DeviceFailed."""
        for _ in range(PROBES):
            try:
                return self._run_probe(slot)
            except RuntimeError:  # the runner raises errors of compilers and drivers as this class
                logger.exception("the probe of the device failed")
                self._runner.discard()
        raise DeviceFailed("the device does not run a short prompt either", tuple(self._blamed))

    def _run_probe(self, slot: int) -> None:
        prompt = np.zeros((self._kv.keys.shape[2], self._token_width), np.int32)  # one block
        sequence = Sequence.start(PROBE_ID, prompt, SamplingParams(max_frames=1), len(prompt) + 1)
        sequence.slot, sequence.computed = slot, len(prompt)
        self._tables[slot, 0] = self._kv.spare  # needs no free block
        wait = self._runner.launch(Batch([Prefill(sequence, sequence.epoch, 0, len(prompt), samples_frame=True)]))
        wait()
        while self._runner.in_flight:
            wait = self._runner.launch(Batch())
            wait()


def device_problem(device: torch.device) -> str | None:
    """Allocate a few bytes, compute and synchronize; return the error that this raised, or None."""
    try:
        torch.ones(2, device=device).sum().item()  # `item` waits for the device
    except torch.OutOfMemoryError:
        return None  # a full device still works
    except RuntimeError as error:
        return str(error)
    return None
