"""The only owner of the device. `step` is the whole of it; the rest is who and when."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.audio_decoder import VoiceBox
from shoal.engine.blocks import BlockPool, BlockStats
from shoal.engine.execution.fallback import Ladder, parse_rung
from shoal.engine.execution.runner import Runner
from shoal.engine.kv_cache import HostTier, PagedKV, kv_type
from shoal.engine.memory.stats import give_back, ran_out
from shoal.engine.policy import admission_policy
from shoal.engine.request_tracker import Stage, StageStats
from shoal.engine.scheduler import Batch, Drawn, Scheduler, SchedulerStats
from shoal.engine.sequence import Sequence
from shoal.engine.utterance import Event, Turn, Utterance
from shoal.errors import GenerationFailed, InvalidRequest
from shoal.model.slow import Head
from shoal.quantize.apply import modes_of
from shoal.speech import Sampling

logger = logging.getLogger(__name__)

# For keys and values where nobody has planned: on a CPU, and in cores that are made by hand.
USUAL_KV_BYTES = 1 << 30


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
        kind = kv_type(config.kv_dtype, model.dtype, model.device)
        kv = PagedKV(model.config.slow, block_count(checkpoint, config), config.block_size, kind, model.device)
        self.pool = BlockPool(kv.blocks, config.block_size, caching=config.prefix_cache)
        self.pool.below = self.tier = HostTier(kv, config.host_kv_bytes if config.prefix_cache else 0)
        self.scheduler = Scheduler(
            self.pool,
            slots=config.slots,
            token_budget=config.token_budget,
            stop_id=model.config.stop_id,
            max_columns=model.config.slow.max_seq_len,
            policy=admission_policy(config.policy, config.batch_size, config.batch_seconds),
            clock=clock,
        )
        head = Head(model.slow)
        plain = Runner(model, head, kv, self.scheduler.tables, config.slots)
        self.runner = Ladder(plain, head, first=parse_rung(config.rung), buckets=config.buckets)
        self.voicebox = VoiceBox(
            checkpoint.codec,
            config.slots,
            first_frames=config.first_chunk_frames,
            max_frames=config.max_chunk_frames,
            clock=clock,
            overlap=self.runner.lag > 0,
            # The fused codec packs plain weights; quantised ones are computed by the layers they are in.
            fused=self.runner.rung == "graph" and modes_of(model, checkpoint.codec).codec == "none",
        )
        self.stage = Stage(self.scheduler, self.voicebox, model.config, config, clock)
        self._suspects: deque[tuple[Sequence, int]] = deque()  # with the columns each had when it was set back
        self._starved = False  # whether the last failure was one of memory

    @property
    def idle(self) -> bool:
        return not self.stage.live

    def add(self, utterance: Utterance) -> None:
        """Queue an utterance. Raises TextError or InvalidRequest for one that could never be spoken."""
        self.stage.add(utterance)

    def cancel(self, utterance: Utterance) -> None:
        """Free everything an utterance holds; it will be heard of no more."""
        self.stage.cancel(utterance)

    def warm_up(self) -> None:
        """Speak a few frames of nothing, so that no caller pays for what is done only once; leaves no trace.

        Raises GenerationFailed if the model does not run at all: better now than at the first request.
        """
        prompt = np.zeros((2 * self.config.block_size + 1, 1 + self.checkpoint.model.config.num_codebooks), np.int32)
        frames = self.config.first_chunk_frames + 2
        nobody = Utterance(-1, [Turn("", prompt, prompt)], Sampling(max_frames=frames))
        self.stage.add(nobody)
        nobody.guard = None
        while not self.idle:
            for event in self.step():
                if event.error is not None:
                    raise event.error
        self.pool.clear_cache()
        self.stats, self.stage.stats, self.pool.stats = StepStats(), StageStats(), BlockStats()
        self.scheduler.stats = SchedulerStats()

    def step(self) -> list[Event]:
        """One frame of every running voice, and what it is made of: plan, run, hear, commit, decode."""
        events = self.stage.expire()
        batch = self._plan()
        drawn = self._run(batch)
        if drawn is None:
            return events + self._isolate(batch)
        # Before the commit: whoever fails now, or starts over, has not drawn these frames.
        events += self.stage.hear()
        progress = self.scheduler.commit(drawn)
        return events + self.stage.speak(progress)

    def _plan(self) -> Batch:
        """Return the next step; an empty one while others are in flight before a suspect that has to run alone.

        A step that fails with the suspect would otherwise accuse them too, and none would ever be found.
        """
        suspect = self._suspect()
        in_flight = (sequence for batch in self.runner.under_way for sequence in batch.sequences())
        if suspect is not None and any(sequence is not suspect for sequence in in_flight):
            return Batch()
        return self.scheduler.plan(alone=suspect)

    def _run(self, batch: Batch) -> Drawn | None:
        """The step's frames, or None if the device refused."""
        if not batch and not self.runner.under_way:
            return Drawn.nothing(batch)
        started = time.perf_counter()
        try:
            return self.runner.run(batch)
        except RuntimeError as problem:
            logger.exception("step over %d sequences failed", len(batch.sequences()))
            self._starved = ran_out(problem)
            self.stats.failed += 1
            return None
        finally:
            self.stats.steps += 1
            self.stats.seconds += time.perf_counter() - started

    def _isolate(self, batch: Batch) -> list[Event]:
        """A step failed: the rung is at fault, if there is one below; else whoever fails alone, and ends.

        Of several that fail on the lowest rung, each has to show itself alone.
        """
        failed = [sequence for each in (*self.runner.under_way, batch) for sequence in each.sequences()]
        # Who has drawn the last frame already wants nothing of this step.
        sequences = [each for each in dict.fromkeys(failed) if each.id in self.stage.live and each.finish is None]
        if self._starved and self._make_do():
            self._set_back(sequences)
            return []
        lower = self.runner.step_down()
        if len(sequences) == 1 and not lower:
            utterance = self.stage.live[sequences[0].id]
            return [self.stage.fail(utterance, GenerationFailed("the model failed on this request"))]
        self._set_back(sequences)
        self._suspects = deque() if lower else deque((each, each.length) for each in sequences)
        return []

    def _make_do(self) -> bool:
        """Memory ran out: free what is cached, and go on with fewer voices at once; False if there is only one.

        What was computing is computed again, as after any failure.
        """
        self.stats.out_of_memory += 1
        if self.config.clear_on_oom:
            give_back()
        if not self.scheduler.places.shrink(len(self.scheduler.running)):
            return False
        self.runner.abandon()
        logger.warning("at most %d voices at once until it has been calm for a while", self.scheduler.places.most)
        return True

    def _set_back(self, sequences: list[Sequence]) -> None:
        for sequence in sorted(sequences, key=lambda each: each.arrived, reverse=True):
            self.scheduler.set_back(sequence)

    def _suspect(self) -> Sequence | None:
        """Return the sequence that has to show that it runs alone, until a frame of it has landed or it has ended."""
        while self._suspects:
            first, length = self._suspects[0]
            if first.id in self.stage.live and first.length == length and first.finish is None:
                return first
            self._suspects.popleft()
        return None


def block_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    model = checkpoint.model
    kind = kv_type(config.kv_dtype, model.dtype, model.device)
    return PagedKV.bytes_per_block(model.config.slow, config.block_size, kind)


def block_count(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """As many blocks as the memory allows, and no more than all slots could fill."""
    affordable = (config.kv_bytes or USUAL_KV_BYTES) // block_bytes(checkpoint, config)
    usable = config.slots * -(-checkpoint.model.config.slow.max_seq_len // config.block_size)
    if affordable < 1:
        raise InvalidRequest(f"kv_bytes = {config.kv_bytes} does not hold one block of {config.block_size} columns")
    return min(affordable, usable)
