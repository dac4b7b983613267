"""Measurement of one configuration in its own process (`python -m shoal.tools.bench.trial`).

Reads a TrialConfig as one JSON object from standard input and writes every result as one line of JSON as soon as it is
known, so that the parent loses nothing if this process dies.
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

CHARACTERS_PER_SECOND = 15.0  # rate of spoken English; limits random weights, which do not generate a stop token

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class TrialConfig:
    """Settings of a trial, passed to the process as JSON."""

    model: str
    device: str
    settings: dict[str, Any]
    voices: tuple[int, ...]  # batch sizes
    samples: int  # measured rounds; each generates every text once
    texts: int  # texts per round; raised to the batch size where that is larger
    sentences: int  # sentences per text
    warm_up: int  # rounds before the measured ones
    unique: bool  # different texts in every round
    voice: str | None  # stored voice; None: a random one for random weights, else the model's own
    edges: bool  # also measure the edge cases
    max_frames: int  # maximum frames per turn; 0: no limit
    start_only: bool = False


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request. Times are in seconds from its start."""

    text: int
    seconds: float
    first_audio: float
    audio_seconds: float
    frames: int
    error: str | None = None


def run(job: TrialConfig, emit: Emit) -> None:
    """Load the model, warm up and measure; every result is emitted at once. Raises the errors of loading."""
    engine, voice = start(job, emit)
    with engine:
        if not job.start_only:
            asyncio.run(measure(engine, voice, job, emit))


def start(job: TrialConfig, emit: Emit) -> tuple["Engine", "Voice | None"]:
    import torch

    from shoal.config import EngineConfig
    from shoal.engine.load import choose_device, load
    from shoal.tools.bench.memory import MemoryGauge, memory_parts

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
    core = engine.service.core
    usage = {"kind": memory.kind, "baseline": baseline, "loaded": loaded_bytes, "peak": memory.peak()}
    emit({"memory": usage | memory_parts(core)})
    emit({"engine": _engine(core)})
    return engine, _voice(engine, job)


def weight_modes(core: "EngineCore") -> str:
    """Return the weight modes in effect, which may differ from the request: native runs stored int8 weights as int8."""
    from shoal.model.linear import DequantizedLinear
    from shoal.quantize.apply import modes_of

    checkpoint = core.checkpoint
    modes = modes_of(checkpoint.model, checkpoint.codec)
    if core.runner.backend == "native" and any(
        isinstance(each, DequantizedLinear) for each in checkpoint.model.modules()
    ):
        return "int8 (as stored)" if not modes else f"{modes}, others as stored"
    return str(modes)


def _engine(core: "EngineCore") -> dict[str, str | int]:
    """Describe the engine that the settings resulted in."""
    checkpoint = core.checkpoint
    return {
        "dtype": str(checkpoint.model.dtype).removeprefix("torch."),
        "weights": weight_modes(core),
        "backend": core.runner.backend,
        "sample_rate": checkpoint.codec.config.sample_rate,
    }


async def measure(engine: "Engine", voice: "Voice | None", job: TrialConfig, emit: Emit) -> None:
    from shoal.tools.bench.memory import MemoryGauge

    client = TrialClient(engine, voice, job)
    for voices in job.voices:
        for number in range(-job.warm_up, job.samples):
            began, cpu_began = time.perf_counter(), time.process_time()
            results = await client.round(voices)
            spent = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu_began}
            if number >= 0:
                emit({"round": {"voices": voices, **spent, "requests": [asdict(each) for each in results]}})
            emit({"done": 1})
    for name, text in edge_cases().items() if job.edges else ():
        edge = await client.request(text, 0)
        emit({"edge": {"name": name, "characters": len(text), **asdict(edge)}, "done": 1})
    emit({"peak": MemoryGauge(engine.service.core.checkpoint.model.device).peak()})


class TrialClient:
    """Sends requests to an engine through its asynchronous API and times them."""

    def __init__(self, engine: "Engine", voice: "Voice | None", job: TrialConfig) -> None:
        self._engine, self._voice, self._job = engine, voice, job
        self._sampling = engine.service.default_sampling
        self._random = job.model.startswith("random:")
        self._asked = 0

    async def round(self, voices: int) -> list[RequestResult]:
        """Generate every text of a round once, at most `voices` of them concurrently."""
        queue = iter(list(enumerate(self._texts(voices))))
        results: list[RequestResult] = []

        async def worker() -> None:
            for at, text in queue:
                results.append(await self.request(text, at))

        await asyncio.gather(*(worker() for _ in range(voices)))
        return sorted(results, key=lambda each: each.text)

    async def request(self, text: str, number: int) -> RequestResult:
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
        """Return the texts of a round, equal in every run, so that runs can be compared pairwise."""
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
        """Return the maximum frames of a turn, 0 for no limit; random weights get as many as the text would take."""
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
    """Run the trial read from standard input; errors are emitted as messages as well."""
    fields = json.loads(sys.stdin.read())
    job = TrialConfig(**{**fields, "voices": tuple(fields["voices"])})

    # Libraries may print: keep their output out of the messages.
    out, sys.stdout = sys.stdout, sys.stderr

    def emit(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        run(job, emit)
    except ShoalError as problem:
        emit({"refused": {"error": type(problem).__name__, "message": str(problem)}})
    except Exception as problem:  # noqa: BLE001 - process edge: the parent reports the error
        emit({"failed": f"{type(problem).__name__}: {problem}"})


if __name__ == "__main__":
    main()
