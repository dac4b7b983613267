"""What a program gets from `shoal.load`: say a text, hear it whole or while it is made."""

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from types import TracebackType
from typing import Literal, overload

import numpy as np

from shoal.engine.core import EngineCore
from shoal.engine.service import Service
from shoal.errors import InvalidRequest
from shoal.speech import AudioChunk, Sampling, Speech, SpeechRequest
from shoal.voices.cache import VoiceCache
from shoal.voices.voice import Voice


class Engine:
    """Many voices at once, from any thread or event loop. `close` it, or use it in a `with`.

    A voice is the name of a stored one, a `Voice`, or None for whatever voice the model takes by itself.
    """

    def __init__(self, core: EngineCore, voices: VoiceCache) -> None:
        self.service = Service(core, voices)

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
        stream: Literal[False] = ...,
    ) -> Speech: ...

    @overload
    def speak(
        self, text: str, *, voice: Voice | str | None = ..., sampling: Sampling | None = ..., stream: Literal[True]
    ) -> Generator[AudioChunk, None, None]: ...

    def speak(
        self, text: str, *, voice: Voice | str | None = None, sampling: Sampling | None = None, stream: bool = False
    ) -> Speech | Generator[AudioChunk, None, None]:
        """The whole speech, or with `stream` its chunks as they are made; closing that generator cancels."""
        request = SpeechRequest(text, voice=_name(voice), sampling=sampling, whole=not stream)
        speaking = self.service.speak_blocking(request, voice if isinstance(voice, Voice) else None)
        return iter(speaking) if stream else join(list(speaking), speaking.codes())

    async def astream(self, request: SpeechRequest) -> AsyncGenerator[AudioChunk, None]:
        """Chunks as they are made, for an event loop, which is never blocked; leaving the generator cancels."""
        async with aclosing(self.service.speak(request)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def aspeak(self, text: str, *, voice: Voice | str | None = None, sampling: Sampling | None = None) -> Speech:
        """`speak` for an event loop; cancelling the task cancels the utterance."""
        request = SpeechRequest(text, voice=_name(voice), sampling=sampling, whole=True)
        utterance = await self.service.prepare(request, voice if isinstance(voice, Voice) else None)
        async with aclosing(self.service.thread.aspeak(utterance)) as chunks:
            said = [chunk async for chunk in chunks]
        return join(said, utterance.all_codes())

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Stop; with `drain`, after what has been taken is spoken, for at most `timeout` seconds."""
        self.service.close(drain=drain, timeout=timeout)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _name(voice: Voice | str | None) -> str | None:
    """Raises InvalidRequest for what is no voice, such as a path: the usual one is not what was meant."""
    if not isinstance(voice, Voice | str | None):
        raise InvalidRequest(f"voice is the name of a stored voice, a Voice or None, not {voice!r:.80}")
    return voice if isinstance(voice, str) else None


def join(chunks: list[AudioChunk], codes: np.ndarray) -> Speech:
    """One speech of all chunks; the last one says how it ended."""
    finish = chunks[-1].finish
    assert finish is not None, "the last chunk carries the finish"
    return Speech(np.concatenate([chunk.samples for chunk in chunks]), chunks[-1].sample_rate, finish, codes)
