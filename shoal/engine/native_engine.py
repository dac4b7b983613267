"""Engine for one request at a time on the native CPU backend. Without torch: its import takes longer than speaking.

Scheduler, request tracker and audio decoder are those of `EngineCore`, and so is the audio, bit for bit. There is no
other backend to fall back to: callers use `shoal.load` for everything that raises `NeedsTorch` here.
"""

import itertools
import os
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from shoal.audio.pcm import Samples
from shoal.checkpoint.arrays import MODEL_FILE, ArrayCheckpoint, load_arrays
from shoal.checkpoint.find import find_directory
from shoal.codec.arrays import CodecArrays
from shoal.config import DEFAULT_TOKEN_BUDGET, EngineConfig
from shoal.cores import default_threads
from shoal.engine.execution.native_steps import NativeSteps
from shoal.engine.output.audio_decoder import AudioDecoder
from shoal.engine.output.chunks import MIN_CHUNK_FRAMES
from shoal.engine.prefix_file import PrefixFile
from shoal.engine.preprocess import build_utterance, plan_request
from shoal.engine.request_tracker import RequestTracker
from shoal.engine.scheduling.blocks import BlockPool, Key, extend_keys
from shoal.engine.scheduling.scheduler import Batch, Scheduler, StepOutput
from shoal.engine.utterance import Event, Utterance, UtteranceStream
from shoal.errors import CheckpointError, GenerationFailed
from shoal.kernels.word_times.text_path_numpy import new_scores
from shoal.native.build import library_name
from shoal.native.choice import BASELINE, open_context
from shoal.native.dual_ar import NativeDualAR, SlotArrays
from shoal.native.library import NativeUnavailable
from shoal.paths import cache_directory
from shoal.speech import AudioChunk, SamplingParams, SpeechRequest
from shoal.text.lexicon import Lexicon, read_lexicon
from shoal.text.plan import TextPlan
from shoal.text.prompt import Codes
from shoal.voices.fingerprint import fingerprint
from shoal.voices.store import VoiceStore
from shoal.voices.voice import CodecRates, Voice, voice_limits

# Files of GPU drivers that torch may use: NVIDIA, Jetson, WSL, AMD.
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")


class NeedsTorch(Exception):
    """The request, or the model, needs the engine with torch; the message says why."""


def gpu_driver_present() -> bool:
    """Return whether this machine may have a GPU that `--device auto` selects."""
    return any(map(os.path.exists, GPU_DRIVERS))


def load_native(
    model: str, config: EngineConfig, voices: Path, lexicon: Path | None, request: SpeechRequest
) -> "NativeEngine":
    """Load a model for one request. Raises NeedsTorch if the native backend cannot speak it on its own."""
    if request.recordings or request.voices:
        raise NeedsTorch("recordings are encoded with torch")
    words = None if lexicon is None else read_lexicon(lexicon)
    try:
        engine = NativeEngine(
            load_arrays(find_directory(model), model), config, voices, words, prefixes=prefix_folder()
        )
    except (CheckpointError, NativeUnavailable) as error:
        raise NeedsTorch(str(error)) from error
    engine.voices_of(request, engine.plan(request))
    return engine


def prefix_folder() -> Path | None:
    """Return where the keys and values of voices are stored; None for a user without a home directory."""
    with suppress(RuntimeError):
        return cache_directory() / "prefixes"
    return None


