"""In-process speech service: resolves voices, tokenizes requests and submits them to the engine thread.

Runs on the caller's threads or event loop; only steps run on the engine thread. Recordings are encoded and codes
decoded on the calling thread; the async variants use one codec thread.
"""

import asyncio
import itertools
import logging
import weakref
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from shoal.audio.decode import read_audio
from shoal.checkpoint.format.text_rules import checkpoint_text_rules
from shoal.engine.core import EngineCore
from shoal.engine.device_health import device_problem
from shoal.engine.memory.stats import memory_stats
from shoal.engine.preprocess import build_utterance, plan_request
from shoal.engine.process.messages import Backends, ModelInfo
from shoal.engine.process.native_memory import trim_heap
from shoal.engine.thread import EngineThread
from shoal.engine.utterance import Utterance, UtteranceStream
from shoal.errors import DeadlineExceeded, InvalidRequest
from shoal.paths import rss_bytes
from shoal.speech import AudioChunk, Recording, Samples, SamplingParams, SpeechRequest
from shoal.text.lexicon import Lexicon
from shoal.text.plan import TextPlan
from shoal.text.prompt import Codes, check_codes
from shoal.voices.cache import DialogueSource, VoiceCache, VoiceLookup, VoiceSource
from shoal.voices.encoder import CodecEncoder
from shoal.voices.voice import Clip, Voice, voice_limits

logger = logging.getLogger(__name__)

# Maximum characters of a text that is prepared on the event loop of the engine process. A thread of the pool would take
# longer, because it has to wait for the GIL several times.
SHORT_TEXT = 300


