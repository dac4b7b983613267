"""`shoal bench scaling`: growth of the time of every part with its length, compared with theory.

Parts run one request with plain operators and without the engine, so that a curve shows the algorithm only.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shoal.codec.streaming import StreamingDecoder
from shoal.engine.load import choose_device, choose_dtype
from shoal.model.cache import DenseKVCache, NoKVCache
from shoal.model.frame import FrameSampler, FrameState
from shoal.model.sampling import SamplingTensors
from shoal.model.slow import Head
from shoal.speech import SamplingParams
from shoal.tools.bench.document import INTERRUPTS, Document, new_document
from shoal.tools.bench.machine import machine
from shoal.tools.bench.progress import progress_bar

if TYPE_CHECKING:
    from shoal.checkpoint.load import Checkpoint

CHUNK = 8  # frames per chunk of streamed audio
LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
SHORT_LENGTHS = (16, 32, 64, 128, 256)  # for parts with quadratic cost
BATCHES = (1, 2, 4, 8, 16, 32)

Workload = Callable[[], object]


@dataclass(frozen=True, slots=True)
class ScalingCase:
    """One curve. `prepare` sets up a size, without being measured, and returns the function to measure."""

    name: str
    law: str
    expected: float  # asymptotic exponent
    measure: str
    unit: str
    sizes: tuple[int, ...]
    prepare: Callable[[int], Workload]


def run_scaling(
    model: str, *, device: str = "auto", samples: int = 5, quick: bool = False, progress: bool = True
) -> Document:
    """Measure all parts; an interrupt keeps the finished ones. Raises the errors of loading the model."""
    from shoal.checkpoint.resolve import resolve_model

    where = choose_device(device)
    document = new_document(
        "scaling", dict(machine(torch.device(where))), {"model": model, "device": where, "samples": samples}
    )
    checkpoint = resolve_model(model, dtype=choose_dtype(None, where), device=where, encoder=False)
    parts = list(parts_of(checkpoint))
    with progress_bar(len(parts), shown=progress) as bar:
        try:
            for part in parts:
                bar.describe(part.name)
                document["runs"].append(curve(part, samples, torch.device(where), quick=quick))
                bar.advance()
            document["complete"] = True
        except INTERRUPTS:
            pass
    return document


def curve(part: ScalingCase, samples: int, device: torch.device, *, quick: bool = False) -> dict[str, Any]:
    points: list[dict[str, Any]] = []
    for size in part.sizes[:3] if quick else part.sizes:
        work = part.prepare(size)
        seconds = [_timed(work, device) for _ in range(samples + 1)][1:]
        points.append({"size": size, "seconds": seconds, "median": float(np.median(seconds))})
    exponent, factor = fit([point["size"] for point in points], [point["median"] for point in points])
    return {
        "name": part.name,
        "unit": part.unit,
        "measure": part.measure,
        "law": part.law,
        "expected": part.expected,
        "exponent": exponent,
        "factor": factor,
        "points": points,
    }


def fit(sizes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Fit factor * size ** exponent to the larger half of the sizes, where fixed costs matter least."""
    larger = slice(-max(2, (len(sizes) + 1) // 2), None)
    exponent, offset = np.polyfit(np.log(sizes[larger]), np.log(seconds[larger]), 1)
    return float(exponent), float(np.exp(offset))


def parts_of(checkpoint: "Checkpoint") -> Iterator[ScalingCase]:
    bench = ScalingWorkloads(checkpoint)
    lengths = tuple(size for size in LENGTHS if size <= bench.longest)
    yield from _transformer_cases(bench, lengths)
    yield from _codec_cases(bench, lengths)
    law = "less than n: weights are read once"
    yield ScalingCase("One step of a batch", law, 1.0, "seconds per step", "sequences", BATCHES, bench.batch_step)


def _transformer_cases(bench: "ScalingWorkloads", lengths: tuple[int, ...]) -> Iterator[ScalingCase]:
    short = tuple(size for size in SHORT_LENGTHS if size <= bench.longest)
    law = "n, plus n² for attention"
    yield ScalingCase("Prefill", law, 1.0, "seconds per prompt", "prompt tokens", lengths, bench.prefill)
    name, unit = "One frame with KV cache", "tokens before it"
    yield ScalingCase(name, "1, plus n for attention", 0.0, "seconds per frame", unit, lengths, bench.step)
    yield ScalingCase("All frames, with KV cache", law, 1.0, "seconds", "frames", short, bench.cached_speech)
    name, law = "All frames, without KV cache", "n², plus n³ for attention"
    yield ScalingCase(name, law, 2.0, "seconds", "frames", short, bench.uncached_speech)


def _codec_cases(bench: "ScalingWorkloads", lengths: tuple[int, ...]) -> Iterator[ScalingCase]:
    short = tuple(size for size in SHORT_LENGTHS if size <= bench.longest)
    law = "n: attention has a fixed window"
    yield ScalingCase("Codec, whole utterance", law, 1.0, "seconds", "frames", lengths, bench.codec_whole)
    name, law = "Codec, one streamed chunk", "1: the past is stored per slot"
    yield ScalingCase(name, law, 0.0, "seconds per chunk", "frames before it", lengths, bench.codec_chunk)
    name = "Codec, stream decoded from the start"
    yield ScalingCase(name, "n² / chunk", 2.0, "seconds", "frames", short, bench.codec_repeated)


class ScalingWorkloads:
    """Functions of one model to be timed, by size."""

    def __init__(self, checkpoint: "Checkpoint") -> None:
        self.model, self.codec = checkpoint.model, checkpoint.codec
        self.config = self.model.config
        self.device, self.dtype = self.model.device, self.model.dtype
        self.decoder = FrameSampler(self.model, Head(self.model.slow))
        self.longest = self.config.slow.max_seq_len - 8

    def prefill(self, length: int) -> Workload:
        tokens, positions = self._tokens(length), torch.arange(length, device=self.device)
        return lambda: self.model.slow(tokens, positions, self._cache(1, length))

    def step(self, length: int) -> Workload:
        return self._frame(1, length)

    def batch_step(self, voices: int) -> Workload:
        return self._frame(voices, min(128, self.longest))

    def _frame(self, voices: int, length: int) -> Workload:
        """Return one step after `length` tokens; the cache is rewound, so that every call does the same work."""
        cache, state, tokens = self._filled(voices, length), self._state(voices), self._tokens(voices)
        positions = torch.full((voices,), length, device=self.device)

        def work() -> None:
            cache.filled = length
            self.decoder.sample(self.model.slow(tokens, positions, cache), state)

        return work

    def cached_speech(self, frames: int) -> Workload:
        """Run the slow transformer only: the fast one has no state across frames."""
        tokens, positions = self._tokens(frames), torch.arange(frames, device=self.device)

        def work() -> None:
            cache = self._cache(1, frames)
            for at in range(frames):
                self.model.slow(tokens[at : at + 1], positions[at : at + 1], cache)

        return work

    def uncached_speech(self, frames: int) -> Workload:
        """Recompute the whole prefix for every frame."""
        tokens, positions = self._tokens(frames), torch.arange(frames, device=self.device)

        def work() -> None:
            for end in range(1, frames + 1):
                self.model.slow(tokens[:end], positions[:end], NoKVCache(1))

        return work

    def codec_whole(self, frames: int) -> Workload:
        codes = self._codes(frames)
        return lambda: self.codec.decode(codes)

    def codec_chunk(self, frames: int) -> Workload:
        decoder, codes = StreamingDecoder(self.codec, 1), self._codes(CHUNK)
        for _ in range(frames // CHUNK):
            decoder.decode(codes, [0], None)
        return lambda: decoder.decode(codes, [0], None)

    def codec_repeated(self, frames: int) -> Workload:
        codes = self._codes(frames)

        def work() -> None:
            for end in range(CHUNK, frames + 1, CHUNK):
                self.codec.decode(codes[..., :end])

        return work

    def _tokens(self, count: int) -> torch.Tensor:
        tokens = torch.zeros(count, 1 + self.config.num_codebooks, dtype=torch.long, device=self.device)
        tokens[:, 0] = self.config.semantic_begin_id
        return tokens

    def _codes(self, frames: int) -> torch.Tensor:
        return torch.zeros(1, self.codec.config.num_codebooks, frames, dtype=torch.long, device=self.device)

    def _cache(self, rows: int, length: int) -> DenseKVCache:
        return DenseKVCache(self.config.slow, rows, length, self.dtype, self.device)

    def _filled(self, rows: int, length: int) -> DenseKVCache:
        """Return a cache of zeros: the time of reading it does not depend on its content."""
        cache = self._cache(rows, length + 1)
        cache.filled = length
        return cache

    def _state(self, rows: int) -> FrameState:
        return FrameState.initial(self.config, SamplingTensors.from_settings([SamplingParams()] * rows, self.device))


@torch.inference_mode()
def _timed(work: Workload, device: torch.device) -> float:
    """Return the seconds of one call: CPU time on a CPU, so that other processes do not distort it, else wall time."""
    if device.type == "cpu":
        started = time.process_time()
        work()
        return time.process_time() - started
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started
