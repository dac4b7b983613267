"""Measure one configuration in its own process (`python -m shoal.tools.bench.trial`): start-up and memory are its own.

A job comes in as one JSON object on standard input; what is measured goes out as one JSON object per line, as soon as
it is known. Whoever reads them loses nothing when this process is interrupted or dies.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError
from shoal.tools.bench.configurations import split_settings
from shoal.tools.bench.texts import edge_cases, texts

if TYPE_CHECKING:
    from shoal.engine.core import EngineCore
    from shoal.engine.engine import Engine
    from shoal.engine.utterance import Utterance
    from shoal.voices.voice import Voice

CHARACTERS_PER_SECOND = 15.0  # of ordinary English; random weights do not know when to stop

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class TrialConfig:
    """What to measure; everything crosses as JSON."""

    model: str
    device: str
    settings: dict[str, Any]
    voices: tuple[int, ...]  # batch sizes
    samples: int  # rounds, each of which says every text once
    texts: int  # per round, at least one for each voice
    sentences: int  # per text
    warm_up: int  # rounds that do not count
    unique: bool  # another text every time
    voice: str | None  # a stored voice; without it a random one for random weights, else the model's own
    edges: bool
    max_frames: int  # of any turn; 0: as the model likes
    start_only: bool = False


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request as its listener saw it; times in seconds from asking."""

    text: int
    seconds: float
    first_audio: float
    audio_seconds: float
    frames: int
    error: str | None = None


def run(job: TrialConfig, emit: Emit) -> None:
    """Start, warm up, measure; each result is told when it is there. Raises what loading the model raises."""
    engine, voice = start(job, emit)
    with engine:
        if not job.start_only:
            asyncio.run(measure(engine, voice, job, emit))


def start(job: TrialConfig, emit: Emit) -> tuple["Engine", "Voice | None"]:
    import torch

    from shoal.config import EngineConfig
    from shoal.engine.load import choose_device, load
    from shoal.tools.bench.memory import MemoryGauge

    device = torch.device(choose_device(job.device))
    memory = MemoryGauge(device)
    baseline = memory.now()
    keywords, fields = split_settings(job.settings)
    slots: dict[str, Any] = {"slots": max(job.voices), "batch_size": max(job.voices)} | fields
    began = time.perf_counter()
    engine = load(job.model, device=str(device), config=EngineConfig(**slots), **keywords)
    loaded, loaded_bytes = time.perf_counter(), memory.now()
    engine.service.core.warm_up()
    warm = time.perf_counter()
    emit({"start": {"load": loaded - began, "warm_up": warm - loaded}})
    emit({"memory": {"kind": memory.kind, "baseline": baseline, "loaded": loaded_bytes, "peak": memory.peak()}})
    core = engine.service.core
    emit({"engine": _engine(core)})
    return engine, _voice(engine, job)


def _engine(core: "EngineCore") -> dict[str, str | int]:
    """What the settings came to on this machine."""
    from shoal.quantize.apply import modes_of

    checkpoint = core.checkpoint
    return {
        "dtype": str(checkpoint.model.dtype).removeprefix("torch."),
        "weights": str(modes_of(checkpoint.model, checkpoint.codec)),
        "rung": core.runner.backend,
        "sample_rate": checkpoint.codec.config.sample_rate,
    }


async def measure(engine: "Engine", voice: "Voice | None", job: TrialConfig, emit: Emit) -> None:
    from shoal.tools.bench.memory import MemoryGauge

    listener = TrialClient(engine, voice, job)
    for voices in job.voices:
        for number in range(-job.warm_up, job.samples):
            began, cpu_began = time.perf_counter(), time.process_time()
            heard = await listener.round(voices)
            spent = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu_began}
            if number >= 0:
                emit({"round": {"voices": voices, **spent, "requests": [asdict(each) for each in heard]}})
            emit({"done": 1})
    for name, text in edge_cases().items() if job.edges else ():
        heard_edge = await listener.listen(text, 0)
        emit({"edge": {"name": name, "characters": len(text), **asdict(heard_edge)}, "done": 1})
    emit({"peak": MemoryGauge(engine.service.core.checkpoint.model.device).peak()})


