"""Output that is not speech is retried once with another seed, then fails."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.audio.guard import GuardThresholds, SpeechGuard
from shoal.checkpoint.load import Checkpoint
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.preprocess import build_turns
from shoal.engine.scheduling.scheduler import Progress, Scheduler
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.utterance import Utterance
from shoal.errors import GenerationFailed
from shoal.speech import FinishReason, Samples, SamplingParams
from tests.engine.oracle import Oracle, Received, StepDriver, assert_nothing_leaked, run_with_lag

GUARDED = EngineConfig(slots=4)
TEXT = "Nine letters or so, and a few more."  # takes at least half a second to speak
LONG = SamplingParams(seed=3, max_frames=16)
FRAME = 640  # samples, of the tiny codec
APPEND_FRAME = Scheduler._append_frame
Sound = Callable[[int], Samples]  # generator of n samples


def tone(samples: int) -> Samples:
    return (0.3 * np.sin(np.arange(samples) / 5)).astype(np.float32)


def silence(samples: int) -> Samples:
    return np.zeros(samples, np.float32)


def nonsense(samples: int) -> Samples:
    return np.full(samples, np.nan, np.float32)


def square(samples: int) -> Samples:
    return np.sign(tone(samples)).astype(np.float32)


class Sounds:
    """Replaces the codec: attempt n of a slot gives the nth sound, and later attempts the last one."""

    backend = "eager"

    def __init__(self, *sounds: Sound) -> None:
        self._sounds = sounds
        self._attempt: dict[int, int] = {}
        self._seen: list[int] = []

    def decode(self, codes: Tensor, slots: Rows[int], lengths: Rows[int] | None = None) -> Tensor:
        rows = [self._sound(slot)(codes.shape[-1] * FRAME) for slot in slots]
        return torch.from_numpy(np.stack(rows))

    def reset(self, slots: Rows[int]) -> None:
        for slot in slots:
            self._attempt[slot] = self._attempt.get(slot, 0) + 1

    def _sound(self, slot: int) -> Sound:
        return self._sounds[min(self._attempt.get(slot, 0), len(self._sounds) - 1)]


def speak(
    checkpoint: Checkpoint,
    *sounds: Sound,
    text: str = TEXT,
    sampling: SamplingParams = LONG,
    whole: bool = False,
    config: EngineConfig = GUARDED,
    lag: int = 0,
) -> tuple[Received, EngineCore]:
    core = EngineCore(checkpoint, config)
    run_with_lag(core, lag)
    core.audio_decoder._decoder = Sounds(*sounds)  # type: ignore[assignment]
    driver = StepDriver(core)
    received = driver.add(Utterance(0, build_turns(text, None, checkpoint), sampling, whole=whole))
    driver.run()
    assert received.ends == 1
    assert_nothing_leaked(core)
    return received, core


def test_speech_passes_the_guard(tiny: Checkpoint) -> None:
    received, core = speak(tiny, tone)
    assert received.finish is FinishReason.LENGTH
    assert len(received.samples) == 16 * FRAME
    assert (core.tracker.stats.completed, core.tracker.stats.retried, core.tracker.stats.failed) == (1, 0, 0)


@pytest.mark.parametrize(("sound", "finding"), [(silence, "silent"), (nonsense, "not finite"), (square, "clipped")])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("lag", [0, 1])
def test_output_that_is_not_speech_is_retried_once_and_then_fails(
    tiny: Checkpoint, sound: Sound, finding: str, whole: bool, lag: int
) -> None:
    received, core = speak(tiny, sound, whole=whole, lag=lag)
    assert isinstance(received.error, GenerationFailed)
    assert finding in str(received.error)
    # A stream that has sent audio cannot be retried; a NaN is detected before the first chunk.
    heard_in_part = not whole and sound is not nonsense
    assert bool(received.chunks) is heard_in_part
    assert core.tracker.stats.retried == (0 if heard_in_part else 1)
    assert core.tracker.stats.failed == 1
    assert core.tracker.stats.completed == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_a_retry_has_another_seed_and_is_reproducible(oracle: Oracle, lag: int) -> None:
    checkpoint = oracle.checkpoint
    received, core = speak(checkpoint, silence, tone, whole=True, lag=lag)
    turns = build_turns(TEXT, None, checkpoint)
    first, second = (oracle.speak(turns, LONG, attempt).codes for attempt in (0, 1))
    assert received.finish is FinishReason.LENGTH
    assert np.array_equal(received.codes, second)
    assert not np.array_equal(first, second)
    assert np.array_equal(received.samples, tone(16 * FRAME))
    assert (core.tracker.stats.retried, core.tracker.stats.completed) == (1, 1)


def test_a_retry_of_a_long_text_starts_at_its_first_turn(oracle: Oracle) -> None:
    text, sampling = "One thing. Another thing.", SamplingParams(seed=3, max_frames=6)
    checkpoint = replace(oracle.checkpoint, profile=replace(oracle.checkpoint.profile, chunk_bytes=16))
    received, core = speak(checkpoint, silence, tone, text=text, sampling=sampling, whole=True)
    assert np.array_equal(received.codes, oracle.speak(build_turns(text, None, checkpoint), sampling, 1).codes)
    assert core.tracker.stats.retried == 1


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("frames", [1, 2])
def test_forty_milliseconds_of_audio_are_a_failure(tiny: Checkpoint, frames: int, whole: bool) -> None:
    received, core = speak(tiny, tone, sampling=SamplingParams(max_frames=frames), whole=whole)
    assert isinstance(received.error, GenerationFailed)
    assert "too short" in str(received.error)
    assert core.tracker.stats.failed == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_that_stops_long_before_the_end_of_the_text_fails(
    tiny: Checkpoint, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_in = Scheduler._append_frame

    def stop_early(self: Scheduler, sequence: Sequence, token: np.ndarray, main: int) -> Progress:
        return take_in(self, sequence, token, self.stop_id if sequence.frames == 5 else main)

    monkeypatch.setattr(Scheduler, "_append_frame", stop_early)
    received, _ = speak(tiny, tone, whole=whole)
    assert isinstance(received.error, GenerationFailed)
    assert "too short" in str(received.error)


@pytest.mark.parametrize("whole", [True, False])
def test_speech_truncated_by_max_frames_is_no_failure(tiny: Checkpoint, whole: bool) -> None:
    received, core = speak(tiny, tone, sampling=SamplingParams(max_frames=5), whole=whole)
    assert (received.error, received.finish) == (None, FinishReason.LENGTH)
    assert len(received.samples) == 5 * FRAME
    assert core.tracker.stats.retried == 0


def test_empty_speech_of_a_text_without_letters_is_a_failure(tiny: Checkpoint) -> None:
    received, _ = speak(tiny, silence, text="(laughing)", sampling=SamplingParams(max_frames=1), whole=True)
    assert isinstance(received.error, GenerationFailed)


def test_runaway_generation_is_stopped_early(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = partial(SpeechGuard, thresholds=GuardThresholds(slack_seconds=0.0))
    monkeypatch.setattr("shoal.engine.request_tracker.SpeechGuard", hasty)
    for whole, frames in ((False, 6), (True, 2 * 6)):
        received, core = speak(tiny, tone, text="a", whole=whole, config=replace(GUARDED, max_chunk_frames=2))
        assert isinstance(received.error, GenerationFailed)
        assert "runaway" in str(received.error)
        assert core.tracker.stats.frames == frames


def test_without_retries_the_first_failure_is_final(tiny: Checkpoint) -> None:
    received, core = speak(tiny, silence, tone, whole=True, config=replace(GUARDED, retries=0))
    assert isinstance(received.error, GenerationFailed)
    assert core.tracker.stats.retried == 0


@pytest.mark.parametrize("lag", [0, 1])
def test_a_retry_does_not_affect_other_utterances(oracle: Oracle, lag: int) -> None:
    checkpoint = oracle.checkpoint
    core = EngineCore(checkpoint, replace(GUARDED, slots=2))
    run_with_lag(core, lag)
    turns = build_turns(TEXT, None, checkpoint)
    driver = StepDriver(core)
    received = [driver.add(Utterance(seed, turns, replace(LONG, seed=seed), whole=True)) for seed in range(2)]
    judged = core.tracker._check_speech
    core.tracker._check_speech = lambda utterance, samples, ended: (  # type: ignore[method-assign]
        judged(
            utterance,
            silence(len(samples)) if utterance.id == 0 and utterance.attempt == 0 else tone(len(samples)),
            ended=ended,
        )
    )
    driver.run()
    assert received[0].equals(oracle.speak(turns, replace(LONG, seed=0), attempt=1))
    assert received[1].equals(oracle.speak(turns, replace(LONG, seed=1)))


class EarlyStop:
    """Makes the model end turn `turn` after `frames` frames in its first `times` attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, turn: int, frames: int, times: int) -> None:
        self.left = times

        def stop_early(scheduler: Scheduler, sequence: Sequence, token: np.ndarray, semantic: int) -> Progress:
            utterance = self.core.tracker.active[sequence.id]
            stop = utterance.turn == turn and sequence.frames == frames and self.left > 0
            self.left -= stop
            return APPEND_FRAME(scheduler, sequence, token, scheduler.stop_id if stop else semantic)

        monkeypatch.setattr(Scheduler, "_append_frame", stop_early)

    def speak(
        self, checkpoint: Checkpoint, *, whole: bool, lag: int = 0, min_frames: int = 8, **config: int
    ) -> Received:
        self.core = EngineCore(checkpoint, replace(GUARDED, **config))  # type: ignore[arg-type]
        run_with_lag(self.core, lag)
        driver = StepDriver(self.core)
        built = build_turns(TURNS, None, checkpoint, 16)
        turns = [replace(turn, min_frames=min_frames, hold_frames=4) for turn in built]
        sampling = SamplingParams(seed=3, max_frames=min_frames + 4 - min_frames % 2)
        received = driver.add(Utterance(0, turns, sampling, whole=whole))
        self.core.tracker.active[0].guard = SpeechGuard(16000)
        driver.run()
        assert_nothing_leaked(self.core)
        return received


