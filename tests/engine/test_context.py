"""Requests that continue earlier ones: their turns, and the context limit."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.audio.encode import encode_file
from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.engine import Engine
from shoal.engine.load import voice_cache
from shoal.engine.preprocess import _fitting, build_turns
from shoal.engine.utterance import TURN_STRIDE
from shoal.speech import AudioChunk, Sampling, SpeechRequest, SpokenTurn
from shoal.voices.store import VoiceStore
from shoal.voices.voice import Voice, dialogue_voice
from tests.engine.oracle import Oracle

PLAIN = EngineConfig(slots=4, guard=False)
SEED = 5
TEXTS = ("One thing.", "Another thing.", "A third thing.")


def spoken(engine: Engine, text: str, voice: Voice | None, **fields: object) -> list[AudioChunk]:
    return list(engine.service.speak_blocking(SpeechRequest(text, **fields), voice))  # type: ignore[arg-type]


def sampling(number: int) -> Sampling:
    """Return the sampling that turn `number` of one long text has."""
    return Sampling(seed=(SEED + number * TURN_STRIDE) % 2**64, max_frames=6)


@pytest.mark.parametrize("with_voice", [False, True])
def test_requests_with_a_context_equal_the_turns_of_one_text(
    either: Oracle, voice: Voice, with_voice: bool, tmp_path: Path
) -> None:
    speaker = voice if with_voice else None
    turns = build_turns(" ".join(TEXTS), speaker, either.checkpoint, chunk_bytes=16)
    assert [turn.text for turn in turns] == list(TEXTS)
    expected = either.speak(turns, sampling(0).resolve(either.checkpoint.profile.sampling))
    context: tuple[SpokenTurn, ...] | None = ()
    with Engine(EngineCore(either.checkpoint, PLAIN), voice_cache(either.checkpoint, tmp_path)) as engine:
        for number, text in enumerate(TEXTS):
            context = spoken(engine, text, speaker, sampling=sampling(number), context=context)[-1].context
            assert context is not None
        reused = engine.service.core.pool.stats
    assert [turn.text for turn in context] == list(TEXTS)
    assert np.array_equal(np.concatenate([turn.codes for turn in context], axis=1), expected.codes)
    assert reused.hits > 0, "the turns before are in the KV cache"


def test_a_request_without_a_context_returns_none(tiny: Checkpoint, tmp_path: Path) -> None:
    with Engine(EngineCore(tiny, PLAIN), voice_cache(tiny, tmp_path)) as engine:
        assert spoken(engine, "Hello.", None, sampling=sampling(0))[-1].context is None


def test_a_context_that_no_longer_fits_is_shortened_and_the_first_turn_kept(tiny: Checkpoint, tmp_path: Path) -> None:
    limit = 150
    context: tuple[SpokenTurn, ...] | None = ()
    lengths = []
    with Engine(EngineCore(tiny, replace(PLAIN, context_tokens=limit)), voice_cache(tiny, tmp_path)) as engine:
        for number in range(12):
            text = f"Sentence {number}."
            [*_, last] = spoken(engine, text, None, sampling=sampling(number), context=context)
            context = last.context
            assert context is not None
            assert context[0].text == "Sentence 0."
            assert context[-1].text == text
            lengths.append(len(context))
    assert max(lengths) < 12
    assert any(after < before for before, after in pairwise(lengths))


def test_turns_can_be_spoken_one_by_one_without_context(oracle: Oracle, tmp_path: Path) -> None:
    turns = build_turns(" ".join(TEXTS[:2]), None, oracle.checkpoint, chunk_bytes=16)
    defaults = oracle.checkpoint.profile.sampling
    alone = [oracle.speak([turn], sampling(number).resolve(defaults)) for number, turn in enumerate(turns)]
    with Engine(EngineCore(oracle.checkpoint, PLAIN), voice_cache(oracle.checkpoint, tmp_path)) as engine:
        request = {"sampling": sampling(0), "chunk_bytes": 16, "carry_turns": False, "context": ()}
        context = spoken(engine, " ".join(TEXTS[:2]), None, **request)[-1].context
    assert context is not None
    assert [np.array_equal(turn.codes, each.codes) for turn, each in zip(context, alone, strict=True)] == [True, True]


def test_a_request_chooses_its_first_chunk(tiny: Checkpoint, tmp_path: Path) -> None:
    frame = tiny.codec.config.frame_length
    with Engine(EngineCore(tiny, PLAIN), voice_cache(tiny, tmp_path)) as engine:
        for wanted, first in ((None, 2), (1, 1), (5, 5), (100, 12)):
            request = {"sampling": Sampling(seed=1, max_frames=12), "first_chunk_frames": wanted}
            assert len(spoken(engine, "Hello.", None, **request)[0].samples) == first * frame


TURN = SpokenTurn("a", np.zeros((10, 1), np.int32))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(-5, 300), st.booleans())
def test_the_turns_kept_fit_and_are_the_most_recent(sizes: list[int], space: int, keep_first: bool) -> None:
    context = [replace(TURN, text=str(number)) for number in range(len(sizes))]
    kept = [int(turn.text) for turn in _fitting(context, sizes, space, keep_first=keep_first)]
    assert sum(sizes[number] for number in kept) <= max(space, 0)
    if sum(sizes) <= space:
        assert len(kept) == len(sizes)
    recent = [number for number in kept if number or not keep_first]
    assert recent == list(range(len(sizes) - len(recent), len(sizes)))


def test_the_speakers_of_a_dialogue_have_their_own_stored_voices(tiny_s2: Checkpoint, tmp_path: Path) -> None:
    at = np.arange(16_000) / 16_000
    for name, pitch in (("anna", 220), ("ben", 110)):
        sound = (0.5 * np.sin(2 * np.pi * pitch * at) * np.sin(2 * np.pi * 2 * at) ** 2).astype(np.float32)
        VoiceStore(tmp_path).add(name, encode_file(sound, "wav", 16_000), f"I am {name}.")
    with Engine(EngineCore(tiny_s2, PLAIN), voice_cache(tiny_s2, tmp_path)) as engine:
        resolve = engine.service.resolve_blocking
        anna, ben = (resolve(SpeechRequest("Hello.", voice=name)) for name in ("anna", "ben"))
        both = resolve(SpeechRequest("Hello.", voices=("anna", "ben")))
        turned = resolve(SpeechRequest("Hello.", voices=("ben", "anna")))
        chunks = spoken(
            engine, "<|speaker:0|>Hi. <|speaker:1|>Yes?", None, voices=("anna", "ben"), sampling=sampling(0)
        )
    assert anna
    assert ben
    assert both
    assert turned
    assert both.key == dialogue_voice([anna, ben]).key != turned.key
    assert sum(len(chunk.samples) for chunk in chunks) > 0
