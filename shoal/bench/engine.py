"""The engine by itself: no server, no network, no thread but this one.

    throughput      N listeners who each ask for the next text when theirs has ended, under every admission policy
    prefix cache    time to first audio with a voice whose prompt is known, and with one that is not
    scheduler       steps per second with a model that takes no time: what Python costs

Wall time is what a machine with other work to do makes of it, so every figure comes with counts that are the same on
every run: steps, frames, voices per step.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.progress import Progress
from rich.table import Table

from shoal.bench.machine import machine
from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.resolve import resolve_model
from shoal.config import EngineConfig, Policy
from shoal.engine.blocks import BlockPool
from shoal.engine.core import EngineCore
from shoal.engine.load import choose_device, choose_dtype
from shoal.engine.policy import admission_policy
from shoal.engine.scheduler import Drawn, Scheduler
from shoal.engine.script import write_turns
from shoal.engine.sequence import Sequence
from shoal.engine.utterance import Event, Utterance
from shoal.errors import GenerationFailed, OutputError
from shoal.speech import Sampling
from shoal.text.prompt import Reference
from shoal.voices.voice import Voice

POLICIES: tuple[Policy, ...] = ("continuous", "dynamic", "static")
BATCHES = (1, 4, 16)
TEXT = "The harbour was quiet in the morning, and the boats lay still on the water."
# What the scheduler has to carry: 64 voices at 500 steps per second leave it three times the time it needs.
SCHEDULER_TARGET = 100_000

Result = dict[str, Any]
Tick = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    frames: int  # of the longest utterance; the others have a quarter, a half and three quarters of it
    utterances: int  # per listener
    first_audios: int  # measurements of time to first audio
    scheduler_steps: int


USUAL = Size(frames=64, utterances=3, first_audios=7, scheduler_steps=2000)
QUICK = Size(frames=8, utterances=2, first_audios=3, scheduler_steps=200)


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
    first_audio: float  # median seconds from asking to the first chunk

    @property
    def figures(self) -> Result:
        return {
            **asdict(self),
            "frames_per_second": self.frames / self.seconds,
            "frames_per_cpu_second": self.frames / self.cpu_seconds,
            "frames_per_step": self.frames / self.steps,
            "audio_per_second": self.audio_seconds / self.seconds,
            "rtf": self.seconds / self.audio_seconds,
        }


@dataclass(frozen=True, slots=True)
class FirstAudio:
    """One request's way to its first chunk."""

    seconds: float
    cpu_seconds: float
    columns_saved: int


def run_engine_bench(
    model: str, *, device: str = "auto", json_path: Path | None = None, quick: bool = False, progress: bool = True
) -> Result:
    """Measure everything and return it as one document, which `json_path` also gets. An interrupt keeps what is done.

    Raises what loading the model raises, and OutputError.
    """
    size = QUICK if quick else USUAL
    result: Result = {"benchmark": "engine", "model": model, "quick": quick, "complete": False}
    with suppress(KeyboardInterrupt), _bar(shown=progress) as tick:
        tick("reading the model")
        core = _load(model, device)
        result["machine"] = {**machine(core.checkpoint.model.device), "rung": core.runner.rung}
        result["dtype"] = str(core.checkpoint.model.dtype).removeprefix("torch.")
        measure(core, size, result, tick)
        result["complete"] = True
    if json_path is not None:
        _write(json_path, result)
    return result


def measure(core: EngineCore, size: Size, result: Result, tick: Tick) -> None:
    """Fill in the figures one after the other, so that what an interrupt leaves is whole as far as it goes."""
    result["scheduler"] = measure_scheduler(size.scheduler_steps)
    tick("scheduler")
    result["throughput"] = []
    for voices in BATCHES:
        _throughput(core, "continuous", voices, QUICK)  # the first of a batch size is not like the others
        for policy in POLICIES:
            result["throughput"].append(_throughput(core, policy, voices, size).figures)
            tick(f"{voices} voices, {policy}")
    core.scheduler.policy = admission_policy("continuous", 1, 0.0)
    result["first_audio"] = measure_first_audio(core, size.first_audios)
    tick("first audio")


def measure_scheduler(steps: int, voices: int = 64, prompt: int = 100, frames: int = 200) -> Result:
    """The scheduler with a model that takes no time: voices come and go, all slots are always taken."""
    scheduler = Scheduler(
        BlockPool(voices * 32, 16), slots=voices, token_budget=512, stop_id=-1, max_columns=prompt + frames
    )
    ids, columns, drawn = count(), np.zeros((voices, 11), np.int32), 0
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(steps):
        while scheduler.live < voices:
            id = next(ids)
            # Lengths differ, so that they do not all end at once.
            sampling = Sampling(max_frames=frames - id % 64)
            scheduler.add(Sequence.start(id, np.full((prompt, 11), id, np.int32), sampling, prompt + frames))
        batch = scheduler.plan()
        rows = len(batch.drawing())
        for progress in scheduler.commit(Drawn(batch, columns[:rows])):
            if progress.sequence.finish is not None:
                scheduler.release(progress.sequence)
        drawn += rows
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return {
        "voices": voices,
        "steps": steps,
        "sequence_steps": drawn,
        "sequence_steps_per_second": drawn / seconds,
        "sequence_steps_per_cpu_second": drawn / cpu_seconds,
        "target": SCHEDULER_TARGET,
    }


def measure_first_audio(core: EngineCore, times: int, seconds: float = 10.0) -> Result:
    """Time to first audio with a voice of so many seconds: its prompt computed anew, and known from before."""
    voice = random_voice(core.checkpoint, seconds)
    columns = len(write_turns(TEXT, voice, core.checkpoint)[0].opening)
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
        }
    return figures


