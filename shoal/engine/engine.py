"""Engine: the public Python API for generating speech in this process."""

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from types import TracebackType
from typing import Literal, overload

import numpy as np

from shoal.engine.core import EngineCore
from shoal.engine.service import Service
from shoal.errors import InvalidRequest
from shoal.speech import AudioChunk, Sampling, Speech, SpeechRequest
from shoal.text.lexicon import Lexicon
from shoal.voices.cache import VoiceCache
from shoal.voices.voice import Voice


class Engine:
    """Generates speech for concurrent callers on any thread or event loop. `close` it, or use it in a `with`.

    A voice is the name of a stored voice, a `Voice`, or None for the model's default.
    """

    def __init__(self, core: EngineCore, voices: VoiceCache, lexicon: Lexicon | None = None) -> None:
        self.service = Service(core, voices, lexicon)

    @property
    def sample_rate(self) -> int:
        return self.service.sample_rate

    @overload
    def speak(
        self,
        text: str,
        *,
        voice: Voice | str | None = ...,
        sampling: Sampling | None = ...,
        timestamps: bool = ...,
        stream: Literal[False] = ...,
    ) -> Speech: ...

    @overload
    def speak(
        self,
        text: str,
        *,
        voice: Voice | str | None = ...,
        sampling: Sampling | None = ...,
        timestamps: bool = ...,
        stream: Literal[True],
    ) -> Generator[AudioChunk, None, None]: ...

    def speak(
        self,
        text: str,
        *,
        voice: Voice | str | None = None,
        sampling: Sampling | None = None,
        timestamps: bool = False,
        stream: bool = False,
    ) -> Speech | Generator[AudioChunk, None, None]:
        """Return the whole speech, or with `stream` a generator of its chunks; closing the generator cancels.

        With `timestamps` the speech, or each chunk, has the `words` that are spoken, with their times.
        """
        request = SpeechRequest(text, voice=_name(voice), sampling=sampling, whole=not stream, timestamps=timestamps)
        utterance = self.service.speak_blocking(request, voice if isinstance(voice, Voice) else None)
        return iter(utterance) if stream else join(list(utterance), utterance.codes())

    async def astream(self, request: SpeechRequest) -> AsyncGenerator[AudioChunk, None]:
        """Yield chunks as they are generated, without blocking the event loop. Closing the generator cancels."""
        if not isinstance(request, SpeechRequest):
            raise InvalidRequest(f"astream takes a shoal.SpeechRequest, not {request!r:.80}")
        async with aclosing(self.service.speak(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def aspeak(
        self,
        text: str,
        *,
        voice: Voice | str | None = None,
        sampling: Sampling | None = None,
        timestamps: bool = False,
    ) -> Speech:
        """`speak` without blocking the event loop. Cancelling the task cancels the utterance."""
        request = SpeechRequest(text, voice=_name(voice), sampling=sampling, whole=True, timestamps=timestamps)
        utterance = await self.service.prepare(request, voice if isinstance(voice, Voice) else None)
        async with aclosing(self.service.thread.aspeak(utterance)) as chunks:
            collected = [chunk async for chunk in chunks]
        return join(collected, utterance.all_codes())

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Stop; with `drain`, after active requests have finished, for at most `timeout` seconds."""
        self.service.close(drain=drain, timeout=timeout)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _name(voice: Voice | str | None) -> str | None:
    """Return the name of a stored voice, or None. Raises InvalidRequest for other types, such as a path."""
    if not isinstance(voice, Voice | str | None):
        raise InvalidRequest(f"voice must be the name of a stored voice, a Voice or None, not {voice!r:.80}")
    return voice if isinstance(voice, str) else None


def join(chunks: list[AudioChunk], codes: np.ndarray) -> Speech:
    """Concatenate all chunks into one speech; the last one carries the finish reason."""
    finish = chunks[-1].finish
    assert finish is not None, "the last chunk carries the finish"
    samples = np.concatenate([chunk.samples for chunk in chunks])
    words = tuple(word for chunk in chunks for word in chunk.words)
    return Speech(samples, chunks[-1].sample_rate, finish, codes, words)
