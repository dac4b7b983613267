"""Speak one line of a batch, encode it and write its file."""

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shoal.api.config import Limits
from shoal.api.engine_client import EngineHandle
from shoal.api.output import OutputEncoder
from shoal.api.requests import fish_request
from shoal.batch.journal import JournalEntry
from shoal.batch.lines import LineBody, LineDefaults, LineTask, parse_line
from shoal.errors import InvalidRequest, OutputError, ShoalError
from shoal.paths import atomic_write
from shoal.speech import FinishReason, Samples, SpeechRequest

# Offline: only the model's own limit applies to the length of a text.
LIMITS = Limits(text_characters=10_000_000)


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
            samples, finish = await self._samples(request)
            path = self.out / f"{task.name}.{body.format}"
            size = await asyncio.to_thread(self._write, path, body, samples)
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
            audio_seconds=round(len(samples) / self.loaded.service.sample_rate, 3),
            wall_seconds=round(time.monotonic() - started, 3),
            seed=request.sampling.seed,
            finish=finish.value,
        )

    async def _samples(self, request: SpeechRequest) -> tuple[Samples, FinishReason]:
        pieces, finish = list[Samples](), FinishReason.STOP
        async with aclosing(self.loaded.service.speak(request)) as chunks:
            async for chunk in chunks:
                pieces.append(chunk.samples)
                finish = chunk.finish or finish
        return np.concatenate(pieces), finish

    def _write(self, path: Path, body: LineBody, samples: Samples) -> int:
        renderer = OutputEncoder(body.output(), self.loaded.service.sample_rate, stream=False)
        content = renderer.feed(samples) + renderer.finish()
        atomic_write(path, content)
        return len(content)
