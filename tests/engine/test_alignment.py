"""Word times of the bundled model, in the engine and the Python API."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from shoal import Engine, Sampling, SpeechRequest, load
from shoal.errors import InvalidRequest
from shoal.speech import Speech, Word

TEXT = "Dr. Smith paid $12.50 [pause:0.5s] for the books. They left."


@pytest.fixture(scope="module")
def nano() -> Iterator[Engine]:
    with load("nano", device="cpu") as engine:
        # Chunk sizes depend on the time, and the words of a chunk on its size: as on a machine that is never late.
        engine.service.core.audio_decoder.clock = lambda: 0.0
        yield engine


@pytest.fixture(scope="module")
def speech(nano: Engine) -> Speech:
    return nano.speak(TEXT, sampling=Sampling(seed=1), timestamps=True)


def energy(speech: Speech, start: float, end: float) -> float:
    part = speech.samples[round(start * speech.sample_rate) : round(end * speech.sample_rate)]
    return float(np.sqrt(np.square(part).mean())) if len(part) else 0.0


def test_every_written_word_has_its_time_in_order(speech: Speech) -> None:
    words = speech.words
    assert [word.text for word in words] == ["Dr.", "Smith", "paid", "$12.50", "for", "the", "books.", "They", "left."]
    assert all(TEXT[word.first : word.last] == word.text for word in words)
    assert all(0 <= word.start <= word.end <= speech.seconds for word in words)
    assert all(before.end <= after.start + 1e-9 for before, after in pairwise(words))
    spelled_out = words[3]
    assert spelled_out.end - spelled_out.start > 2 * (words[4].end - words[4].start)


def test_words_are_where_the_sound_is(speech: Speech) -> None:
    """A silence that was asked for lies between its words, and each word is louder than that silence."""
    amount, following = speech.words[3], speech.words[4]
    assert following.start - amount.end >= 0.5
    silence = energy(speech, following.start - 0.45, following.start - 0.1)
    assert all(energy(speech, word.start, word.end) > 3 * silence + 1e-3 for word in speech.words)
    # The last word is at the end of the audio, before the silence that ends it.
    assert speech.seconds - speech.words[-1].end < 0.6


def test_word_times_do_not_depend_on_where_chunks_end(nano: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks of one frame, every turn has ended before its stop token is sampled."""
    text, sampling = "They left. It rained again. We should go home now.", Sampling(seed=3)
    default = nano.speak(text, sampling=sampling, timestamps=True)
    monkeypatch.setattr(nano.service.core.audio_decoder, "_chunk_frames", lambda utterance: 1)
    chunks = list(nano.speak(text, sampling=sampling, timestamps=True, stream=True))
    assert all(chunk.seconds for chunk in chunks[:-1])
    found = [word for chunk in chunks for word in chunk.words]
    assert [word.text for word in found] == [word.text for word in default.words]
    assert [word.start for word in found] == pytest.approx([word.start for word in default.words], abs=0.1)


def test_chunks_carry_the_words_that_have_ended(nano: Engine, speech: Speech) -> None:
    words: list[Word] = []
    seconds = 0.0
    for chunk in nano.speak(TEXT, sampling=Sampling(seed=1), timestamps=True, stream=True):
        words += chunk.words
        seconds += chunk.seconds
        assert all(word.start < seconds + 0.2 for word in chunk.words)
    assert [word.text for word in words] == [word.text for word in speech.words]
    assert [word.start for word in words] == pytest.approx([word.start for word in speech.words], abs=0.05)


def test_word_times_do_not_change_the_audio_and_are_not_sent_unasked(nano: Engine, speech: Speech) -> None:
    plain = nano.speak(TEXT, sampling=Sampling(seed=1))
    assert plain.words == ()
    assert np.array_equal(plain.samples, speech.samples)


def test_a_model_without_known_heads_is_refused_with_what_to_do(nano: Engine) -> None:
    with load("random:tiny", device="cpu") as engine:
        with pytest.raises(InvalidRequest, match="run `shoal align calibrate"):
            engine.speak("Hello.", timestamps=True)
        assert engine.speak("Hello.", sampling=Sampling(max_frames=4)).words == ()
    checkpoint = nano.service.core.checkpoint
    assert checkpoint.profile.alignment is not None
    refused = replace(checkpoint.profile.alignment, heads=(), quality=0.1)
    from shoal.engine.preprocess import check_alignment

    with pytest.raises(InvalidRequest, match=r"no attention head of nano follows the text \(quality 0.10\)"):
        check_alignment(replace(checkpoint, profile=replace(checkpoint.profile, alignment=refused)))


def test_a_turn_with_too_many_tokens_is_refused(nano: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.preprocess.MAX_TOKENS", 8)
    with pytest.raises(InvalidRequest, match="lower chunk_bytes"):
        nano.service.speak_blocking(SpeechRequest("Hello there.", timestamps=True))
