"""Profile of a request: time of every part and its memory bandwidth against that of the device.

Parts of model and codec are timed separately, on the backend of the engine. If the engine runs model and codec one
after the other, the rest of a step is host time ("host gaps"). Tokenize, prefill and encode run once per request, all
other parts once per step.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from rich.console import Group, RenderableType

from shoal.audio.encode import encode_file
from shoal.checkpoint.resolve import resolve_model
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.execution.fused import FusedFrame
from shoal.engine.execution.graphs import FusedRunner
from shoal.engine.execution.runner import EagerRunner
from shoal.engine.load import choose_device, choose_dtype, weight_chooser
from shoal.engine.preprocess import build_turns
from shoal.engine.scheduling.scheduler import Batch, Prefill
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.utterance import Utterance
from shoal.errors import GenerationFailed
from shoal.kernels.sampling.sample_token import sample_code, sample_semantic
from shoal.model.frame import FrameState
from shoal.speech import SamplingParams
from shoal.tools.bench.busy import gpu_busy_fraction
from shoal.tools.bench.document import Document, new_document
from shoal.tools.bench.machine import machine
from shoal.tools.bench.memory import module_bytes
from shoal.tools.bench.report.tables import tables

TEXT = "The harbour was quiet in the morning, and the boats lay still on the water."
FRAMES = 64  # frames of the request that the shares refer to
SECONDS = 0.3  # time spent on measuring one part
CONTEXT = 256  # tokens in the KV cache of a timed step

TimedCall = Callable[[], object]


@dataclass(frozen=True, slots=True)
class ProfiledPart:
    """One row of the table. `milliseconds` are per request or per step of the whole batch, as `per` says."""

    name: str
    milliseconds: float
    per: str
    bytes_read: int = 0
    memory: int = 0  # bytes of weights and caches that it holds
    temporary: int = 0  # bytes that one call allocates at most; on a GPU only
    gpu_busy: float | None = None  # share of its time in which a kernel runs

    def of_request(self, voices: int) -> float:
        """Return the milliseconds that one request of FRAMES frames spends in this part."""
        return self.milliseconds if self.per == "request" else self.milliseconds * FRAMES / voices

    def bandwidth(self) -> float:
        """Return bytes per second."""
        return self.bytes_read / self.milliseconds * 1e3 if self.milliseconds else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the fields of the document."""
        fields = asdict(self)
        return {"seconds": fields.pop("milliseconds") / 1e3, **fields}


@dataclass(frozen=True, slots=True)
class RequestProfile:
    model: str
    machine: dict[str, str | int]
    backend: str
    voices: int
    ceiling: float  # memory bandwidth of a copy in bytes per second, reads plus writes
    parts: list[ProfiledPart]
    steps: dict[int, float]  # milliseconds of a step by batch size
    beside: bool = False  # the codec runs concurrently with the model

    @property
    def bottlenecks(self) -> list[ProfiledPart]:
        return sorted(self.parts, key=lambda part: part.of_request(self.voices), reverse=True)[:3]

    def document(self) -> Document:
        """Return the result as a document for `shoal report`."""
        document = new_document("profile", dict(self.machine), {"model": self.model, "voices": self.voices})
        run = {
            "name": self.model,
            "backend": self.backend,
            "voices": self.voices,
            "frames": FRAMES,
            "ceiling": self.ceiling,
            "overlap": self.beside,
            "parts": [part.figures() for part in self.parts],
            "steps": [{"voices": size, "seconds": each / 1e3} for size, each in self.steps.items()],
            "bottlenecks": [part.name for part in self.bottlenecks],
        }
        return document | {"runs": [run], "complete": True}

    def as_json(self) -> str:
        return json.dumps(self.document())


