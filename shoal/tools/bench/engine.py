"""The engine by itself: no server, no network, no thread but this one.

    throughput      N listeners who each ask for the next text when theirs has ended, under every admission policy
    prefix cache    time to first audio with a voice whose prompt is known, and with one that is not
    arrivals        time to first audio of requests that come at random, at seven tenths of what was just reached
    step            one frame of all voices, the codec left out; on a GPU also how much of the time it is at work
    scheduler       steps per second with a model that takes no time: what Python costs

Wall time is what a machine with other work to do makes of it, so every figure comes with counts that are the same on
every run: steps, frames, voices per step. They also let two runs be compared tenth by tenth: each did the same work.
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

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.resolve import resolve_model
from shoal.config import EngineConfig, Policy
from shoal.engine.blocks import BlockPool
from shoal.engine.core import EngineCore
from shoal.engine.load import build_core, choose_device, choose_dtype
from shoal.engine.policy import admission_policy
from shoal.engine.preprocess import build_turns
from shoal.engine.scheduler import Scheduler, StepOutput
from shoal.engine.sequence import Sequence
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
BATCHES = (1, 4, 16)  # voices at a time
TEXT = "The harbour was quiet in the morning, and the boats lay still on the water."
# What the scheduler has to carry: 64 voices at 500 steps per second leave it three times the time it needs.
SCHEDULER_TARGET = 100_000
# Requests that come at random ask for so much of what listeners without a pause were given.
LOAD = 0.7
# Stretches that the steps of a measurement are cut into: how restless the machine was shows between them.
PARTS = 10

Result = dict[str, Any]
Tick = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class BenchSize:
    """How much is measured."""

    frames: int  # of the longest utterance; the others have a quarter, a half and three quarters of it
    utterances: int  # per listener
    first_audios: int  # measurements of time to first audio
    scheduler_steps: int

    def frames_of(self, number: int) -> int:
        """Of an utterance; lengths differ, so that they do not all end at once."""
        return self.frames * (4 - number % 4) // 4


# A GPU has spoken what a CPU takes a minute for before it has begun to show what it can do.
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
    waits: list[float]  # seconds from asking to the first chunk, of every utterance
    decodes: list[Result]  # what the codec took, by the size of its calls
    full_audio_per_second: float  # as long as every listener has a text

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
    """One request's way to its first chunk."""

    seconds: float
    cpu_seconds: float
    columns_saved: int


def run_engine_bench(
    model: str,
    *,
    device: str = "auto",
    batches: tuple[int, ...] = BATCHES,
    quick: bool = False,
    progress: bool = True,
) -> Document:
    """Measure everything. An interrupt keeps what is done. Raises what loading the model raises."""
    core = _load(model, device, max(batches))
    settings = {"model": model, "device": device, "voices": list(batches), "quick": quick}
    document = new_document("engine", dict(machine(core.checkpoint.model.device)), settings)
    dtype = str(core.checkpoint.model.dtype).removeprefix("torch.")
    run: Result = {"name": model, "engine": {"dtype": dtype, "rung": core.runner.backend}, "throughput": []}
    run["packed"] = core.audio_decoder.backend == "graph"
    document["runs"].append(run)
    others = BackgroundLoad()
    with _bar(len(batches), shown=progress) as tick:
        try:
            measure(core, batches, QUICK if quick else _usual(core), run, tick)
            document["complete"] = True
        except INTERRUPTS:
            pass
    document["machine"]["others_cpu"] = others.share()
    return document


def _usual(core: EngineCore) -> BenchSize:
    return LONG if core.checkpoint.model.device.type == "cuda" else DEFAULT


def measure(core: EngineCore, batches: tuple[int, ...], size: BenchSize, run: Result, tick: Tick) -> None:
    """Fill in the figures one after the other, so that what an interrupt leaves is whole as far as it goes."""
    with tick("scheduler"):
        run["scheduler"] = measure_scheduler(size.scheduler_steps)
    for voices in batches:
        _throughput(core, "continuous", voices, QUICK)  # the first of a batch size is not like the others
        for policy in POLICIES:
            with tick(f"{voices} voices, {policy}"):
                run["throughput"].append(_throughput(core, policy, voices, size).figures)
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
    """The scheduler with a model that takes no time: voices come and go, all slots are always taken."""
    scheduler = Scheduler(
        BlockPool(voices * 32, 16), slots=voices, token_budget=512, stop_id=-1, max_tokens=prompt + frames
    )
    ids, columns, drawn = count(), np.zeros((voices, 11), np.int32), 0
    started, cpu_started = time.perf_counter(), time.process_time()
    ends: list[float] = []
    for _ in range(steps):
        while scheduler.active < voices:
            id = next(ids)
            # Lengths differ, so that they do not all end at once.
            sampling = SamplingParams(max_frames=frames - id % 64)
            scheduler.add(Sequence.start(id, np.full((prompt, 11), id, np.int32), sampling, prompt + frames))
        batch = scheduler.plan()
        rows = len(batch.sampled())
        for progress in scheduler.commit(StepOutput(batch, columns[:rows])):
            if progress.sequence.finish is not None:
                scheduler.release(progress.sequence)
        drawn += rows
        ends.append(time.perf_counter())
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return {
        "voices": voices,
        "steps": steps,
        "sequence_steps": drawn,
        "sequence_steps_per_second": drawn / seconds,
        "sequence_steps_per_cpu_second": drawn / cpu_seconds,
        "target": SCHEDULER_TARGET,
        "parts": _parts([started, *ends]),
    }


