"""Requests in, chunks out: resolves the voice, writes the turns, and follows the utterance to its end.

Everything here runs on the caller's threads or event loop; steps are the loop's. Recordings are encoded, and codes that
somebody sent decoded, by whoever asks for it; for event loops a thread does both.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from shoal.audio.decode import read_audio
from shoal.engine.core import EngineCore
from shoal.engine.memory.stats import memory_stats
from shoal.engine.preprocess import build_turns
from shoal.engine.process.messages import ModelInfo
from shoal.engine.thread import EngineThread
from shoal.engine.utterance import Utterance
from shoal.speech import AudioChunk, Samples, Sampling, SamplingParams, SpeechRequest
from shoal.text.prompt import Codes, check_codes
from shoal.voices.cache import VoiceCache, VoiceSource
from shoal.voices.encoder import CodecEncoder
from shoal.voices.voice import Voice, voice_limits


class Service:
    """An engine in this process, as servers and programs use it."""

    def __init__(self, core: EngineCore, voices: VoiceCache) -> None:
        self.core, self.voices = core, voices
        self.thread = EngineThread(core)
        self._encoder = CodecEncoder(core.checkpoint.codec, max_seconds=core.config.reference_seconds)
        # One: the memory that is planned with holds one piece of a recording.
        self._codec_thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-codec")
        self._ids = itertools.count()

    @property
    def default_sampling(self) -> SamplingParams:
        """What a request gets that does not choose."""
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

    def model_info(self) -> ModelInfo:
        """What callers may want to know without waiting for the engine."""
        checkpoint = self.core.checkpoint
        return ModelInfo(
            default_sampling=self.default_sampling,
            default_voice=self.default_voice,
            sample_rate=self.sample_rate,
            frame_rate=checkpoint.codec.config.frame_rate,
            model=checkpoint.name,
            device=str(checkpoint.model.device),
            backend=self.core.runner.backend,
            builtin_voices=checkpoint.builtin_voices,
        )

    async def speak(self, request: SpeechRequest) -> AsyncGenerator[AudioChunk, None]:
        """Chunks as they are made, the last with the reason of the end. Leaving the generator cancels."""
        utterance = await self.prepare(request)
        async with aclosing(self.thread.aspeak(utterance)) as chunks:
            async for chunk in chunks:
                yield chunk

    def speak_blocking(self, request: SpeechRequest, voice: Voice | None = None) -> "UtteranceStream":
        """The same for threads that may wait. A `voice` at hand goes before what the request names."""
        utterance = self.write(request, voice or self.resolve_blocking(request))
        return UtteranceStream(utterance, self.thread.speak(utterance))

    def resolve_blocking(self, request: SpeechRequest) -> Voice | None:
        """The voice a request asks for; encoded first if it is new."""
        wanted = self._wanted(request)
        return None if wanted is None else self.voices.resolve_blocking(wanted)

    async def prepare(self, request: SpeechRequest, voice: Voice | None = None) -> Utterance:
        """Everything before the engine, off the event loop. A `voice` at hand goes before what the request names."""
        wanted = self._wanted(request)
        if voice is None and wanted is not None:
            voice = await self.voices.resolve(wanted)
        return await asyncio.to_thread(self.write, request, voice)

    def write(self, request: SpeechRequest, voice: Voice | None) -> Utterance:
        """Split, tokenize and lay out a request; raises TextError for what cannot be spoken."""
        turns = build_turns(request.text, voice, self.core.checkpoint, request.chunk_bytes, prepared=request.normalize)
        deadline = None if request.timeout is None else self.core.clock() + request.timeout
        sampling = (request.sampling or Sampling()).resolve(self.default_sampling)
        return Utterance(next(self._ids), turns, sampling, whole=request.whole, deadline=deadline)

    def _wanted(self, request: SpeechRequest) -> VoiceSource | None:
        if request.recordings:
            return [(recording.audio, recording.transcript) for recording in request.recordings]
        return request.voice or self.default_voice

    def encode(self, audio: bytes) -> Codes:
        """The codes [codebooks, frames] of a recording."""
        limits = voice_limits(self.core.config.reference_seconds).audio
        return self._encoder.encode(read_audio(audio, self.sample_rate, limits).samples)

    def decode(self, codes: Codes) -> Samples:
        """The samples of codes [codebooks, frames]."""
        codec = self.core.checkpoint.codec
        check_codes(codes, codec.config.num_codebooks, codec.config.semantic_codebook_size)
        samples = codec.decode(torch.from_numpy(codes.astype(np.int64))[None].to(codec.device))
        return samples[0].float().cpu().numpy()

    async def aencode(self, audio: bytes) -> Codes:
        """The same for an event loop: one after the other, and leaving before it has begun takes it out of the row."""
        return await asyncio.get_running_loop().run_in_executor(self._codec_thread, self.encode, audio)

    async def adecode(self, codes: Codes) -> Samples:
        """As `aencode`, in the same row."""
        return await asyncio.get_running_loop().run_in_executor(self._codec_thread, self.decode, codes)

    def statistics(self) -> dict[str, Any]:
        """Figures of the moment, by room."""
        core = self.core
        return {
            "live": self.thread.active,
            "running": len(core.scheduler.running),
            "waiting": len(core.scheduler.waiting),
            "slots": core.config.slots,
            "blocks": {"all": core.pool.count, "used": core.pool.used, "cached": core.pool.cached},
            "prefix_cache": asdict(core.pool.stats),
            "scheduler": asdict(core.scheduler.stats),
            "speech": asdict(core.tracker.stats),
            "steps": asdict(core.stats),
            "codec_seconds": core.audio_decoder.seconds,
            "voices": asdict(self.voices.statistics),
            **memory_stats(core.checkpoint.model.device),
        }

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        self.thread.close(drain=drain, timeout=timeout)
        self._codec_thread.shutdown(cancel_futures=True)
        self.voices.close()


class UtteranceStream:
    """An utterance under way: iterate over its chunks, and ask for its codes at the end."""

    def __init__(self, utterance: Utterance, chunks: Generator[AudioChunk, None, None]) -> None:
        self._utterance, self._chunks = utterance, chunks

    def __iter__(self) -> Generator[AudioChunk, None, None]:
        return self._chunks

    def codes(self) -> Codes:
        return self._utterance.all_codes()

    @property
    def turn(self) -> tuple[int, int]:
        """Turns begun so far, and of how many."""
        return self._utterance.turn + 1, len(self._utterance.turns)

    def close(self) -> None:
        """Cancel what has not been said."""
        self._chunks.close()