def random_voice(checkpoint: Checkpoint, seconds: float) -> Voice:
    """Nobody's voice, as long as somebody's: what it costs does not depend on how it sounds."""
    codec = checkpoint.codec.config
    # Half a prompt at most: the text comes after it.
    frames = min(round(seconds * codec.frame_rate), checkpoint.model.config.max_prompt // 2)
    most = min(codec.codebook_size, checkpoint.model.config.codebook_size)
    codes = np.random.default_rng(0).integers(0, most, (codec.num_codebooks, frames)).astype(np.int32)
    return Voice(None, (Reference(TEXT, codes),), codec.frame_rate)


def render(result: Result) -> RenderableType:
    """Tables for the eye, of as much as was measured."""
    parts: list[RenderableType] = []
    if "machine" in result:
        told = result["machine"]
        parts.append(
            f"{result['model']} in {result['dtype']} on {told['device']} ({told['cores']} cores, {told['threads']} "
            f"threads), {told['rung']}; torch {told['torch']}, python {told['python']}, shoal {told['shoal']}"
        )
    if result.get("throughput"):
        parts.append(_throughput_table(result["throughput"]))
    if "first_audio" in result:
        parts.append(_first_audio_table(result["first_audio"]))
    if "scheduler" in result:
        told = result["scheduler"]
        parts.append(
            f"scheduler alone, {told['voices']} voices: {told['sequence_steps_per_second']:,.0f} sequence-steps/s "
            f"({told['sequence_steps_per_cpu_second']:,.0f} per second of CPU; wanted: {told['target']:,})"
        )
    if not result["complete"]:
        parts.append("interrupted: this is what was measured until then")
    return Group(*parts)


def last_line(result: Result) -> str:
    """The whole result as one line of JSON."""
    return json.dumps(result)


def _load(model: str, device: str) -> EngineCore:
    where = choose_device(device)
    checkpoint = resolve_model(model, dtype=choose_dtype(None, where), device=where, encoder=False)
    # A second try with other dice would be somebody else's time.
    return EngineCore(checkpoint, EngineConfig(slots=max(BATCHES), guard=False))


def _throughput(core: EngineCore, policy: Policy, voices: int, size: Size) -> Throughput:
    """So many listeners, each with the next text when theirs has ended."""
    core.scheduler.policy = admission_policy(policy, voices, 0.05)
    before, total, asked = _counts(core), voices * size.utterances, 0
    started_at: dict[int, float] = {}
    waits: list[float] = []
    core.pool.clear_cache()
    started, cpu_started = time.perf_counter(), time.process_time()
    while asked < total or not core.idle:
        while asked < total and len(core.stage.live) < voices:
            utterance = _utterance(core, size.frames * (4 - asked % 4) // 4, asked)
            started_at[utterance.id] = time.perf_counter()
            core.add(utterance)
            asked += 1
        for event in core.step():
            _check(event)
            if event.utterance.id in started_at:
                waits.append(time.perf_counter() - started_at.pop(event.utterance.id))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return Throughput(
        policy=policy,
        voices=voices,
        utterances=total,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        first_audio=statistics.median(waits),
        **{name: after - before[name] for name, after in _counts(core).items()},
    )


def _counts(core: EngineCore) -> dict[str, Any]:
    """What the engine has counted since it was made."""
    return {
        "frames": core.stage.stats.frames,
        "steps": core.stats.steps,
        "model_seconds": core.stats.seconds,
        "codec_seconds": core.voicebox.seconds,
        "audio_seconds": core.stage.stats.samples / core.checkpoint.codec.config.sample_rate,
    }


_ids = count()


def _utterance(core: EngineCore, frames: int, seed: int, voice: Voice | None = None, text: str = TEXT) -> Utterance:
    turns = write_turns(text, voice, core.checkpoint)
    return Utterance(next(_ids), turns, Sampling(seed=seed, max_frames=max(1, frames)))


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
def _bar(*, shown: bool) -> Iterator[Tick]:
    """A bar on standard error that moves by one with every thing that is done."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not shown or not console.is_terminal) as bar:
        task = bar.add_task("", total=1 + len(BATCHES) * len(POLICIES) + 2)
        yield lambda what: bar.update(task, description=what, advance=1)


def _write(path: Path, result: Result) -> None:
    try:
        path.write_text(last_line(result) + "\n")
    except OSError as problem:
        raise OutputError(f"{path}: {problem.strerror or problem}") from problem


def _throughput_table(rows: list[Result]) -> Table:
    table = _table("voices", "policy", "frames/s", "audio-s/s", "RTF", "TTFA", "per step", "steps", "per CPU-s")
    for row in rows:
        table.add_row(
            str(row["voices"]),
            row["policy"],
            f"{row['frames_per_second']:,.1f}",
            f"{row['audio_per_second']:,.2f}",
            f"{row['rtf']:.3f}",
            f"{row['first_audio'] * 1000:,.0f} ms",
            f"{row['frames_per_step']:.2f}",
            str(row["steps"]),
            f"{row['frames_per_cpu_second']:,.1f}",
        )
    return table


def _first_audio_table(figures: Result) -> Table:
    table = _table("prefix cache", "TTFA", "best", "CPU", "columns saved")
    table.title = f"a voice of {figures['voice_seconds']:.1f} s, {figures['prompt_columns']} columns of prompt"
    for name, label in (("unknown", "off"), ("known", "on")):
        row = figures[name]
        times = (f"{row[key] * 1000:,.1f} ms" for key in ("seconds", "best_seconds", "cpu_seconds"))
        table.add_row(label, *times, f"{row['columns_saved']:,.0f}")
    return table


def _table(*headers: str) -> Table:
    table = Table(*headers, box=SIMPLE_HEAD, padding=0, title_justify="left")
    for column in table.columns:
        column.justify = "right"
    return table