def run_profile(model: str, *, device: str = "auto", voices: int = 1, quantize: str | None = None) -> RequestProfile:
    """Load a model and time its parts at batch size `voices`. Raises the errors of loading.

    Without `quantize` the weights keep their stored dtype.
    """
    where = choose_device(device)
    dtype = choose_dtype(None, where)
    choose = weight_chooser(EngineConfig(quantize=quantize), torch.device(where), dtype) if quantize else None
    checkpoint = resolve_model(model, dtype=dtype, device=where, encoder=False, quantize=choose)
    # Not `build_core`, which reserves all memory for the KV cache: some parts are built twice to be timed.
    core = EngineCore(checkpoint, EngineConfig(slots=voices, guard=False))
    core.warm_up()
    bench = parts_of(core)
    parts = _parts(core, bench, voices, where)
    beside = core.audio_decoder.overlap
    if not beside:  # with overlap a step takes less than the sum of its parts, so host time is unknown
        known = sum(part.milliseconds for part in parts if part.per == "step")
        parts.append(ProfiledPart("host gaps", max(0.0, _engine_step(core, voices) - known), "step"))
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size <= voices]
    steps = {size: _time(bench.step(size), where) for size in sizes}
    backend = core.runner.backend
    return RequestProfile(
        model, machine(checkpoint.model.device), backend, voices, _ceiling(where), parts, steps, beside
    )


def _parts(core: EngineCore, bench: "PlainParts", voices: int, where: str) -> list[ProfiledPart]:
    """Time all parts but the host's share of a step."""
    checkpoint = core.checkpoint
    step = _profiled("step", "step", bench.step(voices), where)
    codec = _profiled("codec", "step", bench.codec(voices), where)
    core.audio_decoder._decoder.reset(list(range(voices)))  # discards the frames that were timed
    codec_bytes = module_bytes(checkpoint.codec.decoder) + module_bytes(checkpoint.codec.quantizer.post_module)
    return [
        ProfiledPart("tokenize", _time(lambda: build_turns(TEXT, None, checkpoint), "cpu"), "request"),
        _profiled("prefill", "request", bench.prefill(), where),
        *_model_parts(core, bench, step, voices, where),
        replace(codec, bytes_read=codec_bytes, memory=module_bytes(checkpoint.codec)),
        ProfiledPart("encode", _time(lambda: _encode(checkpoint.codec.config.sample_rate), "cpu"), "request"),
    ]


def _model_parts(
    core: EngineCore, bench: "PlainParts", step: ProfiledPart, voices: int, where: str
) -> list[ProfiledPart]:
    """Divide a timed step of the model into its parts, or return it whole if the backend cannot be divided."""
    model, head, kv = core.checkpoint.model, module_bytes(core.runner._head), core.host_cache.kv.nbytes
    slow_bytes, slow_memory = module_bytes(model.slow.layers) + head, module_bytes(model.slow) + head + kv
    fast_bytes, fast_memory = _fast_bytes(core), module_bytes(model.fast)
    if isinstance(bench, WholeSteps):
        return [replace(step, name="frame", bytes_read=slow_bytes + fast_bytes, memory=slow_memory + fast_memory)]
    slow = _profiled("slow step", "step", bench.slow(voices), where)
    sampling = _profiled("sampling", "step", bench.sampling(voices), where)
    fast = replace(step, name="fast steps", milliseconds=_remainder(step, slow, sampling))
    return [
        replace(slow, bytes_read=slow_bytes, memory=slow_memory),
        replace(fast, bytes_read=fast_bytes, memory=fast_memory),
        sampling,
    ]


def _remainder(step: ProfiledPart, *others: ProfiledPart) -> float:
    return max(0.0, step.milliseconds - sum(part.milliseconds for part in others))


def _profiled(name: str, per: str, work: TimedCall, device: str) -> ProfiledPart:
    """Time a call; on a GPU also measure the memory that it allocates and the share of its time with a kernel."""
    milliseconds = _time(work, device)
    if not device.startswith("cuda"):
        return ProfiledPart(name, milliseconds, per)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    _wait(device)
    temporary = torch.cuda.max_memory_allocated() - before
    return ProfiledPart(name, milliseconds, per, temporary=temporary, gpu_busy=gpu_busy_fraction(work, 10))


def parts_of(core: EngineCore) -> "PlainParts":
    """Return the separately timed parts for the backend of the engine, which must be idle."""
    launcher, eager = core.runner.runner.launcher, core.runner._eager
    if isinstance(launcher, FusedRunner):
        return GraphParts(core, launcher)
    return PlainParts(core, eager) if launcher is eager else WholeSteps(core, eager)