class TrialClient:
    """Asks an engine for speech the way programs do, and looks at the clock."""

    def __init__(self, engine: "Engine", voice: "Voice | None", job: TrialConfig) -> None:
        self._engine, self._voice, self._job = engine, voice, job
        self._sampling = engine.service.default_sampling
        self._random = job.model.startswith("random:")
        self._asked = 0

    async def round(self, voices: int) -> list[RequestResult]:
        """Every text of a round once, at most `voices` of them at one time."""
        queue = iter(list(enumerate(self._texts(voices))))
        heard: list[RequestResult] = []

        async def one_after_another() -> None:
            for at, text in queue:
                heard.append(await self.listen(text, at))

        await asyncio.gather(*(one_after_another() for _ in range(voices)))
        return sorted(heard, key=lambda each: each.text)

    async def listen(self, text: str, number: int) -> RequestResult:
        rate, began = self._engine.sample_rate, time.perf_counter()
        first, samples, error = 0.0, 0, None
        try:
            utterance = await self._utterance(text, number)
            async with aclosing(self._engine.service.thread.aspeak(utterance)) as chunks:
                async for chunk in chunks:
                    if not samples and len(chunk.samples):
                        first = time.perf_counter() - began
                    samples += len(chunk.samples)
        except ShoalError as problem:
            error = f"{type(problem).__name__}: {problem}"
        seconds = time.perf_counter() - began
        frame = self._engine.service.core.checkpoint.codec.config.frame_length
        return RequestResult(number, seconds, first, samples / rate, samples // frame, error)

    def _texts(self, voices: int) -> list[str]:
        """The same texts in the same order every time, so that two runs can be laid side by side."""
        count = max(self._job.texts, voices)
        first = self._asked if self._job.unique else 0
        self._asked += count
        return list(islice(texts(self._job.sentences, first), count))

    async def _utterance(self, text: str, number: int) -> "Utterance":
        from shoal.speech import SpeechRequest

        service = self._engine.service
        utterance = await service.prepare(
            SpeechRequest(text, sampling=replace(self._sampling, seed=number)), self._voice
        )
        limit = self._limit(len(text) / len(utterance.turns))
        if limit:
            utterance.sampling = replace(utterance.sampling, max_frames=limit)
        return utterance

    def _limit(self, characters: float) -> int:
        """Frames of a turn; random weights get as many as somebody would need to say the text."""
        rate = self._engine.service.core.checkpoint.codec.config.frame_rate
        spoken = max(1, round(characters / CHARACTERS_PER_SECOND * rate)) if self._random else 0
        return min(filter(None, (spoken, self._job.max_frames)), default=0)


def _voice(engine: "Engine", job: TrialConfig) -> "Voice | None":
    from shoal.speech import SpeechRequest
    from shoal.tools.bench.engine import random_voice

    if job.voice is not None:
        return engine.service.resolve_blocking(SpeechRequest("", voice=job.voice))
    return random_voice(engine.service.core.checkpoint, 10.0) if job.model.startswith("random:") else None


def main() -> None:
    """Whatever goes wrong is told too: the one who reads has nothing else to go by."""
    fields = json.loads(sys.stdin.read())
    job = TrialConfig(**{**fields, "voices": tuple(fields["voices"])})

    # What a library prints must not stand between the lines that are read.
    out, sys.stdout = sys.stdout, sys.stderr

    def emit(what: dict[str, Any]) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    try:
        run(job, emit)
    except ShoalError as problem:
        emit({"refused": {"error": type(problem).__name__, "message": str(problem)}})
    except Exception as problem:  # noqa: BLE001 - the edge of this process
        emit({"failed": f"{type(problem).__name__}: {problem}"})


if __name__ == "__main__":
    main()
