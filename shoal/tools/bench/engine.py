"""Benchmark of the engine core in this thread, without server and network.

    throughput      closed loop of N clients under every admission policy
    prefix cache    time to first audio with a cached and with an uncached voice
    arrivals        time to first audio of Poisson arrivals at 70 % of the measured throughput
    step            one step of the whole batch without the codec; on a GPU also its utilisation
    scheduler       scheduler steps per second without a model: the CPU cost of Python

Wall time depends on the load of the machine, so every figure comes with counts that are equal in every run: steps,
frames, frames per step. Every run does the same work, so two runs can be compared part by part (see PARTS).
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from typing import Any

import numpy as np
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.resolve import resolve_model
from shoal.config import EngineConfig, Policy
from shoal.engine.core import EngineCore
from shoal.engine.load import build_core, choose_device, choose_dtype, weight_chooser
from shoal.engine.preprocess import build_turns
from shoal.engine.scheduling.blocks import BlockPool
from shoal.engine.scheduling.policy import admission_policy
from shoal.engine.scheduling.scheduler import Scheduler, StepOutput
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.utterance import Event, Utterance
from shoal.errors import GenerationFailed
from shoal.speech import SamplingParams
from shoal.text.prompt import Reference
from shoal.tools.bench.arrivals import measure_arrivals
from shoal.tools.bench.busy import gpu_busy_fraction
from shoal.tools.bench.document import INTERRUPTS, Document, new_document
from shoal.tools.bench.machine import BackgroundLoad, machine
from shoal.tools.bench.percentiles import summarize
from shoal.tools.bench.profile import step_seconds
from shoal.tools.bench.progress import progress_bar
from shoal.voices.voice import Voice

POLICIES: tuple[Policy, ...] = ("continuous", "dynamic", "static")
BATCHES = (1, 4, 16)
TEXT = "The harbour was quiet in the morning, and the boats lay still on the water."
# Target in sequence-steps per second: three times the need of 64 sequences at 500 steps per second.
SCHEDULER_TARGET = 100_000
# Rate of the Poisson arrivals as a share of the measured throughput.
LOAD = 0.7
# The steps of a measurement are split into this many parts; the variation between them shows disturbances.
PARTS = 10

Result = dict[str, Any]
Tick = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class BenchSize:
    """Amount of work per measurement."""

    frames: int  # frames of the longest utterances; others have 1/4, 1/2 or 3/4 as many
    utterances: int  # utterances per client
    first_audios: int  # measurements of time to first audio
    scheduler_steps: int

    def frames_of(self, number: int) -> int:
        """Return the frames of an utterance; lengths differ, so that utterances do not all end in the same step."""
        return self.frames * (4 - number % 4) // 4


# For GPUs, which would finish the default size before the batch is full.
LONG = BenchSize(frames=200, utterances=3, first_audios=15, scheduler_steps=2000)
DEFAULT = BenchSize(frames=64, utterances=3, first_audios=7, scheduler_steps=2000)
QUICK = BenchSize(frames=8, utterances=2, first_audios=3, scheduler_steps=200)


@dataclass(frozen=True, slots=True)
class Throughput:
    policy: Policy
    voices: int
    utterances: int
    frames: int
    steps: int
    seconds: float
    cpu_seconds: float
    model_seconds: float
    codec_seconds: float
    audio_seconds: float
    parts: list[float]  # seconds of each tenth of the steps
    waits: list[float]  # time to first audio of every utterance in seconds
    decodes: list[Result]  # codec calls and their seconds, by size
    full_audio_per_second: float  # throughput while every client has a request in flight

    @property
    def figures(self) -> Result:
        return {
            **asdict(self),
            "frames_per_second": self.frames / self.seconds,
            "frames_per_cpu_second": self.frames / self.cpu_seconds,
            "frames_per_step": self.frames / self.steps,
            "audio_per_second": self.audio_seconds / self.seconds,
            "rtf": self.seconds / self.audio_seconds,
            "first_audio": summarize(self.waits),
        }


@dataclass(frozen=True, slots=True)
class FirstAudio:
    """Cost of the first chunk of one request."""

    seconds: float
    cpu_seconds: float
    tokens_saved: int


def run_engine_bench(
    model: str,
    *,
    device: str = "auto",
    batches: tuple[int, ...] = BATCHES,
    quick: bool = False,
    progress: bool = True,
) -> Document:
    """Run all measurements; an interrupt keeps the finished ones. Raises the errors of loading the model."""
    core = load_core(model, device, max(batches))
    settings = {"model": model, "device": device, "voices": list(batches), "quick": quick}
    document = new_document("engine", dict(machine(core.checkpoint.model.device)), settings)
    dtype = str(core.checkpoint.model.dtype).removeprefix("torch.")
    run: Result = {"name": model, "engine": {"dtype": dtype, "backend": core.runner.backend}, "throughput": []}
    run["packed"] = core.audio_decoder.backend == "graph"
    document["runs"].append(run)
    others = BackgroundLoad()
    with _bar(len(batches), shown=progress) as tick:
        try:
            measure(core, batches, QUICK if quick else _default_size(core), run, tick)
            document["complete"] = True
        except INTERRUPTS:
            pass
    document["machine"]["others_cpu"] = others.share()
    return document


def _default_size(core: EngineCore) -> BenchSize:
    return LONG if core.checkpoint.model.device.type == "cuda" else DEFAULT


def measure(core: EngineCore, batches: tuple[int, ...], size: BenchSize, run: Result, tick: Tick) -> None:
    """Fill `run` with one measurement after the other, so that an interrupt leaves only complete ones."""
    with tick("scheduler"):
        run["scheduler"] = measure_scheduler(size.scheduler_steps)
    for voices in batches:
        measure_throughput(core, "continuous", voices, QUICK)  # warm-up of this batch size
        for policy in POLICIES:
            with tick(f"{voices} voices, {policy}"):
                run["throughput"].append(measure_throughput(core, policy, voices, size).figures)
    core.scheduler.policy = admission_policy("continuous", 1, 0.0)
    with tick("first audio"):
        run["first_audio"] = measure_first_audio(core, size.first_audios)
    with tick("arrivals"):
        run["arrivals"] = _arrivals(core, run["throughput"][-len(POLICIES)], size)
    with tick("steps"):
        if core.checkpoint.model.device.type == "cuda":
            run["gpu_busy"] = _gpu_busy(core, max(batches))
        run["steps"] = [{"voices": voices, "seconds": step_seconds(core, voices)} for voices in batches]


def measure_scheduler(steps: int, voices: int = 64, prompt: int = 100, frames: int = 200) -> Result:
    """Measure the scheduler without a model, with sequences starting and ending and all slots occupied."""
    scheduler = Scheduler(
        BlockPool(voices * 32, 16), slots=voices, token_budget=512, stop_id=-1, max_tokens=prompt + frames
    )
    ids, tokens, sampled = count(), np.zeros((voices, 11), np.int32), 0
    started, cpu_started = time.perf_counter(), time.process_time()
    ends: list[float] = []
    for _ in range(steps):
        while scheduler.active < voices:
            id = next(ids)
            # Lengths differ, so that sequences do not all end in the same step.
            sampling = SamplingParams(max_frames=frames - id % 64)
            scheduler.add(Sequence.start(id, np.full((prompt, 11), id, np.int32), sampling, prompt + frames))
        batch = scheduler.plan()
        rows = len(batch.sampled())
        for progress in scheduler.commit(StepOutput(batch, tokens[:rows])):
            if progress.sequence.finish is not None:
                scheduler.release(progress.sequence)
        sampled += rows
        ends.append(time.perf_counter())
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return {
        "voices": voices,
        "steps": steps,
        "sequence_steps": sampled,
        "sequence_steps_per_second": sampled / seconds,
        "sequence_steps_per_cpu_second": sampled / cpu_seconds,
        "target": SCHEDULER_TARGET,
        "parts": _parts([started, *ends]),
    }


def measure_first_audio(core: EngineCore, times: int, seconds: float = 10.0) -> Result:
    """Measure the time to first audio with a voice of `seconds` seconds, with an empty and a filled prefix cache."""
    voice = random_voice(core.checkpoint, seconds)
    tokens = len(build_turns(TEXT, voice, core.checkpoint)[0].prompt)
    figures: Result = {"voice_seconds": voice.seconds, "prompt_tokens": tokens}
    runs: dict[str, list[FirstAudio]] = {"unknown": [], "known": []}
    for number in range(times):
        # Both cases alternate, so that disturbances affect both.
        core.pool.clear_cache()
        for name, measured in runs.items():
            # A different text every time, so that only the voice is shared.
            measured.append(_first_audio(core, _utterance(core, 2, number, voice, f"{number}, {name}. {TEXT}")))
    for name, measured in runs.items():
        figures[name] = {
            "seconds": statistics.median(run.seconds for run in measured),
            "best_seconds": min(run.seconds for run in measured),
            "cpu_seconds": statistics.median(run.cpu_seconds for run in measured),
            "tokens_saved": statistics.mean(run.tokens_saved for run in measured),
            "waits": [run.seconds for run in measured],
        }
    return figures


def _arrivals(core: EngineCore, reached: Result, size: BenchSize) -> Result:
    """Measure Poisson arrivals of the utterances of `reached`, a throughput row, with one voice."""
    voice, voices = random_voice(core.checkpoint, 10.0), reached["voices"]
    utterances = [
        _utterance(core, size.frames_of(number), number, voice, f"{number}. {TEXT}")
        for number in range(voices * size.utterances)
    ]
    frames = statistics.mean(utterance.sampling.max_frames for utterance in utterances)
    return measure_arrivals(core, utterances, LOAD * reached["frames_per_second"] / frames)


def _gpu_busy(core: EngineCore, voices: int, before: int = 40, steps: int = 25) -> float:
    """Measure GPU utilisation with a full batch in steady state."""
    utterances = [_utterance(core, 2 * (before + steps), number) for number in range(voices)]
    for utterance in utterances:
        core.add(utterance)
    for _ in range(before):
        core.step()
    share = gpu_busy_fraction(core.step, steps)
    for utterance in utterances:
        core.cancel(utterance)
    while core.runner.in_flight:
        core.step()
    return share


def random_voice(checkpoint: Checkpoint, seconds: float) -> Voice:
    """Return a voice of random codes: its cost depends on the length only."""
    codec = checkpoint.codec.config
    # At most half of the prompt, which also has to hold the text.
    frames = min(round(seconds * codec.frame_rate), checkpoint.model.config.max_prompt // 2)
    size = min(codec.codebook_size, checkpoint.model.config.codebook_size)
    codes = np.random.default_rng(0).integers(0, size, (codec.num_codebooks, frames)).astype(np.int32)
    return Voice(None, (Reference(TEXT, codes),), codec.frame_rate)


def last_line(document: Document) -> str:
    """Return the document as one line of JSON."""
    return json.dumps(document)


def load_core(model: str, device: str, slots: int, quantize: str | None = None) -> EngineCore:
    """Load a model, by default with its weights as stored, and build the engine that is measured.

    Raises the errors of loading.
    """
    where = choose_device(device)
    dtype = choose_dtype(None, where)
    choose = None if quantize is None else weight_chooser(EngineConfig(quantize=quantize), torch.device(where), dtype)
    checkpoint = resolve_model(model, dtype=dtype, device=where, encoder=False, quantize=choose)
    # The guard would retry bad audio with another seed, which changes the amount of work.
    return build_core(checkpoint, EngineConfig(slots=slots, guard=False))


def measure_throughput(core: EngineCore, policy: Policy, voices: int, size: BenchSize) -> Throughput:
    """Run a closed loop of `voices` clients; each sends its next request when the last one has ended."""
    core.scheduler.policy = admission_policy(policy, voices, 0.05)
    before, total, asked = _counts(core), voices * size.utterances, 0
    started_at: dict[int, float] = {}
    waits: list[float] = []
    ends: list[float] = []
    decodes, full = CodecCalls(core), 0.0
    core.pool.clear_cache()
    started, cpu_started = time.perf_counter(), time.process_time()
    received = list[Event]()  # events of one step

    def receive(event: Event) -> None:
        _check(event)
        received.append(event)
        if event.utterance.id in started_at:
            waits.append(time.perf_counter() - started_at.pop(event.utterance.id))

    while asked < total or not core.idle:
        while asked < total and len(core.tracker.active) < voices:
            utterance = _utterance(core, size.frames_of(asked), asked)
            started_at[utterance.id] = time.perf_counter()
            core.add(utterance)
            asked += 1
        received.clear()
        for event in core.step(receive):
            receive(event)
        decodes.note(received)
        ends.append(time.perf_counter())
        if asked < total:
            full = (_counts(core)["audio_seconds"] - before["audio_seconds"]) / (ends[-1] - started)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return Throughput(
        policy=policy,
        voices=voices,
        utterances=total,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        parts=_parts([started, *ends]),
        waits=waits,
        decodes=decodes.figures(),
        full_audio_per_second=full,
        **{name: after - before[name] for name, after in _counts(core).items()},
    )


class CodecCalls:
    """Codec calls and their seconds, by number of chunks, frames of the longest chunk and frames of all chunks."""

    def __init__(self, core: EngineCore) -> None:
        self._core, self._seconds = core, core.audio_decoder.seconds
        self._calls: dict[tuple[int, int, int], list[float]] = {}

    def note(self, events: list[Event]) -> None:
        """Count the codec call of one step."""
        frame = self._core.checkpoint.codec.config.frame_length
        chunks = [len(event.chunk.samples) // frame for event in events if event.chunk is not None]
        chunks = [frames for frames in chunks if frames]
        now, before = self._core.audio_decoder.seconds, self._seconds
        self._seconds = now
        if chunks:
            self._calls.setdefault((len(chunks), max(chunks), sum(chunks)), []).append(now - before)

    def figures(self) -> list[Result]:
        return [
            {"chunks": chunks, "frames": longest, "all_frames": total, "calls": len(seconds), "seconds": sum(seconds)}
            for (chunks, longest, total), seconds in sorted(self._calls.items())
        ]


def _parts(moments: list[float]) -> list[float]:
    """Return the seconds of each tenth of the steps, from the times between them."""
    steps = len(moments) - 1
    cuts = [moments[steps * part // PARTS] for part in range(PARTS + 1)]
    return [end - begin for begin, end in pairwise(cuts)]


def _counts(core: EngineCore) -> dict[str, Any]:
    """Return the counters of the engine."""
    return {
        "frames": core.tracker.stats.frames,
        "steps": core.stats.steps,
        "model_seconds": core.stats.seconds,
        "codec_seconds": core.audio_decoder.seconds,
        "audio_seconds": core.tracker.stats.samples / core.checkpoint.codec.config.sample_rate,
    }


_ids = count()


def _utterance(core: EngineCore, frames: int, seed: int, voice: Voice | None = None, text: str = TEXT) -> Utterance:
    turns = build_turns(text, voice, core.checkpoint)
    return Utterance(next(_ids), turns, SamplingParams(seed=seed, max_frames=max(1, frames)))


def _first_audio(core: EngineCore, utterance: Utterance) -> FirstAudio:
    """Run an utterance until its first chunk, then cancel it."""
    saved, started, cpu_started = core.pool.stats.tokens_saved, time.perf_counter(), time.process_time()
    core.add(utterance)
    received = list[tuple[float, float]]()  # seconds, and CPU seconds

    def receive(event: Event) -> None:
        _check(event)
        received.append((time.perf_counter() - started, time.process_time() - cpu_started))

    while not received and not core.idle:
        for event in core.step(receive):
            receive(event)
    seconds, cpu_seconds = received[0]
    first = FirstAudio(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        tokens_saved=core.pool.stats.tokens_saved - saved,
    )
    core.cancel(utterance)
    return first


def _check(event: Event) -> None:
    if event.error is not None:
        raise GenerationFailed(f"a request of the benchmark failed: {event.error}") from event.error


@contextmanager
def _bar(batches: int, *, shown: bool) -> Iterator[Tick]:
    """Show a progress bar; yield a context manager that names and then completes one measurement."""
    with progress_bar(1 + batches * len(POLICIES) + 3, shown=shown) as bar:

        @contextmanager
        def tick(name: str) -> Iterator[None]:
            bar.describe(name)
            yield
            bar.advance()

        yield tick