def step_seconds(core: EngineCore, voices: int) -> float:
    """Return the seconds of one step of `voices` sequences with a context of 256 tokens, without the codec."""
    seconds = _time(parts_of(core).step(voices), str(core.checkpoint.model.device)) / 1e3
    core.pool.clear_cache()  # the step has overwritten cached blocks
    return seconds


class PlainParts:
    """Parts of a step with plain PyTorch operators."""

    def __init__(self, core: EngineCore, runner: EagerRunner) -> None:
        self.core, self.runner = core, runner
        self.model = core.checkpoint.model
        self._ids = count()

    def step(self, voices: int) -> TimedCall:
        batch = self._decodes(voices)
        return lambda: self.runner.launch(batch).wait()

    def slow(self, voices: int) -> TimedCall:
        batch, runner = self._decodes(voices), self.runner

        def work() -> None:
            with torch.inference_mode():
                tokens, positions, where = runner._tokens(batch)
                runner.kv.begin_pass(runner._metadata(batch, where))
                self.model.slow(tokens, positions, runner.kv)

        return work

    def sampling(self, voices: int) -> TimedCall:
        config, decoder = self.model.config, self.runner.decoder
        logits = torch.randn(voices, len(decoder.head.ids), dtype=self.model.dtype, device=self.model.device)
        codes = logits[:, : config.residual_size].contiguous()

        def work() -> None:
            with torch.inference_mode():
                state = self._state(voices)
                decoder.sample_semantic(logits, state)
                noise = decoder.noise(state.settings.seed, state.frame, 1, config.residual_size)
                for codebook in range(1, config.num_codebooks):
                    decoder._sample_code(codes, codebook, state, noise)

        return work

    def codec(self, voices: int) -> TimedCall:
        """Return a codec call for one frame of every sequence."""
        box = self.core.audio_decoder
        codes = np.zeros((voices, box.codec.config.num_codebooks, 1), np.int64)

        return lambda: box._run(codes, list(range(voices)))()

    def prefill(self) -> TimedCall:
        opening = build_turns(TEXT, None, self.core.checkpoint)[0].prompt
        sequence = self._sequence(0, opening)
        batch = Batch([Prefill(sequence, 0, 0, len(opening), samples_frame=True)])
        return lambda: self.core.runner.runner.launcher.launch(batch).wait()

    def _decodes(self, voices: int) -> Batch:
        blank = np.zeros((CONTEXT, 1 + self.model.config.num_codebooks), np.int32)
        sequences = [self._sequence(slot, blank) for slot in range(voices)]
        return Batch([], sequences, [0] * voices)

    def _sequence(self, slot: int, tokens: np.ndarray) -> Sequence:
        """Return a sequence in a slot, with arbitrary blocks: only the time matters."""
        sequence = Sequence.start(next(self._ids), tokens, SamplingParams(), len(tokens) + FRAMES)
        sequence.slot, sequence.computed = slot, len(tokens)
        return sequence

    def _state(self, voices: int) -> FrameState:
        slots = torch.arange(voices, device=self.model.device)
        return self.runner.slots.rows(slots, penalised=True)


class WholeSteps(PlainParts):
    """Steps of a backend that computes a whole frame in one call, such as `native`."""

    def step(self, voices: int) -> TimedCall:
        batch, launcher = self._decodes(voices), self.core.runner.runner.launcher
        return lambda: launcher.launch(batch).wait()