class NativeEngine:
    """Speaks one request at a time on the calling thread, with the methods of `Service` that this needs.

    Not thread-safe.
    """

    def __init__(
        self,
        checkpoint: ArrayCheckpoint,
        config: EngineConfig,
        voices: Path,
        lexicon: Lexicon | None = None,
        clock: Callable[[], float] = time.monotonic,
        prefixes: Path | None = None,
    ) -> None:
        """Keep the keys and values of voices in `prefixes`, if given.

        Raises NativeUnavailable without a library, and CheckpointError for weights of other shapes.
        """
        self.checkpoint, self.lexicon, self._clock, self._prefixes = checkpoint, lexicon, clock, prefixes
        context_tokens = config.context_tokens or checkpoint.profile.context_tokens
        self.config = replace(config, slots=1, context_tokens=context_tokens)
        self.context = open_context(config.cpu_isa, default_threads())
        self.scheduler = self._new_scheduler()
        self.steps = self._new_steps()
        self.tracker = RequestTracker(
            self.scheduler, self._new_audio_decoder(), checkpoint.model.config, self.config, clock
        )
        self._encoder = StoredCodes(checkpoint.codec)
        limits = voice_limits(config.reference_seconds, checkpoint.prompt_seconds)
        self._store = VoiceStore(voices, checkpoint.builtin_voices, sample_rate=self.sample_rate, limits=limits)
        self._voices: dict[str, Voice] = {}
        self._ids = itertools.count()

    @property
    def default_sampling(self) -> SamplingParams:
        """Default sampling settings, for the fields that a request leaves out."""
        return self.checkpoint.profile.sampling

    @property
    def sample_rate(self) -> int:
        return self.checkpoint.codec.config.sample_rate

    def plan(self, request: SpeechRequest) -> TextPlan:
        """Return the normalised turns, voices and pauses of a request. Raises TextError if it cannot be spoken."""
        return plan_request(request, self.checkpoint, self.lexicon)

    def voices_of(self, request: SpeechRequest, plan: TextPlan) -> dict[str | None, Voice | None]:
        """Return the voice of a request and all that its text names. Raises VoiceNotFound and NeedsTorch."""
        named = request.first_voice(self._store.exists) or self.checkpoint.profile.voice
        own = None if named is None else self._voice(named)
        return {None: own, **{name: self._voice(name) for name in plan.voices}}

    def speak_blocking(self, request: SpeechRequest) -> UtteranceStream:
        """Start an utterance; its chunks are computed as they are read."""
        plan = self.plan(request)
        utterance = build_utterance(
            next(self._ids),
            request,
            plan,
            self.voices_of(request, plan),
            self.checkpoint,
            context_limit=self.tracker.context_limit,
            lexicon=self.lexicon,
            deadline=request.deadline_from(self._clock()),
        )
        voice = utterance.turns[0].delivery.voice or request.voice or self.checkpoint.profile.voice
        return UtteranceStream(utterance, self._chunks(utterance, self._prefix_file(utterance, voice)))

    def step(self) -> list[Event]:
        """Generate one frame, as `EngineCore.step` does. Raises GenerationFailed when the native step fails."""
        events = self.tracker.expire()
        output = self._run(self.scheduler.plan())
        events += self.tracker.collect_audio()
        return events + self.tracker.submit_audio(self.scheduler.commit(output))

    def _run(self, batch: Batch) -> StepOutput:
        try:
            return self.steps.run(batch) if batch else StepOutput.empty(batch)
        except RuntimeError as error:
            raise GenerationFailed(str(error)) from error

    def _chunks(self, utterance: Utterance, stored: PrefixFile | None) -> Generator[AudioChunk, None, None]:
        pool = self.scheduler.pool
        pool.host_cache = stored
        self.tracker.add(utterance)
        try:
            while self.tracker.active:
                for event in self.step():
                    yield event.chunk_or_raise()
            if stored is not None:
                stored.store(pool)
        finally:
            if self.tracker.active:
                self.tracker.cancel(utterance)

    def _prefix_file(self, utterance: Utterance, voice: str | None) -> PrefixFile | None:
        """Return the stored blocks of the built-in voice that an utterance starts with; None if there can be none.

        Blocks of a user's own voices are not stored: deleting a recording must delete everything computed from it.
        """
        prefix, pool = utterance.turns[0].prefix, self.scheduler.pool
        if self._prefixes is None or prefix is None or not self.config.prefix_cache:
            return None
        keys: list[Key] = []
        extend_keys(keys, prefix, pool.size)
        if not keys or voice is None or not self._store.is_builtin(voice):
            return None
        return PrefixFile(self._prefixes, self._identity, keys, (self.steps.keys, self.steps.values))

    @cached_property
    def _identity(self) -> str:
        """Return what keys and values depend on besides the tokens, as text.

        Library, model file, its configuration (which a fine-tune may change beside the same file), and block size.
        """
        path = self.checkpoint.directory / MODEL_FILE
        file, pool = path.stat(), self.scheduler.pool
        # All instruction sets but the baseline give the same bits.
        code = (library_name(), self.context.isa == BASELINE)
        parts = (*code, path.resolve(), file.st_size, file.st_mtime_ns, self.checkpoint.model.config, pool.size)
        return "\n".join(map(str, parts))

    def _voice(self, name: str) -> Voice:
        if name not in self._voices:
            self._voices[name] = self._store.get(name, self._encoder)
        return self._voices[name]

    def _new_scheduler(self) -> Scheduler:
        config, model = self.config, self.checkpoint.model.config
        blocks = -(-model.slow.max_seq_len // config.block_size)
        return Scheduler(
            BlockPool(blocks, config.block_size, caching=config.prefix_cache),
            slots=config.slots,
            token_budget=config.token_budget or DEFAULT_TOKEN_BUDGET,
            stop_id=model.stop_id,
            max_tokens=model.slow.max_seq_len,
            clock=self._clock,
        )

    def _new_steps(self) -> NativeSteps:
        model, pool = self.checkpoint.model.config, self.scheduler.pool
        slow, alignment = model.slow, self.checkpoint.profile.alignment
        # First, because it compares the sizes of config.json with the weights.
        native = NativeDualAR(self.checkpoint.model, self.context)
        shape = (slow.n_layer, pool.count + 1, pool.size, slow.n_local_heads, slow.head_dim)
        keys, values = (np.zeros(shape, np.float32) for _ in range(2))
        slots = SlotArrays.zeros(self.config.slots, 1 + model.num_codebooks, model.family.repetition_window)
        heads = () if alignment is None else alignment.heads
        scores = new_scores(self.config.slots)
        return NativeSteps(native, keys, values, self.scheduler.tables, slots, heads, scores)

    def _new_audio_decoder(self) -> AudioDecoder:
        return AudioDecoder(
            self.checkpoint.codec,
            self.config.slots,
            first_frames=self.config.first_chunk_frames or MIN_CHUNK_FRAMES,
            max_frames=self.config.max_chunk_frames,
            clock=self._clock,
            backends=("native",),
            native=lambda: self.context,
        )


class StoredCodes(CodecRates):
    """Stand-in for the voice encoder: enough for voices whose codes are stored. `encode` raises NeedsTorch."""

    def __init__(self, codec: CodecArrays) -> None:
        super().__init__(codec.config)
        self._codec = codec

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self._codec.config, self._codec.weights, self._codec.weights.__getitem__)

    def encode(self, samples: Samples) -> Codes:
        raise NeedsTorch("the codes of this voice are not stored")
