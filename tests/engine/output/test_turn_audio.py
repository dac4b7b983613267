"""Markup in the engine: exact silence, and the voice, rate and volume of single turns."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.engine import Engine
from shoal.engine.load import voice_cache
from shoal.engine.preprocess import plan_request, plan_turns
from shoal.engine.utterance import Turn, Utterance
from shoal.errors import MissingExtra, VoiceNotFound
from shoal.speech import Sampling, SamplingParams, SpeechRequest
from shoal.text.markup.segments import Delivery
from shoal.voices.voice import Voice
from tests.engine.oracle import Oracle, StepDriver, run_with_lag

UNGUARDED = EngineConfig(slots=2, guard=False)
SAMPLING = SamplingParams(seed=5, max_frames=7)
FRAMES = 7 * 640  # samples of a turn


def turns_of(text: str, checkpoint: Checkpoint, **voices: Voice | None) -> list[Turn]:
    plan = plan_request(SpeechRequest(text), checkpoint)
    return plan_turns(plan, {None: None, **voices}, checkpoint)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("lag", [0, 1])
def test_pauses_are_exact_samples_of_silence(oracle: Oracle, whole: bool, lag: int) -> None:
    checkpoint = oracle.checkpoint
    rate = checkpoint.codec.config.sample_rate
    turns = turns_of('One thing. [pause:123ms] Another <break time="0.5s"/> thing. [pause:1s]', checkpoint)
    core = EngineCore(checkpoint, UNGUARDED)
    run_with_lag(core, lag)
    driver = StepDriver(core)
    received = driver.add(Utterance(0, turns, SAMPLING, whole=whole, silence_before=77))
    driver.run()
    spoken = oracle.speak(turns, SAMPLING).samples
    parts = [spoken[start : start + FRAMES] for start in (0, FRAMES, 2 * FRAMES)]
    silences = [np.zeros(count, np.float32) for count in (77, round(0.123 * rate), rate // 2, rate)]
    expected = [silences[0], *(each for pair in zip(parts, silences[1:], strict=True) for each in pair)]
    assert np.allclose(received.samples, np.concatenate(expected), atol=1e-5)
    assert received.codes.shape[1] == 3 * 7


def test_a_turn_in_another_voice_starts_from_that_voice_alone(tiny: Checkpoint, voice: Voice) -> None:
    text = '<speak>One thing. <voice name="other">Another thing.</voice> <voice name="other">A third.</voice></speak>'
    turns = turns_of(text, tiny, other=voice)
    assert [turn.delivery.voice for turn in turns] == [None, "other", "other"]
    core = EngineCore(tiny, UNGUARDED)
    driver = StepDriver(core)
    received = driver.add(Utterance(0, turns, SAMPLING))
    driver.run()
    alone = Oracle(tiny, context_tokens=1).speak(turns[:2], SAMPLING).codes  # no turn continues another
    assert np.array_equal(received.codes[:, :14], alone)


@pytest.fixture(scope="module")
def engine(tiny: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    cache = voice_cache(tiny, tmp_path_factory.mktemp("voices"))
    with Engine(EngineCore(tiny, UNGUARDED), cache) as engine:
        yield engine


def test_rate_and_volume_apply_to_their_turn_only(engine: Engine) -> None:
    text = '<speak>One. <prosody volume="-6dB">Two.</prosody> <prosody rate="200%">Three, four.</prosody></speak>'
    sampling = Sampling(seed=6, max_frames=7)
    plain = engine.speak(text.replace('"-6dB"', '"default"').replace('"200%"', '"default"'), sampling=sampling)
    changed = engine.speak(text, sampling=sampling)
    assert np.array_equal(changed.codes, plain.codes)
    assert plain.codes.shape[1] == 21
    assert np.array_equal(changed.samples[:FRAMES], plain.samples[:FRAMES])
    quieter = plain.samples[FRAMES : 2 * FRAMES] * np.float32(10 ** (-6 / 20))
    assert np.allclose(changed.samples[FRAMES : 2 * FRAMES], quieter, atol=1e-6)
    assert 0.4 * FRAMES < len(changed.samples) - 2 * FRAMES < 0.75 * FRAMES


def test_an_unknown_voice_in_the_markup_is_an_error(engine: Engine) -> None:
    text = '<speak><voice name="nobody">Hello.</voice></speak>'
    with pytest.raises(VoiceNotFound, match="nobody"):
        engine.speak(text)
    with pytest.raises(VoiceNotFound, match="nobody"):
        asyncio.run(engine.aspeak(text))


def test_a_missing_extra_is_reported_before_the_engine_thread(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.audio.tempo.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="speeds other than 1"):
        engine.speak('<speak><prosody rate="2">Hello.</prosody></speak>')


def test_turns_in_other_voices_are_no_context_of_the_next_request(tiny: Checkpoint) -> None:
    turns = turns_of("One thing. [pause:1s] Another thing.", tiny)
    turns[0] = replace(turns[0], delivery=Delivery(voice="other"))
    core = EngineCore(tiny, UNGUARDED)
    driver = StepDriver(core)
    received = driver.add(Utterance(0, turns, SAMPLING, context=()))
    driver.run()
    context = received.utterance.spoken_context()
    assert context is not None
    assert [turn.text for turn in context] == ["Another thing."]