class GraphParts(PlainParts):
    """Parts of a step with the fused kernels, each captured in its own CUDA graph."""

    def __init__(self, core: EngineCore, runner: FusedRunner) -> None:
        super().__init__(core, runner.eager)
        self.fused = runner

    def step(self, voices: int) -> TimedCall:
        self._frame(voices)
        rows = next(size for size in self.fused._frames if size >= voices)
        captured = self.fused._frames[rows]
        return captured._graph.replay if captured._graph is not None else captured.workload.run

    def slow(self, voices: int) -> TimedCall:
        return _captured(self._frame(voices).slow)

    def sampling(self, voices: int) -> TimedCall:
        frame, config = self._frame(voices), self.model.config
        count = len(frame.slots)
        logits = torch.randn(count, frame._ids.count + 1, dtype=self.model.dtype, device=self.model.device)
        codes, table = logits[:, : config.residual_size].contiguous(), self.model.fast.embeddings.weight
        x = frame._first_inputs[:count]

        def work() -> None:
            ras, penalty = config.family.uses_ras, config.family.uses_penalty
            sample_semantic(logits, frame.slots, frame._memory, frame._ids, frame.tokens, table, x, ras)
            for codebook in range(1, config.num_codebooks):
                sample_code(codes, frame.slots, frame._memory, codebook, frame.tokens, table, x, penalty)

        return _captured(work)

    def _frame(self, voices: int) -> FusedFrame:
        rows = next(size for size in self.fused._frames if size >= voices)
        captured = self.fused._frames[rows]
        inputs = captured.workload.padding()
        inputs[0, :voices], inputs[1, :voices] = np.arange(voices), CONTEXT - 1
        captured.host_buffer.upload(inputs)
        # Every sequence gets its own blocks, as far as memory allows: shared ones would be read from the L2 cache.
        tables, need = self.fused._padded.copy(), self.core.pool.needed(CONTEXT)
        for slot in range(voices):
            tables[slot, :need] = np.arange(slot * need, (slot + 1) * need) % self.core.pool.count
        self.fused._tables.upload(tables)
        return captured.workload


def _captured(work: TimedCall) -> TimedCall:
    with torch.inference_mode():
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    return graph.replay


def _time(work: TimedCall, device: str) -> float:
    """Return the median milliseconds of a call, after one warm-up call."""
    work()
    _wait(device)
    times: list[float] = []
    while (sum(times) < SECONDS and len(times) < 200) or len(times) < 3:
        started = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _engine_step(core: EngineCore, voices: int) -> float:
    """Return the milliseconds per step of the whole engine with a full batch."""
    turns = build_turns(TEXT, None, core.checkpoint)
    for number in range(voices):
        core.add(Utterance(-2 - number, turns, SamplingParams(seed=number, max_frames=FRAMES)))
    started, before = time.perf_counter(), core.stats.steps
    while not core.idle:
        for event in core.step():
            if event.error is not None:
                raise GenerationFailed(f"a request of the profile failed: {event.error}") from event.error
    return (time.perf_counter() - started) / max(1, core.stats.steps - before) * 1e3


def _encode(sample_rate: int) -> None:
    encode_file(np.zeros(sample_rate, np.float32), "wav", sample_rate)


def _ceiling(device: str) -> float:
    source = torch.empty(1 << (31 if device.startswith("cuda") else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _time(lambda: target.copy_(source), device) * 1e3


def _fast_bytes(core: EngineCore) -> int:
    """Return the bytes read per step: the fast transformer runs once for the first two positions of a frame, then
    once per codebook.
    """
    config, fast = core.checkpoint.model.config, core.checkpoint.model.fast
    head = config.residual_size * config.fast.dim * core.checkpoint.model.dtype.itemsize
    passes = config.num_codebooks - 1 if core.runner.backend != "eager" else config.num_codebooks
    return passes * module_bytes(fast.layers) + (config.num_codebooks - 1) * head


def _whole(profile: RequestProfile) -> str:
    """Describe the total that the shares refer to."""
    request = f"a request of {FRAMES} frames"
    return f"the work of {request}; codec and model run concurrently" if profile.beside else request


def render(profile: RequestProfile) -> RenderableType:
    host, total = profile.machine, sum(part.of_request(profile.voices) for part in profile.parts)
    heading = (
        f"{profile.model} on {host['device']}, {profile.backend}, batch size {profile.voices}; torch {host['torch']}. "
        f"Share: of {_whole(profile)}. Memory: {profile.ceiling / 1e9:,.0f} GB/s."
    )
    names = ", ".join(f"{part.name} ({part.of_request(profile.voices) / total:.0%})" for part in profile.bottlenecks)
    parts, *sizes = (sheet.rich() for sheet in tables(profile.document()))
    return Group(heading, parts, f"bottlenecks: {names}", *sizes)
