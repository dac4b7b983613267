from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from shoal.engine.output.audio_decoder import PlannedChunk
from shoal.engine.output.word_times import MonotonicPath, WordPlan, WordTimes, extend_paths, frame_of
from shoal.engine.request_tracker import trace_paths
from shoal.engine.utterance import Utterance
from shoal.speech import SamplingParams, Word
from shoal.text.words import TextWord, written_words


def weights(path: list[int], tokens: int, focus: float = 0.8) -> np.ndarray:
    """Return weights [frames, tokens] of a head that attends to `path`."""
    found = np.full((len(path), tokens), (1 - focus) / (tokens - 1), np.float32)
    found[np.arange(len(path)), path] = focus
    return found


def path_of(frames: np.ndarray) -> list[int]:
    path = MonotonicPath(frames.shape[1])
    for each in frames:
        path.feed(each[None])
    return path.tokens()


def test_the_path_follows_the_attention() -> None:
    assert path_of(weights([0, 0, 1, 2, 2, 2, 3, 5, 5, 6], 7)) == [0, 0, 1, 2, 2, 2, 3, 5, 5, 6]


def test_a_frame_that_attends_elsewhere_does_not_break_the_path() -> None:
    assert path_of(weights([0, 1, 1, 6, 1, 2, 0, 2, 3], 7)) == [0, 1, 1, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_the_path_is_the_best_of_all_monotonic_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    frames = rng.random((6, 4)).astype(np.float32)
    found = path_of(frames)
    assert found == sorted(found)
    assert score(frames, found) == pytest.approx(max(score(frames, each) for each in monotonic(6, 4)), abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_the_path_is_the_same_however_often_it_is_read(seed: int) -> None:
    frames = np.random.default_rng(seed).random((40, 12)).astype(np.float32)
    often = MonotonicPath(12)
    for count, each in enumerate(frames, start=1):
        often.feed(each[None])
        assert often.tokens() == path_of(frames[:count])


def monotonic(frames: int, tokens: int, least: int = 0) -> list[list[int]]:
    if frames == 0:
        return [[]]
    return [[token, *rest] for token in range(least, tokens) for rest in monotonic(frames - 1, tokens, token)]


def score(frames: np.ndarray, path: list[int]) -> float:
    """A path pays 0.4 per token that it leaves out; its first token counts from the first of the text."""
    moves = [max(0, after - before - 1) for before, after in pairwise(path)]
    emission = np.log(frames[np.arange(len(path)), path] + 1e-4).sum()
    return float(emission - 0.4 * (path[0] + sum(moves)))


def test_tokens_that_the_path_leaves_out_have_times_within_the_frame_before() -> None:
    path = [0, 0, 4, 4]
    assert [frame_of(path, token) for token in range(5)] == [0, 1.25, 1.5, 1.75, 2]
    assert frame_of(path, 5) == 4


def times(text: str, turns: list[list[int | None]], lead_frames: float = 0.0) -> WordTimes:
    return WordTimes(WordPlan(tuple(written_words(text)), turns), frame_seconds=0.1, lead_frames=lead_frames)


def feed(found: WordTimes, turn: int, path: list[int], tokens: int) -> None:
    for each in weights(path, tokens):
        found.feed(turn, each[None])


def test_words_are_reported_once_when_they_have_ended() -> None:
    found = times("one two", [[0, 1]])
    feed(found, 0, [0, 0, 0], 4)
    found.collect(0, [(0, 2), (2, 4)], 1.0, 1.0, ended=False)
    assert found.take() == ()
    feed(found, 0, [1, 2, 2], 4)
    found.collect(0, [(0, 2), (2, 4)], 1.0, 1.0, ended=False)
    assert found.take() == (Word("one", 1.0, 1.4, 0, 3),)
    found.collect(0, [(0, 2), (2, 4)], 1.0, 1.0, ended=True)
    assert found.take() == (Word("two", 1.4, 1.6, 4, 7),)
    assert found.take() == ()


def test_attention_to_the_whole_text_before_the_first_sound_ends_no_word() -> None:
    """A chunk may end after any frame; words must not depend on it."""
    path, tokens, spans = [3, 3, 0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3, 3], 4, [(0, 1), (1, 2), (2, 4)]
    streamed, whole = (replace(times("one two three", [[0, 1, 2]]), frame_seconds=0.04) for _ in range(2))
    for each in path:
        feed(streamed, 0, [each], tokens)
        streamed.collect(0, spans, 0.0, 1.0, ended=False)
    feed(whole, 0, path, tokens)
    for found in (streamed, whole):
        found.collect(0, spans, 0.0, 1.0, ended=True)
    assert [word.text for word in streamed.found] == ["one", "two", "three"]
    assert streamed.take() == whole.take()


def test_one_written_word_may_be_many_spoken_ones_and_even_two_turns() -> None:
    found = times("$12.50 now", [[0, 0], [0, None, 1]])
    feed(found, 0, [0, 1, 2], 3)
    found.collect(0, [(0, 1), (1, 3)], 0.0, 1.0, ended=True)
    assert found.take() == ()
    feed(found, 1, [0, 1, 2], 3)
    found.collect(1, [(0, 1), (1, 2), (2, 3)], 0.5, 2.0, ended=True)  # twice as fast
    assert found.take() == (Word("$12.50", 0.0, 0.55, 0, 6), Word("now", 0.6, 0.65, 7, 10))


def test_the_lead_moves_all_times_but_the_start_of_the_turn_and_stays_within_its_audio() -> None:
    found = times("one two", [[0, 1]], lead_frames=1.5)
    feed(found, 0, [0, 0, 1, 1], 2)
    found.collect(0, [(0, 1), (1, 2)], 0.0, 1.0, ended=True)
    assert found.take() == (Word("one", 0.0, 0.35, 0, 3), Word("two", 0.35, 0.4, 4, 7))


def test_a_turn_that_is_generated_again_drops_its_frames() -> None:
    found = times("one two", [[0, 1]])
    feed(found, 0, [1, 1, 1, 1], 2)
    found.restart_turn(0)
    feed(found, 0, [0, 1], 2)
    found.collect(0, [(0, 1), (1, 2)], 0.0, 1.0, ended=True)
    assert [word.start for word in found.take()] == [0.0, 0.1]
    found.restart()
    feed(found, 0, [0, 0, 1], 2)
    found.collect(0, [(0, 1), (1, 2)], 0.0, 1.0, ended=True)
    assert [word.start for word in found.take()] == [0.0, 0.2]


def test_the_rest_of_a_divided_turn_keeps_its_words() -> None:
    found = times("one two three", [[0, 1, 2]])
    feed(found, 0, [0, 1], 3)
    found.divide_turn(0, 1)
    found.collect(0, [(0, 1)], 0.0, 1.0, ended=True)
    feed(found, 1, [0, 1], 2)
    found.collect(1, [(0, 1), (1, 2)], 1.0, 1.0, ended=True)
    assert [(word.text, word.start) for word in found.take()] == [("one", 0.0), ("two", 1.0), ("three", 1.1)]
    assert isinstance(found.plan.written[0], TextWord)


def test_paths_that_are_extended_together_are_those_of_each_alone() -> None:
    """Texts of different lengths, of which some have no new frames, and one begins later."""
    rng = np.random.default_rng(0)
    sizes = (1, 7, 40, 23)
    together, alone = ([MonotonicPath(size) for size in sizes] for _ in range(2))
    for round in range(8):
        for number, size in enumerate(sizes):
            for _ in range((round + number) % 4 if number < 3 or round > 3 else 0):
                frame = rng.dirichlet(np.full(size, 0.3), 2).astype(np.float32)
                together[number].feed(frame)
                alone[number].feed(frame)
        extend_paths(together)
        for one, other in zip(together, alone, strict=True):
            assert one.tokens() == other.tokens()
            assert np.array_equal(np.array(one.scores), np.array(other.scores))


def test_paths_are_traced_while_the_codec_runs() -> None:
    """Nothing is left to compute when the audio is delivered; requests without word times are skipped."""
    utterance, silent = (Utterance(number, [], SamplingParams()) for number in range(2))
    utterance.words = times("one two", [[0, 1]])
    feed(utterance.words, 0, [0, 0, 1, 1], 2)
    trace_paths([PlannedChunk(each, 4, ended=False) for each in (utterance, silent)])
    path = utterance.words.path(0)
    assert path is not None
    assert path.new == []
    assert path._path == [0, 0, 1, 1]