def measure_first_audio(core: EngineCore, times: int, seconds: float = 10.0) -> Result:
    """Time to first audio with a voice of so many seconds: its prompt computed anew, and known from before."""
    voice = random_voice(core.checkpoint, seconds)
    columns = len(build_turns(TEXT, voice, core.checkpoint)[0].prompt)
    figures: Result = {"voice_seconds": voice.seconds, "prompt_columns": columns}
    runs: dict[str, list[FirstAudio]] = {"unknown": [], "known": []}
    for number in range(times):
        # In turn, so that whatever else the machine does falls on both.
        core.pool.clear_cache()
        for name, measured in runs.items():
            # Another text every time: only the voice is shared.
            measured.append(_first_audio(core, _utterance(core, 2, number, voice, f"{number}, {name}. {TEXT}")))
    for name, measured in runs.items():
        figures[name] = {
            "seconds": statistics.median(run.seconds for run in measured),
            "best_seconds": min(run.seconds for run in measured),
            "cpu_seconds": statistics.median(run.cpu_seconds for run in measured),
            "columns_saved": statistics.mean(run.columns_saved for run in measured),
            "waits": [run.seconds for run in measured],
        }
    return figures


def _arrivals(core: EngineCore, reached: Result, size: BenchSize) -> Result:
    """Of requests for the lengths that `reached` its frames per second, all of one voice."""
    voice, voices = random_voice(core.checkpoint, 10.0), reached["voices"]
    utterances = [
        _utterance(core, size.frames_of(number), number, voice, f"{number}. {TEXT}")
        for number in range(voices * size.utterances)
    ]
    frames = statistics.mean(utterance.sampling.max_frames for utterance in utterances)
    return measure_arrivals(core, utterances, LOAD * reached["frames_per_second"] / frames)


def _gpu_busy(core: EngineCore, voices: int, before: int = 40, steps: int = 25) -> float:
    """While all voices speak and none begins."""
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
    """Nobody's voice, as long as somebody's: what it costs does not depend on how it sounds."""
    codec = checkpoint.codec.config
    # Half a prompt at most: the text comes after it.
    frames = min(round(seconds * codec.frame_rate), checkpoint.model.config.max_prompt // 2)
    most = min(codec.codebook_size, checkpoint.model.config.codebook_size)
    codes = np.random.default_rng(0).integers(0, most, (codec.num_codebooks, frames)).astype(np.int32)
    return Voice(None, (Reference(TEXT, codes),), codec.frame_rate)


def last_line(document: Document) -> str:
    """The whole document as one line of JSON."""
    return json.dumps(document)


def _load(model: str, device: str, slots: int) -> EngineCore:
    where = choose_device(device)
    checkpoint = resolve_model(model, dtype=choose_dtype(None, where), device=where, encoder=False)
    # A second try with other dice would be somebody else's time.
    return build_core(checkpoint, EngineConfig(slots=slots, guard=False))


def _throughput(core: EngineCore, policy: Policy, voices: int, size: BenchSize) -> Throughput:
    """So many listeners, each with the next text when theirs has ended."""
    core.scheduler.policy = admission_policy(policy, voices, 0.05)
    before, total, asked = _counts(core), voices * size.utterances, 0
    started_at: dict[int, float] = {}
    waits: list[float] = []
    ends: list[float] = []
    decodes, full = CodecCalls(core), 0.0
    core.pool.clear_cache()
    started, cpu_started = time.perf_counter(), time.process_time()
    while asked < total or not core.idle:
        while asked < total and len(core.tracker.active) < voices:
            utterance = _utterance(core, size.frames_of(asked), asked)
            started_at[utterance.id] = time.perf_counter()
            core.add(utterance)
            asked += 1
        events = core.step()
        decodes.note(events)
        for event in events:
            _check(event)
            if event.utterance.id in started_at:
                waits.append(time.perf_counter() - started_at.pop(event.utterance.id))
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
    """Calls of the codec, by the chunks they decoded at once, the frames of the longest, and those of all together."""

    def __init__(self, core: EngineCore) -> None:
        self._core, self._seconds = core, core.audio_decoder.seconds
        self._calls: dict[tuple[int, int, int], list[float]] = {}

    def note(self, events: list[Event]) -> None:
        """What came of a step."""
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
    """Seconds of each tenth of the steps, from the moments between them."""
    steps = len(moments) - 1
    cuts = [moments[steps * part // PARTS] for part in range(PARTS + 1)]
    return [end - begin for begin, end in pairwise(cuts)]


def _counts(core: EngineCore) -> dict[str, Any]:
    """What the engine has counted since it was made."""
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
    """Until the first samples of it are there; the rest is left unsaid."""
    saved, started, cpu_started = core.pool.stats.tokens_saved, time.perf_counter(), time.process_time()
    core.add(utterance)
    heard = False
    while not heard and not core.idle:
        for event in core.step():
            _check(event)
            heard = True
    first = FirstAudio(
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu_started,
        columns_saved=core.pool.stats.tokens_saved - saved,
    )
    core.cancel(utterance)
    return first


def _check(event: Event) -> None:
    if event.error is not None:
        raise GenerationFailed(f"the benchmark cannot go on: {event.error}") from event.error


@contextmanager
def _bar(batches: int, *, shown: bool) -> Iterator[Tick]:
    """A bar that names what is measured and moves when it is done."""
    with progress_bar(1 + batches * len(POLICIES) + 3, shown=shown) as bar:

        @contextmanager
        def tick(what: str) -> Iterator[None]:
            bar.describe(what)
            yield
            bar.advance()

        yield tick