TURNS = "One thing. Another thing. A third thing."


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("whole", [True, False])
def test_a_turn_that_ends_too_early_is_generated_again_and_the_others_are_kept(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, whole: bool, lag: int
) -> None:
    undisturbed = EarlyStop(monkeypatch, turn=1, frames=3, times=0).speak(tiny, whole=whole, lag=lag)
    rig = EarlyStop(monkeypatch, turn=1, frames=3, times=2)
    received = rig.speak(tiny, whole=whole, lag=lag)
    assert (received.error, rig.core.tracker.stats.retried) == (None, 2)
    assert received.codes.shape == undisturbed.codes.shape
    assert np.array_equal(received.codes[:, :12], undisturbed.codes[:, :12])
    assert not np.array_equal(received.codes[:, 12:24], undisturbed.codes[:, 12:24])
    # The same request fails in the same places and gives the same audio, streamed or not, with or without overlap.
    again = EarlyStop(monkeypatch, turn=1, frames=3, times=2).speak(tiny, whole=not whole)
    assert np.array_equal(again.codes, received.codes)


@pytest.mark.parametrize("whole", [True, False])
def test_a_turn_that_stays_too_short_fails_the_request(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    rig = EarlyStop(monkeypatch, turn=2, frames=2, times=9)
    received = rig.speak(tiny, whole=whole, turn_retries=2)
    assert isinstance(received.error, GenerationFailed)
    assert str(received.error).startswith(
        "the speech is too short for its text: 0.08 s for 'A third thing.', at least 0.3"
    )
    assert (rig.core.tracker.stats.retried, rig.core.tracker.stats.failed) == (2, 1)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_stream_continues_a_turn_whose_audio_was_sent_in_part(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, lag: int
) -> None:
    undisturbed = EarlyStop(monkeypatch, turn=1, frames=6, times=0).speak(tiny, whole=False, lag=lag)
    rig = EarlyStop(monkeypatch, turn=1, frames=6, times=2)
    received = rig.speak(tiny, whole=False, lag=lag)
    assert (received.error, rig.core.tracker.stats.retried) == (None, 2)
    # Nothing that was sent is repeated or lost, and what follows is sampled with the seed of the third attempt.
    assert received.codes.shape == undisturbed.codes.shape
    assert np.array_equal(received.codes[:, :18], undisturbed.codes[:, :18])
    assert not np.array_equal(received.codes[:, 18:24], undisturbed.codes[:, 18:24])
    assert np.allclose(received.samples, codec_samples(tiny, received.codes), atol=1e-5)
    again = EarlyStop(monkeypatch, turn=1, frames=6, times=2).speak(tiny, whole=False)
    assert np.array_equal(again.codes, received.codes)


def test_a_stream_speaks_the_rest_of_a_turn_that_does_not_continue(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = EarlyStop(monkeypatch, turn=1, frames=19, times=4)
    received = rig.speak(tiny, whole=False, min_frames=22)
    assert received.error is None
    assert rig.core.tracker.stats.retried >= 4  # the random model may stop early in the last turn, too
    assert [turn.text for turn in received.utterance.turns] == ["One thing.", "Another", "thing.", "A third thing."]
    assert received.utterance.turn_ends[:2] == [26, 45]
    assert np.allclose(received.samples, codec_samples(tiny, received.codes), atol=1e-5)


def test_a_stream_that_cannot_be_repaired_fails(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = EarlyStop(monkeypatch, turn=1, frames=6, times=9)
    received = rig.speak(tiny, whole=False)  # six frames are too short for a word: there is no rest to speak
    assert isinstance(received.error, GenerationFailed)
    assert rig.core.tracker.stats.retried == 3


def codec_samples(checkpoint: Checkpoint, codes: np.ndarray) -> Samples:
    samples: Samples = checkpoint.codec.decode(torch.from_numpy(codes.astype(np.int64))[None])[0].numpy()
    return samples
