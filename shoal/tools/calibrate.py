"""`shoal align calibrate`: find the attention heads of a model that follow the text it speaks.

The model speaks sentences while the weights of all heads are read. A head is good when a monotonic path through the
text stays where the head attends, and when that path reaches every word.
"""

import json
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.checkpoint.find import RANDOM_PREFIX
from shoal.checkpoint.format.profile import PROFILE_FILE, Alignment
from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.resolve import resolve_model
from shoal.config import EngineConfig
from shoal.engine.engine import Engine
from shoal.engine.load import build_core, choose_device, choose_dtype, voice_cache, weight_chooser
from shoal.engine.output.word_times import MonotonicPath, WordTimes
from shoal.engine.utterance import Utterance
from shoal.errors import GenerationFailed, InvalidRequest
from shoal.kernels.word_times.text_path_numpy import path_origins
from shoal.model.linear import to_column_major
from shoal.paths import atomic_write, output_errors
from shoal.speech import AudioChunk, Sampling, SpeechRequest
from shoal.tools.bench.texts import sentence
from shoal.voices.store import VoiceStore, voice_directory

# Below this quality word times would often be wrong, and a request for them is refused.
MIN_QUALITY = 0.5
MAX_HEADS = 4
# Number of heads that are judged by a path: those whose mean position advances most evenly.
CANDIDATES = 24
# Minimum improvement of the quality for which another head is added.
MIN_GAIN = 0.002
# Distance between the numbers of spoken sentences, so that all their words differ.
STRIDE = 997
MAX_FRAMES = 400

