"""Transcripts of recordings by Moonshine tiny, an English recogniser, for voices that come without one.

Its weights are in its wheel (`shoal-tts[asr]`), so nothing is fetched at run time.
"""

import importlib
import importlib.util
import os
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shoal.audio.decode import AudioLimits, read_audio
from shoal.audio.pcm import Samples
from shoal.errors import MissingExtra, TextError
from shoal.voices.voice import DEFAULT_LIMITS

RATE = 16_000


class Transcriber:
    """Returns the words of mono samples at 16 kHz. Not thread-safe. Raises MissingExtra."""

    # Samples of silence added on both sides; without them first and last words get lost.
    padding = RATE // 2
    # The voice activity detector keeps state between clips, even across instances, so transcripts would depend on the
    # order of clips (4 of 60 changed). At threshold 0 it treats every clip as one stretch of speech.
    options: ClassVar = {"vad_threshold": "0.0"}
    install = "pip install 'shoal-tts[asr]'"

    @cached_property
    def _model(self) -> Any:
        found = importlib.util.find_spec("moonshine_voice")
        weights = Path(found.origin).parent / "assets" / "tiny-en" if found is not None and found.origin else None
        if weights is None or not weights.is_dir():
            raise MissingExtra(f"transcribing a recording needs moonshine-voice with its weights: {self.install}")
        tiny = importlib.import_module("moonshine_voice.moonshine_api").ModelArch.TINY
        os.environ.setdefault("MOONSHINE_ORT_SINGLE_THREAD", "1")
        module = importlib.import_module("moonshine_voice.transcriber")
        return module.Transcriber(str(weights), tiny, options=self.options)

    def __call__(self, samples: Samples) -> str:
        return " ".join(filter(None, map(self._hear, pieces(samples))))

    def _hear(self, samples: Samples) -> str:
        transcript = self._model.transcribe_without_streaming(np.pad(samples, self.padding).tolist(), RATE)
        return " ".join(line.text.strip() for line in transcript.lines)


def transcribe_recording(
    transcriber: Transcriber, audio: bytes | Path, field: str, limits: AudioLimits = DEFAULT_LIMITS.audio
) -> str:
    """Return the words of a recording. `field` is the name under which the caller accepts a transcript.

    Raises AudioError, TextError if no words are recognised, MissingExtra without the recogniser.
    """
    samples = read_audio(audio, RATE, limits).samples
    try:
        text = transcriber(samples)
    except MissingExtra as missing:
        raise MissingExtra(f"the recording has no transcript: send it as {field}, or: {missing}") from None
    if not text:
        raise TextError(f"no English words were recognised in the recording: send its transcript as {field}")
    return text


def pieces(samples: Samples, longest: int = 10 * RATE) -> list[Samples]:
    """Split samples at quiet moments into pieces of at most `longest` samples, which the recogniser can process."""
    found, step = [], RATE // 20
    while len(samples) > longest:
        late = samples[longest // 2 : longest]
        energy = np.square(late[: len(late) // step * step].reshape(-1, step)).sum(1)
        # Cut between the two steps that are quietest together: the middle of the quietest 0.1 s.
        cut = longest // 2 + (int(np.argmin(energy[1:] + energy[:-1])) + 1) * step
        found.append(samples[:cut])
        samples = samples[cut:]
    return [*found, samples]
