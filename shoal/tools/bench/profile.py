"""Where the time of a request goes, part by part, and how close each part is to what the memory can deliver.

The model's and the codec's parts are timed by themselves, on the rung that the engine runs on; where it runs them in
turn, what a step of the whole engine takes beyond them is the host's. Once per request: tokenize, prefill, encode. Once
per frame: all others.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor, nn

from shoal.audio.encode import encode_file
from shoal.checkpoint.resolve import resolve_model
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.execution.fused import FusedFrame
from shoal.engine.execution.graphs import FusedRunner
from shoal.engine.execution.runner import EagerRunner
from shoal.engine.load import choose_device, choose_dtype, weight_chooser
from shoal.engine.preprocess import build_turns
from shoal.engine.scheduler import Batch, Prefill
from shoal.engine.sequence import Sequence
from shoal.engine.utterance import Utterance
from shoal.errors import GenerationFailed
from shoal.kernels.sample_token import sample_code, sample_semantic
from shoal.model.frame import FrameState
from shoal.speech import SamplingParams
from shoal.tools.bench.machine import machine

TEXT = "The harbour was quiet in the morning, and the boats lay still on the water."
FRAMES = 64  # of the request that shares are counted over
SECONDS = 0.3  # spent on timing one part
CONTEXT = 256  # columns that a timed step looks back on

TimedCall = Callable[[], object]


@dataclass(frozen=True, slots=True)
class ProfiledPart:
    """One row of the table. `milliseconds` once per request, or once per step of all voices."""

    name: str
    milliseconds: float
    per: str
    bytes_read: int = 0

    def of_request(self, voices: int) -> float:
        """Milliseconds of one request."""
        return self.milliseconds if self.per == "request" else self.milliseconds * FRAMES / voices

    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bytes_read / self.milliseconds * 1e3 if self.milliseconds else 0.0


@dataclass(frozen=True, slots=True)
class RequestProfile:
    model: str
    machine: dict[str, str | int]
    rung: str
    voices: int
    ceiling: float  # bytes per second that a copy moves, read and written
    parts: list[ProfiledPart]
    steps: dict[int, float]  # milliseconds of a step by batch size
    beside: bool = False  # the codec runs beside the model, not after it

    @property
    def bottlenecks(self) -> list[ProfiledPart]:
        return sorted(self.parts, key=lambda part: part.of_request(self.voices), reverse=True)[:3]

    def as_json(self) -> str:
        return json.dumps({**asdict(self), "bottlenecks": [part.name for part in self.bottlenecks]})


def run_profile(model: str, *, device: str = "auto", voices: int = 1, quantize: str | None = None) -> RequestProfile:
    """Load a model and time its parts with so many voices at once. Raises what loading raises.

    Without `quantize` its weights are as they are stored.
    """
    where = choose_device(device)
    dtype = choose_dtype(None, where)
    choose = weight_chooser(EngineConfig(quantize=quantize), torch.device(where), dtype) if quantize else None
    checkpoint = resolve_model(model, dtype=dtype, device=where, encoder=False, quantize=choose)
    # No more memory than it takes: some parts are built a second time to be timed.
    core = EngineCore(checkpoint, EngineConfig(slots=voices, guard=False))
    core.warm_up()
    bench = parts_of(core)
    step, codec = _time(bench.step(voices), where), _time(bench.codec(voices), where)
    core.audio_decoder._decoder.reset(list(range(voices)))  # of the frames that were timed
    slow, sampling = _time(bench.slow(voices), where), _time(bench.sampling(voices), where)
    codec_bytes = _bytes(checkpoint.codec.decoder) + _bytes(checkpoint.codec.quantizer.post_module)
    parts = [
        ProfiledPart("tokenize", _time(lambda: build_turns(TEXT, None, checkpoint), "cpu"), "request"),
        ProfiledPart("prefill", _time(bench.prefill(), where), "request"),
        ProfiledPart("slow step", slow, "step", _bytes(checkpoint.model.slow.layers) + _bytes(core.runner._head)),
        ProfiledPart("fast steps", max(0.0, step - slow - sampling), "step", _fast_bytes(core)),
        ProfiledPart("sampling", sampling, "step"),
        ProfiledPart("codec", codec, "step", codec_bytes),
        ProfiledPart("encode", _time(lambda: _encode(checkpoint.codec.config.sample_rate), "cpu"), "request"),
    ]
    beside = core.audio_decoder.overlap
    if not beside:  # else a step takes less than its parts, and nobody knows what of it is the host's
        parts.append(ProfiledPart("host gaps", max(0.0, _engine_step(core, voices) - step - codec), "step"))
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size <= voices]
    steps = {size: _time(bench.step(size), where) for size in sizes}
    rung = core.runner.backend
    return RequestProfile(model, machine(checkpoint.model.device), rung, voices, _ceiling(where), parts, steps, beside)


def parts_of(core: EngineCore) -> "PlainParts":
    """What can be timed by itself on the rung that the engine is on; nobody may be speaking."""
    launcher = core.runner.runner.launcher
    return GraphParts(core, launcher) if isinstance(launcher, FusedRunner) else PlainParts(core, core.runner._eager)


def step_seconds(core: EngineCore, voices: int) -> float:
    """One frame of so many voices with a context of 256 columns each, without the codec."""
    seconds = _time(parts_of(core).step(voices), str(core.checkpoint.model.device)) / 1e3
    core.pool.clear_cache()  # the step has written over what was kept
    return seconds


class PlainParts:
    """The parts of a step with plain operators."""

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
                columns, positions, where = runner._tokens(batch)
                runner.kv.begin_pass(runner._metadata(batch, where))
                self.model.slow(columns, positions, runner.kv)

        return work

    def sampling(self, voices: int) -> TimedCall:
        config, decoder = self.model.config, self.runner.decoder
        mains = torch.randn(voices, len(decoder.head.ids), dtype=self.model.dtype, device=self.model.device)
        codes = mains[:, : config.residual_size].contiguous()

        def work() -> None:
            with torch.inference_mode():
                state = self._state(voices)
                decoder.sample_semantic(mains, state)
                noise = decoder.noise(state.settings.seed, state.frame, 1, config.residual_size)
                for codebook in range(1, config.num_codebooks):
                    decoder._sample_code(codes, codebook, state, noise)

        return work

    def codec(self, voices: int) -> TimedCall:
        """One frame of every voice."""
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

    def _sequence(self, slot: int, columns: np.ndarray) -> Sequence:
        """A sequence that stands in a slot, in whatever blocks its table names."""
        sequence = Sequence.start(next(self._ids), columns, SamplingParams(), len(columns) + FRAMES)
        sequence.slot, sequence.computed = slot, len(columns)
        return sequence

    def _state(self, voices: int) -> FrameState:
        slots = torch.arange(voices, device=self.model.device)
        return self.runner.slots.rows(slots, penalised=True)


class GraphParts(PlainParts):
    """The parts of a step as the kernels run them, each captured by itself."""

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
        mains = torch.randn(count, frame._ids.count + 1, dtype=self.model.dtype, device=self.model.device)
        codes, table = mains[:, : config.residual_size].contiguous(), self.model.fast.embeddings.weight
        x = frame._opening[:count]

        def work() -> None:
            ras, penalty = config.family.uses_ras, config.family.uses_penalty
            sample_semantic(mains, frame.slots, frame._memory, frame._ids, frame.tokens, table, x, ras)
            for codebook in range(1, config.num_codebooks):
                sample_code(codes, frame.slots, frame._memory, codebook, frame.tokens, table, x, penalty)

        return _captured(work)

    def _frame(self, voices: int) -> FusedFrame:
        rows = next(size for size in self.fused._frames if size >= voices)
        captured = self.fused._frames[rows]
        inputs = self.fused._spare_rows(rows, 2)
        inputs[0, :voices], inputs[1, :voices] = np.arange(voices), CONTEXT - 1
        captured.host_buffer.upload(inputs)
        # A context of its own for every voice, as far as there is memory: shared ones would come out of the cache.
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
    """Median milliseconds, after a first run that does not count."""
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
    """Milliseconds per step of the whole engine, with every slot speaking."""
    turns = build_turns(TEXT, None, core.checkpoint)
    for number in range(voices):
        core.add(Utterance(-2 - number, turns, SamplingParams(seed=number, max_frames=FRAMES)))
    started, before = time.perf_counter(), core.stats.steps
    while not core.idle:
        for event in core.step():
            if event.error is not None:
                raise GenerationFailed(f"the profile cannot go on: {event.error}") from event.error
    return (time.perf_counter() - started) / max(1, core.stats.steps - before) * 1e3


def _encode(sample_rate: int) -> None:
    encode_file(np.zeros(sample_rate, np.float32), "wav", sample_rate)


def _ceiling(device: str) -> float:
    source = torch.empty(1 << (31 if device.startswith("cuda") else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _time(lambda: target.copy_(source), device) * 1e3


def _bytes(module: nn.Module) -> int:
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _fast_bytes(core: EngineCore) -> int:
    """The fast transformer is read once for the first two positions of a frame, then once per codebook."""
    config, fast = core.checkpoint.model.config, core.checkpoint.model.fast
    head = config.residual_size * config.fast.dim * core.checkpoint.model.dtype.itemsize
    passes = config.num_codebooks - 1 if core.runner.backend != "eager" else config.num_codebooks
    return passes * _bytes(fast.layers) + (config.num_codebooks - 1) * head


def _whole(profile: RequestProfile) -> str:
    """What shares are shares of."""
    request = f"a request of {FRAMES} frames"
    return f"the work of {request}; the codec's is done beside the model's" if profile.beside else request


def render(profile: RequestProfile) -> RenderableType:
    told, total = profile.machine, sum(part.of_request(profile.voices) for part in profile.parts)
    heading = (
        f"{profile.model} on {told['device']}, {profile.rung}, {profile.voices} voices; torch {told['torch']}. "
        f"Share: of {_whole(profile)}. Memory: {profile.ceiling / 1e9:,.0f} GB/s."
    )
    table = Table("part", "time", "per", "share", "GB/s", "of memory", box=SIMPLE_HEAD, padding=(0, 1))
    for part in profile.parts:
        rate = part.bandwidth()
        table.add_row(
            part.name,
            f"{part.milliseconds:.3f} ms",
            part.per,
            f"{part.of_request(profile.voices) / total:.1%}",
            f"{rate / 1e9:,.0f}" if rate else "",
            f"{rate / profile.ceiling:.0%}" if rate else "",
        )
    sizes = Table("voices", "step", "frames/s", box=SIMPLE_HEAD, padding=(0, 1))
    for size, milliseconds in profile.steps.items():
        sizes.add_row(str(size), f"{milliseconds:.3f} ms", f"{size / milliseconds * 1e3:,.0f}")
    names = ", ".join(f"{part.name} ({part.of_request(profile.voices) / total:.0%})" for part in profile.bottlenecks)
    return Group(heading, table, f"most of the time: {names}", sizes)
