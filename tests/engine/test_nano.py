"""The bundled model in the engine: same output alone and in a batch, and it stops at the end of the text."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import shoal
from shoal.audio.guard import check_speech
from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.resolve import resolve_model
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.engine import Engine
from shoal.engine.kv_cache import PagedKV
from shoal.engine.load import voice_cache
from shoal.engine.preprocess import build_turns
from shoal.speech import FinishReason, SpeechRequest
from tests.engine.oracle import Oracle
from tests.engine.test_core import TimedRequest, check
from tests.nano import OTHER_VOICE, VOICES

SENTENCES = (
    "Good morning.", "The kettle is on.", "Nobody was at home.", "It rained all day.", "We met in June.", "Yes.",
    "Take the second street on the left.", "He owes me ten pounds.", "Why not?",
)  # fmt: skip


@pytest.fixture(scope="module")
def nano() -> Checkpoint:
    return resolve_model("nano", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def alone(nano: Checkpoint) -> Oracle:
    return Oracle(nano, nano.profile.context_tokens)


@pytest.fixture(scope="module")
def program(nano: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> list[TimedRequest]:
    """Return nine sentences of many lengths, with eight voices and without; three arrive per step."""
    voices = voice_cache(nano, tmp_path_factory.mktemp("voices"))
    known = [None, *map(voices.resolve_blocking, VOICES[:8])]
    return [
        TimedRequest(
            build_turns(sentence, known[number % len(known)], nano),
            replace(nano.profile.sampling, seed=number, max_frames=3 + number // 2),
            at=number // 3,
        )
        for number, sentence in enumerate(SENTENCES)
    ]


def config(nano: Checkpoint, **changes: object) -> EngineConfig:
    base = EngineConfig(slots=8, context_tokens=nano.profile.context_tokens, guard=False)
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (9, {}),
        (9, {"prefix_cache": False}),
        (5, {"token_budget": 7}),
        (9, {"token_budget": 37, "block_size": 5, "first_chunk_frames": 1}),
    ],
    ids=str,
)
def test_concurrent_sentences_equal_generate(
    nano: Checkpoint, alone: Oracle, program: list[TimedRequest], count: int, changes: dict[str, object]
) -> None:
    check(EngineCore(nano, config(nano, **changes)), program[:count], alone)


def test_output_is_the_same_after_preemption(nano: Checkpoint, alone: Oracle) -> None:
    sampling = replace(nano.profile.sampling, max_frames=12)
    program = [
        TimedRequest(build_turns(text, None, nano), replace(sampling, seed=n)) for n, text in enumerate(SENTENCES[:6])
    ]
    longest = max(len(request.turns[0].prompt) for request in program) + sampling.max_frames
    memory = (-(-longest // 4) + 4) * PagedKV.bytes_per_block(nano.model.config.slow, 4, nano.model.dtype)
    core = EngineCore(nano, config(nano, block_size=4, kv_bytes=memory))
    check(core, program, alone)
    assert core.scheduler.stats.preempted > 0


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with shoal.load("nano") as engine:
        yield engine


@pytest.mark.parametrize(
    "text", ["Hello.", "No", "On May 3rd, 2024, Dr. Smith paid $12.50 for 3 lb of apples.", "What?! (Really...)"]
)
def test_nano_speaks_a_text_and_stops(engine: Engine, text: str) -> None:
    said = engine.speak(text)
    assert said.finish is FinishReason.STOP
    assert not check_speech(said.samples, said.sample_rate, text)


def test_a_request_without_a_voice_gets_the_default_voice(engine: Engine, nano: Checkpoint) -> None:
    unnamed, named = engine.speak("Good evening."), engine.speak("Good evening.", voice=nano.profile.voice)
    assert np.array_equal(unnamed.samples, named.samples)
    assert not np.array_equal(unnamed.codes, engine.speak("Good evening.", voice=OTHER_VOICE).codes)


def test_sentences_are_joined_without_a_click(engine: Engine) -> None:
    text = "The river was high that week. Nobody crossed the old bridge. It rained."  # one turn each
    said = engine.speak(text)
    steps = np.abs(np.diff(said.samples))
    # A jump larger than any inside a sentence would be audible as a click between two of them.
    alone = engine.speak("The river was high that week.")
    assert said.finish is FinishReason.STOP
    assert steps.max() < 2 * np.abs(np.diff(alone.samples)).max()


def test_every_short_sentence_is_spoken(engine: Engine) -> None:
    voice = OTHER_VOICE
    sentences = ("Stop!", "Who goes there?", "A friend, I hope.", "Good.")
    chosen = engine.service.resolve_blocking(SpeechRequest("", voice=voice))
    turns = build_turns(" ".join(sentences), chosen, engine.service.core.checkpoint)
    assert [turn.text for turn in turns] == ["Stop! Who goes there?", "A friend, I hope.", "Good."]
    said = engine.speak(" ".join(sentences), voice=voice, timestamps=True)
    assert said.finish is FinishReason.STOP
    assert [word.text for word in said.words if word.end > word.start] == " ".join(sentences).split()
    # Each turn takes at least its shortest plausible time, and a pause around it.
    assert said.codes.shape[1] >= sum(turn.min_frames + 4 for turn in turns)