Weights = NDArray[np.float32]  # [heads, frames, tokens] of a sentence
Pair = tuple[int, int]  # layer and head
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SpokenSentence:
    """Weights of every head while one sentence was spoken, and the tokens [first, last) of its words."""

    weights: Weights
    words: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class HeadQuality:
    layer: int
    head: int
    quality: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Chosen heads with their combined quality, and the best single heads."""

    alignment: Alignment
    best: tuple[HeadQuality, ...]
    sentences: int

    @property
    def accepted(self) -> bool:
        return bool(self.alignment.heads)


@dataclass(slots=True)
class WeightRecorder(WordTimes):
    """Keeps the weights of all frames instead of finding words."""

    weights: dict[int, list[Weights]] = field(default_factory=dict)  # [heads, tokens] per frame, by turn

    def feed(self, turn: int, weights: NDArray[Any], tokens: int) -> None:
        self.weights.setdefault(turn, []).append(weights.copy())

    def restart_turn(self, turn: int) -> None:
        self.weights.pop(turn, None)

    def restart(self) -> None:
        self.weights.clear()


def calibrate(
    model: str, *, device: str = "auto", sentences: int = 24, lead_frames: float = Alignment.lead_frames
) -> Calibration:
    """Speak sentences in the model's voices and return the heads that follow them best.

    Without heads of sufficient quality the alignment has none. Raises InvalidRequest if no sentence could be spoken.
    """
    with _engine(model, device) as engine:
        spoken = _speak(engine, sentences)
        config = engine.service.core.checkpoint.model.config.slow
    pairs = list(product(range(config.n_layer), range(config.n_head)))
    if not spoken:
        raise InvalidRequest(f"{model}: no sentence could be spoken, so no attention was read")
    return replace(choose_heads(spoken, pairs, lead_frames), sentences=len(spoken))


@contextmanager
def _engine(model: str, device: str) -> Iterator[Engine]:
    """Yield an engine that reads the weights of all heads."""
    device = choose_device(device)
    config, dtype = EngineConfig(), choose_dtype(None, device)
    chooser = weight_chooser(config, torch.device(device), dtype)
    checkpoint = with_all_heads(resolve_model(model, dtype=dtype, device=device, quantize=chooser))
    if device == "cpu":
        to_column_major(checkpoint.model)
    guard = not model.startswith(RANDOM_PREFIX)
    core = build_core(checkpoint, replace(config, guard=guard), record_weights=True)
    with Engine(core, voice_cache(checkpoint, voice_directory(), config)) as engine:
        yield engine


def with_all_heads(checkpoint: Checkpoint) -> Checkpoint:
    slow = checkpoint.model.config.slow
    heads = tuple(product(range(slow.n_layer), range(slow.n_head)))
    return replace(checkpoint, profile=replace(checkpoint.profile, alignment=Alignment(heads)))


def _speak(engine: Engine, count: int) -> list[SpokenSentence]:
    """Speak `count` sentences in the built-in voices in turn, several at a time; those that fail are left out."""
    checkpoint = engine.service.core.checkpoint
    builtin = VoiceStore(voice_directory(), checkpoint.builtin_voices, sample_rate=engine.sample_rate)
    voices: list[str | None] = [*filter(builtin.is_builtin, builtin.names())] or [None]
    numbers, found = iter(range(count)), list[SpokenSentence]()
    while group := list(islice(numbers, engine.service.core.config.slots)):
        started = [_start(engine, number, voices[number % len(voices)]) for number in group]
        found += [spoken for utterance, chunks in started for spoken in _finish(utterance, chunks)]
    return found


def _start(engine: Engine, number: int, voice: str | None) -> tuple[Utterance, Generator[AudioChunk, None, None]]:
    service = engine.service
    sampling = Sampling(seed=number, max_frames=MAX_FRAMES)
    request = SpeechRequest(sentence(number * STRIDE), voice=voice, sampling=sampling, whole=True, timestamps=True)
    utterance = service.build_utterance(request, service.resolve_blocking(request), None)
    assert utterance.words is not None, "the request has timestamps"
    utterance.words = WeightRecorder(utterance.words.plan, utterance.words.frame_seconds)
    return utterance, service.thread.speak(utterance)


def _finish(utterance: Utterance, chunks: Iterable[AudioChunk]) -> list[SpokenSentence]:
    """Return the turns of an utterance; none if it failed."""
    try:
        for _ in chunks:
            pass
    except GenerationFailed:
        return []
    assert isinstance(utterance.words, WeightRecorder)
    recorded = utterance.words.weights.items()
    tokens = ((turn, utterance.turns[turn].text_tokens, weights) for turn, weights in recorded)
    return [SpokenSentence(np.stack(weights, axis=1), found.words) for _, found, weights in tokens if found is not None]


def choose_heads(spoken: Sequence[SpokenSentence], pairs: Sequence[Pair], lead_frames: float) -> Calibration:
    """Return the heads that together follow the text best: the best one, and others as long as they improve it."""
    steady = sorted(range(len(pairs)), key=lambda index: -steadiness(spoken, index))[:CANDIDATES]
    ranked = sorted(((quality(spoken, [index]), index) for index in steady), reverse=True)
    reached, chosen = ranked[0][0], [ranked[0][1]]
    for _, index in ranked[1 : 2 * MAX_HEADS]:
        together = quality(spoken, [*chosen, index])
        if together > reached + MIN_GAIN and len(chosen) < MAX_HEADS:
            reached, chosen = together, [*chosen, index]
    heads = tuple(sorted(pairs[index] for index in chosen)) if reached >= MIN_QUALITY else ()
    best = tuple(HeadQuality(*pairs[index], round(each, 4)) for each, index in ranked[: 2 * MAX_HEADS])
    return Calibration(Alignment(heads, round(reached, 4), lead_frames), best, len(spoken))


def steadiness(spoken: Sequence[SpokenSentence], head: int) -> float:
    """Return the mean correlation of a head's mean position with time."""
    found = []
    for each in spoken:
        weights = each.weights[head]
        positions = weights.astype(np.float64) @ np.arange(weights.shape[1])
        moves = positions.std() > 1e-6
        found.append(float(np.corrcoef(positions, np.arange(len(positions)))[0, 1]) if moves else 0.0)
    return sum(found) / len(found)


def quality(spoken: Sequence[SpokenSentence], heads: Sequence[int]) -> float:
    """Return the share of attention on the word that is spoken, times the share of words that the path reaches."""
    return sum(_quality(each.weights[list(heads)].mean(0), each.words) for each in spoken) / len(spoken)


def _quality(weights: Weights, words: Sequence[Span]) -> float:
    path = MonotonicPath(weights.shape[1])
    for frame in path_origins(weights[:, None]):
        path.feed(frame)
    # A mark or a space belongs to the word before it.
    owners = np.searchsorted([first for first, _ in words], np.arange(weights.shape[1]), side="right")
    on_path = owners[path.tokens()]
    focus = (weights * (owners == on_path[:, None])).sum(1).mean()
    reached = len(set(on_path.tolist()) - {0}) / len(words)
    return float(focus * reached)


def store(calibration: Calibration, directory: Path) -> Path:
    """Write the alignment to the model's profile and return its path. Raises OutputError."""
    path = directory / PROFILE_FILE
    with output_errors(path):
        document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        document["alignment"] = asdict(calibration.alignment)
        atomic_write(path, (json.dumps(document, indent=1) + "\n").encode())
    return path
