"""EngineCore owns the device and runs one schedule -> execute -> decode step at a time."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.config import DEFAULT_TOKEN_BUDGET, EngineConfig
from shoal.engine.device_health import PROBE_ID, DeviceHealth
from shoal.engine.execution.fallback import Backend, FallbackRunner, parse_backend
from shoal.engine.execution.runner import EagerRunner
from shoal.engine.kv_cache import HostCache, PagedKV, require_kv_backend, resolve_kv_dtype
from shoal.engine.memory.stats import is_out_of_memory, release_cached_memory
from shoal.engine.output.audio_decoder import AudioDecoder, CodecBackend
from shoal.engine.output.chunks import MIN_CHUNK_FRAMES, first_chunk_frames
from shoal.engine.request_tracker import RequestStats, RequestTracker
from shoal.engine.scheduling.blocks import BlockPool, BlockStats
from shoal.engine.scheduling.policy import admission_policy
from shoal.engine.scheduling.scheduler import Batch, Scheduler, SchedulerStats, StepOutput, burst_tokens
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.utterance import Event, Turn, Utterance
from shoal.errors import GenerationFailed, InvalidRequest
from shoal.kernels.jit import kernels_unavailable
from shoal.model.slow import Head
from shoal.native.choice import open_context
from shoal.quantize.apply import modes_of
from shoal.speech import SamplingParams

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Size of the KV cache without a memory profile: on a CPU, and in cores that are built directly.
DEFAULT_KV_BYTES = 1 << 30


@dataclass(slots=True)
class StepStats:
    steps: int = 0
    failed: int = 0
    out_of_memory: int = 0
    seconds: float = 0.0


class EngineCore:
    """Continuous batching over one model and codec. Not thread-safe: one thread calls `add`, `cancel` and `step`.

    `step` raises DeviceFailed when the device no longer runs anything; the core cannot be used after that.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        record_weights: bool = False,
    ) -> None:
        """With `record_weights`, steps return attention weights over the text instead of the path through it.

        For calibration only: `Utterance.words` must then be an object whose `feed` takes weights.
        """
        self.checkpoint, self.config, self.clock = checkpoint, config or EngineConfig(), clock
        self.stats = StepStats()
        model, config = checkpoint.model, self.config
        self.use_device()
        require_kv_backend(config.kv_dtype, model.device, config.backend)
        dtype = resolve_kv_dtype(config.kv_dtype, model.dtype, model.device)
        kv = PagedKV(model.config.slow, block_count(checkpoint, config), config.block_size, dtype, model.device)
        self.pool = BlockPool(kv.blocks, config.block_size, caching=config.prefix_cache)
        self.pool.host_cache = self.host_cache = HostCache(kv, config.host_kv_bytes if config.prefix_cache else 0)
        self.scheduler = Scheduler(
            self.pool,
            slots=config.slots,
            token_budget=config.token_budget or DEFAULT_TOKEN_BUDGET,
            stop_id=model.config.stop_id,
            max_tokens=model.config.slow.max_seq_len,
            policy=admission_policy(config.policy, config.batch_size, config.batch_seconds),
            clock=clock,
        )
        first = parse_backend(config.backend)
        self.runner = self._build_runner(kv, first, record_weights=record_weights)
        self.health = DeviceHealth(self.runner, kv, self.scheduler.tables, model.config)
        self.audio_decoder = self._build_audio_decoder(first)
        self.tracker = RequestTracker(self.scheduler, self.audio_decoder, model.config, config, clock)
        self._suspects: deque[tuple[Sequence, int]] = deque()  # each with its length when the step failed
        self._out_of_memory = False  # whether the last failed step ran out of memory

    def _build_runner(self, kv: PagedKV, first: Backend | None, *, record_weights: bool) -> FallbackRunner:
        model, config, alignment = self.checkpoint.model, self.config, self.checkpoint.profile.alignment
        head, tables = Head(model.slow), self.scheduler.tables
        heads = () if alignment is None else alignment.heads
        return FallbackRunner(
            EagerRunner(model, head, kv, tables, config.slots, heads, record_weights=record_weights),
            head,
            first=first,
            buckets=config.buckets,
            token_budget=config.token_budget,
            isa=config.cpu_isa,
            clock=self.clock,
        )

    def _build_audio_decoder(self, first: Backend | None) -> AudioDecoder:
        config = self.config
        return AudioDecoder(
            self.checkpoint.codec,
            config.slots,
            first_frames=config.first_chunk_frames or MIN_CHUNK_FRAMES,
            max_frames=config.max_chunk_frames,
            clock=self.clock,
            overlap=self.runner.lag > 0,
            backends=codec_backends(self.checkpoint, first),
            native=lambda: self.runner.native_context or open_context(config.cpu_isa, torch.get_num_threads()),
        )

    @property
    def idle(self) -> bool:
        return not self.tracker.active

    def use_device(self) -> None:
        """Make the model's GPU the current device of this thread: Triton, streams and graphs use no other.

        Needed in every thread that calls `step`; a CUDA graph of another device would be empty.
        """
        if (device := self.checkpoint.model.device).type == "cuda":
            torch.cuda.set_device(device)

    def add(self, utterance: Utterance) -> None:
        """Queue an utterance. Raises TextError or InvalidRequest if it can never run."""
        self.tracker.add(utterance)
        if utterance.replayed:
            # It may have crashed an engine process: its first step runs alone, so a crash affects no others.
            self._suspects.append((utterance.sequence, utterance.sequence.length))

    def cancel(self, utterance: Utterance) -> None:
        """Release everything an utterance holds; no further events are emitted for it."""
        self.tracker.cancel(utterance)

    def release_caches(self) -> dict[str, int]:
        """Drop cached prefixes and return what the allocators keep; requests in progress are not affected.

        The KV cache itself stays allocated. The next request of each voice computes its prompt again.
        """
        return {
            "prefix_blocks": self.pool.clear_cache(),
            "host_blocks": self.host_cache.clear(),
            "device_bytes": release_cached_memory(),
        }

    def warm_up(self) -> None:
        """Run a few frames of a dummy prompt, so that no request pays for one-time work. Caches and stats are reset.

        Raises DeviceFailed if the model does not run.
        """
        prompt = np.zeros((2 * self.config.block_size + 1, 1 + self.checkpoint.model.config.num_codebooks), np.int32)
        frames = self.audio_decoder.first_frames + 2
        dummy = Utterance(PROBE_ID, [Turn("", prompt, prompt)], SamplingParams(max_frames=frames))
        self.tracker.add(dummy)
        dummy.guard = None
        while not self.idle:
            for event in self.step():
                if event.error is not None:
                    raise event.error
        self.pool.clear_cache()
        self.stats, self.tracker.stats, self.pool.stats = StepStats(), RequestStats(), BlockStats()
        self.scheduler.stats = SchedulerStats()

    def step(self, emit: Callable[[Event], None] | None = None) -> list[Event]:
        """Generate one frame for every running sequence: schedule, launch, collect audio, wait, commit, decode."""
        events = self.tracker.expire()
        batch = self._plan()
        wait = self._launch(batch)
        events += self._collect_audio(emit)
        output = self._attempt(batch, wait)
        if output is None:
            return events + self._handle_failure(batch)
        progress = self.scheduler.commit(output)
        self.health.record_step(bool(progress), self.audio_decoder.failures)
        return events + self.tracker.submit_audio(progress)

    def _plan(self) -> Batch:
        """Return the next batch. A suspect runs alone: the batch is empty until no other sequence is in flight.

        If a step of several sequences failed, all of them would be suspects and the failing one would stay unknown.
        """
        self._follow_backend()
        suspect = self._suspect()
        if suspect is not None and suspect.slot < 0 and not self.scheduler.has_free_slot:
            return self.scheduler.plan()  # the suspect waits for a slot
        in_flight = (sequence for batch in self.runner.in_flight for sequence in batch.sequences())
        if suspect is not None and any(sequence is not suspect for sequence in in_flight):
            return Batch()
        return self.scheduler.plan(alone=suspect)

    def _follow_backend(self) -> None:
        """Set the limits that depend on the backend, which may have changed since the last step."""
        frame_rate, runner = self.checkpoint.codec.config.frame_rate, self.runner
        self.scheduler.token_budget = runner.token_budget
        self.scheduler.burst_tokens = burst_tokens(
            frame_rate, runner.token_budget, runner.token_seconds, self.config.token_budget
        )
        default = MIN_CHUNK_FRAMES
        if self.audio_decoder.exact_chunks:
            default = first_chunk_frames(frame_rate, runner.frame_seconds)
        self.audio_decoder.first_frames = self.config.first_chunk_frames or default

    def _launch(self, batch: Batch) -> Callable[[], StepOutput] | None:
        """Launch a batch; return the function that waits for the oldest step in flight, None if the launch failed."""
        if not batch and not self.runner.in_flight:
            return partial(StepOutput.empty, batch)
        self.stats.steps += 1
        return self._attempt(batch, partial(self.runner.launch, batch))

    def _collect_audio(self, emit: Callable[[Event], None] | None) -> list[Event]:
        """Return the audio of the previous step, or pass it to `emit`, while the device computes this step.

        Runs before the commit: the speech check may fail or restart an utterance here, and frames of the step in
        flight must then be dropped.
        """
        events = self.tracker.collect_audio()
        if emit is None:
            return events
        for event in events:
            emit(event)
        return []

    def _attempt(self, batch: Batch, work: Callable[[], T] | None) -> T | None:
        """Run one part of a step, launch or wait; None if it raised RuntimeError or the part before it failed."""
        if work is None:
            return None
        started = time.perf_counter()
        try:
            return work()
        except RuntimeError as error:
            logger.exception("step over %d sequences failed", len(batch.sequences()))
            self._out_of_memory = is_out_of_memory(error)
            self.stats.failed += 1
            return None
        finally:
            self.stats.seconds += time.perf_counter() - started

    def _handle_failure(self, batch: Batch) -> list[Event]:
        """Recover from a failed step: reduce concurrency if out of memory, else fall back to the next backend.

        On the last backend each sequence of the step becomes a suspect and runs alone; one that fails alone ends.
        Raises DeviceFailed if the device is at fault.
        """
        failed = [sequence for each in (*self.runner.in_flight, batch) for sequence in each.sequences()]
        # Sequences that have finished need nothing from this step.
        sequences = [each for each in dict.fromkeys(failed) if each.id in self.tracker.active and each.finish is None]
        if self._out_of_memory and self._reduce_concurrency():
            self._requeue(sequences)
            return []
        self.health.record_failed_step(sequences)
        downgraded = self.runner.downgrade()
        if len(sequences) == 1 and not downgraded:
            return [self._fail_alone(self.tracker.active[sequences[0].id])]
        self._requeue(sequences)
        if not downgraded:
            suspects = [(each, each.length) for each in reversed(sequences)]
            self._suspects.extendleft(each for each in suspects if each not in self._suspects)
        return []

    def _fail_alone(self, utterance: Utterance) -> Event:
        """Fail a request that failed alone on the last backend. Raises DeviceFailed if the device is at fault."""
        self.health.probe(utterance.sequence.slot)
        self.health.record_failed_request(replayed=utterance.replayed)
        return self.tracker.fail(utterance, GenerationFailed("the model failed on this request"))

    def _reduce_concurrency(self) -> bool:
        """Free cached device memory and lower the concurrency limit; return False if only one sequence was running.

        Steps in flight are discarded and recomputed.
        """
        self.stats.out_of_memory += 1
        if self.config.clear_on_oom:
            released = release_cached_memory()
            logger.warning("out of GPU memory: released %d MiB of cached allocator blocks", released >> 20)
        if not self.scheduler.concurrency.shrink(len(self.scheduler.running)):
            return False
        self.runner.discard()
        limit = self.scheduler.concurrency
        logger.warning(
            "out of GPU memory: limiting concurrency to %d sequences for %.0f s", limit.limit, limit.cooldown_seconds
        )
        return True

    def _requeue(self, sequences: list[Sequence]) -> None:
        for sequence in sorted(sequences, key=lambda each: each.arrived, reverse=True):
            self.scheduler.requeue(sequence)

    def _suspect(self) -> Sequence | None:
        """Return the sequence that has to run alone: a suspect, until one of its frames is committed or it ends."""
        while self._suspects:
            first, length = self._suspects[0]
            if first.id in self.tracker.active and first.length == length and first.finish is None:
                return first
            self._suspects.popleft()
        return None


