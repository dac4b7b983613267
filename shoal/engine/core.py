"""The only owner of the device. `step` is the whole of it; the rest is who and when."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.audio_decoder import AudioDecoder
from shoal.engine.blocks import BlockPool, BlockStats
from shoal.engine.execution.fallback import FallbackRunner, parse_backend
from shoal.engine.execution.runner import EagerRunner
from shoal.engine.kv_cache import HostCache, PagedKV, resolve_kv_dtype
from shoal.engine.memory.stats import is_out_of_memory, release_cached_memory
from shoal.engine.policy import admission_policy
from shoal.engine.request_tracker import RequestStats, RequestTracker
from shoal.engine.scheduler import Batch, Scheduler, SchedulerStats, StepOutput
from shoal.engine.sequence import Sequence
from shoal.engine.utterance import Event, Turn, Utterance
from shoal.errors import GenerationFailed, InvalidRequest
from shoal.model.slow import Head
from shoal.quantize.apply import modes_of
from shoal.speech import SamplingParams

logger = logging.getLogger(__name__)

# For keys and values where nobody has planned: on a CPU, and in cores that are made by hand.
DEFAULT_KV_BYTES = 1 << 30


@dataclass(slots=True)
class StepStats:
    steps: int = 0
    failed: int = 0
    out_of_memory: int = 0
    seconds: float = 0.0


class EngineCore:
    """Many voices at once. Not thread-safe: one thread calls `add`, `cancel` and `step`."""

    def __init__(
        self, checkpoint: Checkpoint, config: EngineConfig | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.checkpoint, self.config, self.clock = checkpoint, config or EngineConfig(), clock
        self.stats = StepStats()
        model, config = checkpoint.model, self.config
        dtype = resolve_kv_dtype(config.kv_dtype, model.dtype, model.device)
        kv = PagedKV(model.config.slow, block_count(checkpoint, config), config.block_size, dtype, model.device)
        self.pool = BlockPool(kv.blocks, config.block_size, caching=config.prefix_cache)
        self.pool.host_cache = self.host_cache = HostCache(kv, config.host_kv_bytes if config.prefix_cache else 0)
        self.scheduler = Scheduler(
            self.pool,
            slots=config.slots,
            token_budget=config.token_budget,
            stop_id=model.config.stop_id,
            max_tokens=model.config.slow.max_seq_len,
            policy=admission_policy(config.policy, config.batch_size, config.batch_seconds),
            clock=clock,
        )
        head = Head(model.slow)
        eager = EagerRunner(model, head, kv, self.scheduler.tables, config.slots)
        self.runner = FallbackRunner(eager, head, first=parse_backend(config.rung), buckets=config.buckets)
        self.audio_decoder = AudioDecoder(
            checkpoint.codec,
            config.slots,
            first_frames=config.first_chunk_frames,
            max_frames=config.max_chunk_frames,
            clock=clock,
            overlap=self.runner.lag > 0,
            # The fused codec packs plain weights; quantised ones are computed by the layers they are in.
            fused=self.runner.backend == "graph" and modes_of(model, checkpoint.codec).codec == "none",
        )
        self.tracker = RequestTracker(self.scheduler, self.audio_decoder, model.config, config, clock)
        self._suspects: deque[tuple[Sequence, int]] = deque()  # with the tokens each had when it was set back
        self._starved = False  # whether the last failure was one of memory

    @property
    def idle(self) -> bool:
        return not self.tracker.active

    def add(self, utterance: Utterance) -> None:
        """Queue an utterance. Raises TextError or InvalidRequest for one that could never be spoken."""
        self.tracker.add(utterance)

    def cancel(self, utterance: Utterance) -> None:
        """Free everything an utterance holds; it will be heard of no more."""
        self.tracker.cancel(utterance)

    def warm_up(self) -> None:
        """Speak a few frames of nothing, so that no caller pays for what is done only once; leaves no trace.

        Raises GenerationFailed if the model does not run at all: better now than at the first request.
        """
        prompt = np.zeros((2 * self.config.block_size + 1, 1 + self.checkpoint.model.config.num_codebooks), np.int32)
        frames = self.config.first_chunk_frames + 2
        nobody = Utterance(-1, [Turn("", prompt, prompt)], SamplingParams(max_frames=frames))
        self.tracker.add(nobody)
        nobody.guard = None
        while not self.idle:
            for event in self.step():
                if event.error is not None:
                    raise event.error
        self.pool.clear_cache()
        self.stats, self.tracker.stats, self.pool.stats = StepStats(), RequestStats(), BlockStats()
        self.scheduler.stats = SchedulerStats()

    def step(self) -> list[Event]:
        """One frame of every running voice, and what it is made of: plan, run, hear, commit, decode."""
        events = self.tracker.expire()
        batch = self._plan()
        drawn = self._run(batch)
        if drawn is None:
            return events + self._isolate(batch)
        # Before the commit: whoever fails now, or starts over, has not drawn these frames.
        events += self.tracker.collect_audio()
        progress = self.scheduler.commit(drawn)
        return events + self.tracker.submit_audio(progress)

    def _plan(self) -> Batch:
        """Return the next step; an empty one while others are in flight before a suspect that has to run alone.

        A step that fails with the suspect would otherwise accuse them too, and none would ever be found.
        """
        suspect = self._suspect()
        in_flight = (sequence for batch in self.runner.in_flight for sequence in batch.sequences())
        if suspect is not None and any(sequence is not suspect for sequence in in_flight):
            return Batch()
        return self.scheduler.plan(alone=suspect)

    def _run(self, batch: Batch) -> StepOutput | None:
        """The step's frames, or None if the device refused."""
        if not batch and not self.runner.in_flight:
            return StepOutput.nothing(batch)
        started = time.perf_counter()
        try:
            return self.runner.run(batch)
        except RuntimeError as problem:
            logger.exception("step over %d sequences failed", len(batch.sequences()))
            self._starved = is_out_of_memory(problem)
            self.stats.failed += 1
            return None
        finally:
            self.stats.steps += 1
            self.stats.seconds += time.perf_counter() - started

    def _isolate(self, batch: Batch) -> list[Event]:
        """A step failed: the backend is at fault, if there is one below; else whoever fails alone, and ends.

        Of several that fail on the lowest backend, each has to show itself alone.
        """
        failed = [sequence for each in (*self.runner.in_flight, batch) for sequence in each.sequences()]
        # Who has drawn the last frame already wants nothing of this step.
        sequences = [each for each in dict.fromkeys(failed) if each.id in self.tracker.active and each.finish is None]
        if self._starved and self._make_do():
            self._requeue(sequences)
            return []
        lower = self.runner.downgrade()
        if len(sequences) == 1 and not lower:
            utterance = self.tracker.active[sequences[0].id]
            return [self.tracker.fail(utterance, GenerationFailed("the model failed on this request"))]
        self._requeue(sequences)
        self._suspects = deque() if lower else deque((each, each.length) for each in sequences)
        return []

    def _make_do(self) -> bool:
        """Memory ran out: free what is cached, and go on with fewer voices at once; False if there is only one.

        What was computing is computed again, as after any failure.
        """
        self.stats.out_of_memory += 1
        if self.config.clear_on_oom:
            release_cached_memory()
        if not self.scheduler.concurrency.shrink(len(self.scheduler.running)):
            return False
        self.runner.discard()
        logger.warning("at most %d voices at once until it has been calm for a while", self.scheduler.concurrency.most)
        return True

    def _requeue(self, sequences: list[Sequence]) -> None:
        for sequence in sorted(sequences, key=lambda each: each.arrived, reverse=True):
            self.scheduler.requeue(sequence)

    def _suspect(self) -> Sequence | None:
        """Return the sequence that has to show that it runs alone, until a frame of it has landed or it has ended."""
        while self._suspects:
            first, length = self._suspects[0]
            if first.id in self.tracker.active and first.length == length and first.finish is None:
                return first
            self._suspects.popleft()
        return None


def block_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    model = checkpoint.model
    dtype = resolve_kv_dtype(config.kv_dtype, model.dtype, model.device)
    return PagedKV.bytes_per_block(model.config.slow, config.block_size, dtype)


def block_count(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """As many blocks as the memory allows, and no more than all slots could fill."""
    affordable = (config.kv_bytes or DEFAULT_KV_BYTES) // block_bytes(checkpoint, config)
    usable = config.slots * -(-checkpoint.model.config.slow.max_seq_len // config.block_size)
    if affordable < 1:
        raise InvalidRequest(f"kv_bytes = {config.kv_bytes} does not hold one block of {config.block_size} tokens")
    return min(affordable, usable)
