"""What the server needs of an engine, whichever process it lives in."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.speech import AudioChunk, Samples, SamplingParams, SpeechRequest
from shoal.text.prompt import Codes
from shoal.voices.store import VoiceStore


class SpeechService(Protocol):
    @property
    def ready(self) -> bool: ...
    @property
    def default_sampling(self) -> SamplingParams: ...
    @property
    def default_voice(self) -> str | None: ...
    @property
    def sample_rate(self) -> int: ...

    def speak(self, request: SpeechRequest) -> AsyncGenerator[AudioChunk, None]:
        """Chunks as they are made; leaving the generator cancels."""

    async def aencode(self, audio: bytes) -> Codes:
        """The codes [codebooks, frames] of a recording; leaving cancels."""

    async def adecode(self, codes: Codes) -> Samples:
        """The samples of codes [codebooks, frames]; leaving cancels."""

    def statistics(self) -> dict[str, Any]:
        """Figures of the moment, by room."""

    def close(self, *, drain: bool = False, timeout: float | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that speaks, and what the server must know of its model."""

    service: SpeechService
    voices: VoiceStore
    frame_rate: float
    rung: str = "eager"