class Service:
    """Engine in this process, with the interface that servers and `Engine` use. Thread-safe."""

    def __init__(self, core: EngineCore, voices: VoiceCache, lexicon: Lexicon | None = None) -> None:
        self.core, self.voices, self.lexicon = core, voices, lexicon
        self.thread = EngineThread(core)
        # An engine that is dropped but not closed, as by a notebook cell that runs twice, must not keep its memory.
        weakref.finalize(self, self.thread.close_when_idle).atexit = False
        self._encoder = CodecEncoder(core.checkpoint.codec, max_seconds=core.config.reference_seconds)
        # One thread: the memory profile reserves room for one codec call outside the engine's steps.
        self._codec_thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-codec")
        self._ids = itertools.count()

    @property
    def default_sampling(self) -> SamplingParams:
        """Default sampling settings, for the fields that a request leaves out."""
        return self.core.checkpoint.profile.sampling

    @property
    def default_voice(self) -> str | None:
        return self.core.checkpoint.profile.voice

    @property
    def sample_rate(self) -> int:
        return self.core.checkpoint.codec.config.sample_rate

    @property
    def ready(self) -> bool:
        return self.thread.running

    @property
    def backends(self) -> Backends:
        """Backends in use at this moment."""
        return Backends(self.core.runner.backend, self.core.audio_decoder.backend)

    def model_info(self) -> ModelInfo:
        checkpoint = self.core.checkpoint
        return ModelInfo(
            default_sampling=self.default_sampling,
            default_voice=self.default_voice,
            sample_rate=self.sample_rate,
            frame_rate=checkpoint.codec.config.frame_rate,
            model=checkpoint.name,
            device=str(checkpoint.model.device),
            backends=self.backends,
            builtin_voices=checkpoint.builtin_voices,
            text_rules=checkpoint_text_rules(checkpoint),
            prompt_seconds=checkpoint.prompt_seconds,
            word_times=checkpoint.profile.alignment is not None and bool(checkpoint.profile.alignment.heads),
            clones=checkpoint.profile.clones,
        )

    async def speak(self, request: SpeechRequest, deadline: float | None = None) -> AsyncGenerator[AudioChunk, None]:
        """Yield chunks as they are generated; the last carries the finish reason. Closing the generator cancels.

        `deadline` is absolute, on the engine's clock; without it the request's timeout starts now.
        """
        utterance = await self.prepare(request, deadline=deadline)
        async with aclosing(self.thread.aspeak(utterance)) as chunks:
            async for chunk in chunks:
                yield chunk

    def speak_blocking(self, request: SpeechRequest, voice: Voice | None = None) -> UtteranceStream:
        """Start an utterance from a thread that may block. `voice` overrides the voice that the request names."""
        deadline = request.deadline_from(self.core.clock())
        utterance = self.build_utterance(request, voice or self.resolve_blocking(request), deadline)
        return UtteranceStream(utterance, self.thread.speak(utterance))

    def resolve_blocking(self, request: SpeechRequest) -> Voice | None:
        """Return the voice of a request, encoding it first if it is not cached."""
        source = self._voice_source(request)
        return None if source is None else self.voices.resolve_blocking(source)

    async def prepare(
        self,
        request: SpeechRequest,
        voice: Voice | None = None,
        *,
        deadline: float | None = None,
        inline: bool = False,
    ) -> Utterance:
        """Resolve the voice and tokenize, in one hop to a thread of the pool unless the voice has to be encoded.

        `voice` overrides the voice that the request names. Without `deadline` the request's timeout starts now.
        `inline` is for the event loop of the engine process: a short request is prepared on the loop itself if voices
        are on a local file system, which blocks it for a few milliseconds. Raises DeadlineExceeded when the deadline
        passes while the voice is encoded or a thread prepares the request.
        """
        deadline = request.deadline_from(self.core.clock()) if deadline is None else deadline
        remaining = None if deadline is None else deadline - self.core.clock()
        inline = inline and self._is_short(request)
        try:
            async with asyncio.timeout(remaining):
                return await self._prepare(request, voice, deadline, inline=inline)
        except TimeoutError:
            raise DeadlineExceeded("the request timed out while its voice and text were prepared") from None

    async def _prepare(
        self, request: SpeechRequest, voice: Voice | None, deadline: float | None, *, inline: bool
    ) -> Utterance:
        if inline:
            prepared = self._prepare_cached(request, voice, deadline)
        else:
            prepared = await asyncio.to_thread(self._prepare_cached, request, voice, deadline)
        if isinstance(prepared, Utterance):
            return prepared
        for name, lookup in prepared.missing.items():
            prepared.voices[name] = await self.voices.load(lookup)
        return await asyncio.to_thread(self._build, request, prepared, deadline)

    def _is_short(self, request: SpeechRequest) -> bool:
        given = request.recordings or request.lexicon
        return len(request.text) <= SHORT_TEXT and not given and self.voices.local

    def build_utterance(self, request: SpeechRequest, voice: Voice | None, deadline: float | None) -> Utterance:
        """Split and tokenize a request. Voices that its markup names are encoded first if they are not cached.

        Raises TextError if the text cannot be spoken.
        """
        plan = self.plan(request)
        draft = RequestDraft(plan, {None: voice})
        for name in plan.voices:
            draft.voices[name] = self.voices.resolve_blocking(name)
        return self._build(request, draft, deadline)

    def _prepare_cached(
        self, request: SpeechRequest, voice: Voice | None, deadline: float | None
    ) -> "Utterance | RequestDraft":
        """Return the utterance, or a draft with the voices that are not in memory and have to be awaited first."""
        draft = RequestDraft(self.plan(request), {None: voice})
        source = self._voice_source(request)
        wanted: dict[str | None, VoiceSource] = {name: name for name in draft.plan.voices}
        if voice is None and source is not None:
            wanted[None] = source
        for name, wanted_source in wanted.items():
            lookup = self.voices.look_up(wanted_source)
            draft.voices[name] = self.voices.cached(lookup)
            if draft.voices[name] is None:
                draft.missing[name] = lookup
        return draft if draft.missing else self._build(request, draft, deadline)

    def plan(self, request: SpeechRequest) -> TextPlan:
        """Return the normalised turns, voices and pauses of a request. Raises TextError if it cannot be spoken."""
        return plan_request(request, self.core.checkpoint, self.lexicon)

    def _build(self, request: SpeechRequest, draft: "RequestDraft", deadline: float | None) -> Utterance:
        return build_utterance(
            next(self._ids),
            request,
            draft.plan,
            draft.voices,
            self.core.checkpoint,
            context_limit=self.core.tracker.context_limit,
            lexicon=self.lexicon,
            deadline=deadline,
        )

    def _voice_source(self, request: SpeechRequest) -> VoiceSource | None:
        """Return the source of a request's voice; None without one.

        Raises InvalidRequest for several speakers if the model cannot speak dialogue.
        """
        speakers = request.voices or clips_of_speakers(request.recordings)
        if len(speakers) > 1 and not self.core.checkpoint.model.config.family.splits_dialogue:
            raise InvalidRequest("this model speaks with one voice per request: send one voice, or use an S2 model")
        if len(speakers) > 1:
            return DialogueSource(tuple(speakers))
        if request.recordings:
            return [(recording.audio, recording.transcript) for recording in request.recordings]
        return request.first_voice(self.voices.exists) or self.default_voice

    def encode(self, audio: bytes) -> Codes:
        """Return the codes [codebooks, frames] of a recording."""
        limits = voice_limits(self.core.config.reference_seconds).audio
        return self._encoder.encode(read_audio(audio, self.sample_rate, limits).samples)

    def decode(self, codes: Codes) -> Samples:
        """Return the samples of codes [codebooks, frames]."""
        codec = self.core.checkpoint.codec
        check_codes(codes, codec.config.num_codebooks, codec.config.semantic_codebook_size)
        with self._encoder.exclusive():
            samples = codec.decode(torch.from_numpy(codes.astype(np.int64))[None].to(codec.device))
            return samples[0].float().cpu().numpy()

    async def aencode(self, audio: bytes) -> Codes:
        """`encode` on the codec thread, in order of arrival. Cancelling removes a call that has not started."""
        return await asyncio.get_running_loop().run_in_executor(self._codec_thread, self.encode, audio)

    async def adecode(self, codes: Codes) -> Samples:
        """`decode` on the codec thread; queued and cancelled as in `aencode`."""
        return await asyncio.get_running_loop().run_in_executor(self._codec_thread, self.decode, codes)

    def device_responds(self) -> bool:
        """Return whether a tiny computation on the device succeeds; logs the error if not."""
        problem = device_problem(self.core.checkpoint.model.device)
        if problem is not None:
            logger.error("the device does not respond: %s", problem)
        return problem is None

    def statistics(self) -> dict[str, Any]:
        """Return current gauges and counters, nested by component; the server's metrics are read from these keys."""
        core = self.core
        return {
            "live": self.thread.active,
            "running": len(core.scheduler.running),
            "waiting": len(core.scheduler.waiting),
            "slots": core.config.slots,
            "blocks": {"all": core.pool.count, "used": core.pool.used, "cached": core.pool.cached},
            "prefix_cache": asdict(core.pool.stats) | {"hit_ratio": core.pool.stats.hit_ratio},
            "scheduler": asdict(core.scheduler.stats),
            "speech": asdict(core.tracker.stats),
            "steps": asdict(core.stats),
            "codec_seconds": core.audio_decoder.seconds,
            "backends": asdict(self.backends),
            "dropped_sizes": len(core.runner.dropped) + len(core.audio_decoder.dropped),
            "voices": asdict(self.voices.statistics),
            **memory_stats(core.checkpoint.model.device),
        }

    def release_memory(self) -> dict[str, int]:
        """Drop cached prefixes and return cached memory to device and system. Blocks until the current step ends.

        Returns the number of blocks dropped on device and host, and the bytes released on device and host.
        """
        resident = rss_bytes()
        released = self.thread.call(self.core.release_caches)
        trim_heap()
        released["host_bytes"] = max(0, resident - rss_bytes())
        logger.info("released caches: %s", ", ".join(f"{name} {count:,}" for name, count in released.items()))
        return released

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        self.thread.close(drain=drain, timeout=timeout)
        self._codec_thread.shutdown(cancel_futures=True)
        self.voices.close()


@dataclass(frozen=True, slots=True)
class RequestDraft:
    """A planned request, its voices by name (None: the voice of the request), and those that are not in memory yet."""

    plan: TextPlan
    voices: dict[str | None, Voice | None]
    missing: dict[str | None, VoiceLookup] = field(default_factory=dict)


def clips_of_speakers(recordings: Iterable[Recording]) -> list[list[Clip]]:
    """Return the recordings of each speaker; empty if they have no speakers."""
    speakers: dict[int, list[Clip]] = {}
    for each in recordings:
        if each.speaker is not None:
            speakers.setdefault(each.speaker, []).append((each.audio, each.transcript))
    return [clips for _, clips in sorted(speakers.items())]
