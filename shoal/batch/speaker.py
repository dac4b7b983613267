"""Speak one line of a batch, encode it and write its file."""

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from shoal.api.config import Limits
from shoal.api.engine_client import EngineHandle
from shoal.api.output import OutputEncoder
from shoal.api.requests import fish_request
from shoal.api.subtitles import FORMATS, scaled
from shoal.batch.journal import JournalEntry
from shoal.batch.lines import LineBody, LineDefaults, LineTask, parse_line
from shoal.errors import InvalidRequest, OutputError, ShoalError
from shoal.paths import atomic_write
from shoal.speech import FinishReason, Samples, SpeechRequest, Word

# Offline: only the model's own limit applies to the length of a text.
LIMITS = Limits(text_characters=10_000_000)


@dataclass(slots=True)
class SpokenLine:
    """Audio of a line, and its words if it asks for subtitles."""

    pieces: list[Samples] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    finish: FinishReason = FinishReason.STOP

    @property
    def samples(self) -> Samples:
        return np.concatenate(self.pieces)


@dataclass(frozen=True)
class LineSpeaker:
    """Speaks lines into the directory `out`; throughput comes from calling `speak` concurrently."""

    loaded: EngineHandle
    out: Path
    defaults: LineDefaults

    async def speak(self, task: LineTask, raw: bytes) -> JournalEntry:
        """Speak a line and return its entry, which holds an error of the line. OutputError ends the whole batch."""
        started = time.monotonic()
        try:
            body, digest = parse_line(raw, self.defaults)
            if digest != task.digest:
                raise InvalidRequest("the input has changed since the batch started: run the batch again")
            request = replace(fish_request(body, LIMITS), timeout=None, whole=True)
            request = replace(request, timestamps=body.subtitles is not None)
            spoken = await self._speak(request)
            path = self.out / f"{task.name}.{body.format}"
            size = await asyncio.to_thread(self._write, path, body, spoken)
        except OutputError:
            raise
        except ShoalError as problem:
            return JournalEntry(task.number, task.name, "failed", task.digest, error=str(problem))
        assert request.sampling is not None
        return JournalEntry(
            task.number,
            task.name,
            "done",
            task.digest,
            file=path.name,
            size=size,
            audio_seconds=round(len(spoken.samples) / self.loaded.service.sample_rate / body.output().speed, 3),
            wall_seconds=round(time.monotonic() - started, 3),
            seed=request.sampling.seed,
            finish=spoken.finish.value,
        )

    async def _speak(self, request: SpeechRequest) -> SpokenLine:
        spoken = SpokenLine()
        async with aclosing(self.loaded.service.speak(request)) as chunks:
            async for chunk in chunks:
                spoken.pieces.append(chunk.samples)
                spoken.words += chunk.words
                spoken.finish = chunk.finish or spoken.finish
        return spoken

    def _write(self, path: Path, body: LineBody, spoken: SpokenLine) -> int:
        """Write the subtitles, if the line asks for them, then the audio; return the bytes of the audio."""
        output = body.output()
        renderer = OutputEncoder(output, self.loaded.service.sample_rate, stream=False)
        content = renderer.feed(spoken.samples) + renderer.finish()
        if body.subtitles is not None:
            text = FORMATS[body.subtitles](scaled(spoken.words, output.speed))
            atomic_write(path.with_suffix(f".{body.subtitles}"), text.encode())
        atomic_write(path, content)
        return len(content)