def codec_backends(checkpoint: Checkpoint, first: Backend | None) -> list[CodecBackend]:
    """Return the codec backends to try, in order. `first` is the backend that the settings name, not the one in use."""
    codec, backends = checkpoint.codec, list[CodecBackend](["eager"])
    if codec.device.type == "cpu" and first in (None, "native"):
        return ["native", "eager"]
    if codec.device.type != "cuda" or first == "eager":
        return backends
    backends.insert(0, "plain-graph")
    # The fused codec packs unquantized weights; quantized codecs run through their own layers.
    fused = kernels_unavailable(codec.device) is None and modes_of(checkpoint.model, codec).codec == "none"
    return ["graph", *backends] if fused and first != "plain-graph" else backends


def block_bytes(checkpoint: Checkpoint, config: EngineConfig) -> int:
    model = checkpoint.model
    dtype = resolve_kv_dtype(config.kv_dtype, model.dtype, model.device)
    return PagedKV.bytes_per_block(model.config.slow, config.block_size, dtype)


def block_count(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Return the number of blocks that fit into `kv_bytes`, at most as many as all slots can fill."""
    affordable = (config.kv_bytes or DEFAULT_KV_BYTES) // block_bytes(checkpoint, config)
    usable = config.slots * -(-checkpoint.model.config.slow.max_seq_len // config.block_size)
    if affordable < 1:
        raise InvalidRequest(f"kv_bytes = {config.kv_bytes} does not hold one block of {config.block_size} tokens")
    return min(affordable, usable)
