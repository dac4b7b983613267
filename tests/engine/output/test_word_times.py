from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from shoal.engine.output import word_times
from shoal.engine.output.audio_decoder import PlannedChunk
from shoal.engine.output.word_times import MonotonicPath, WordPlan, WordTimes, frame_of
from shoal.engine.request_tracker import find_words
from shoal.engine.utterance import TextTokens, Turn, Utterance
from shoal.kernels.word_times.text_path_numpy import path_origins
from shoal.speech import SamplingParams, Word
from shoal.text.words import TextWord, written_words


def weights(path: list[int], tokens: int, focus: float = 0.8) -> np.ndarray:
    """Return weights [frames, tokens] of a head that attends to `path`."""
    found = np.full((len(path), tokens), (1 - focus) / (tokens - 1), np.float32)
    found[np.arange(len(path)), path] = focus
    return found


def path_of(frames: np.ndarray) -> list[int]:
    path = MonotonicPath(frames.shape[1])
    for each in path_origins(frames[:, None]):
        path.feed(each)
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
    assert score(frames, found) == pytest.approx(max(score(frames, each) for each in monotonic(6, 4)), abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_the_path_is_the_same_however_often_it_is_read(seed: int) -> None:
    frames = np.random.default_rng(seed).random((40, 12)).astype(np.float32)
    often = MonotonicPath(12)
    for count, each in enumerate(path_origins(frames[:, None]), start=1):
        often.feed(each)
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


@dataclass(slots=True)
class AttendedTimes(WordTimes):
    """Word times that remember the attended token of each frame, by turn."""

    attended: dict[int, list[int]] = field(default_factory=dict)


def times(text: str, turns: list[list[int | None]], lead_frames: float = 0.0, frame: float = 0.1) -> AttendedTimes:
    return AttendedTimes(WordPlan(tuple(written_words(text)), turns), frame_seconds=frame, lead_frames=lead_frames)


def feed(found: AttendedTimes, turn: int, path: list[int], tokens: int) -> None:
    """Append frames that attend to `path` to those that the turn has."""
    before = found._turns.get(turn)
    known = 0 if before is None else len(before.path.tokens())
    attended = [*found.attended.get(turn, [])[:known], *path]
    found.attended[turn] = attended
    for each in path_origins(weights(attended, tokens)[:, None])[known:]:
        found.feed(turn, each, tokens)


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
    streamed, whole = (times("one two three", [[0, 1, 2]], frame=0.04) for _ in range(2))
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


def test_a_long_path_does_not_keep_the_arrays_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_times, "COPIED_FRAMES", 4)
    attended = [0, 0, 1, 1, 1, 2, 3, 3, 4, 4]
    step = np.zeros((len(attended), 1000), np.int16)  # as wide as the longest text of the batch
    step[:, :6] = path_origins(weights(attended, 5)[:, None])
    path = MonotonicPath(5)
    for each in step:
        path.feed(each)
    assert path.tokens() == attended
    assert [each.base is step for each in path._origins] == [False] * 8 + [True] * 2


def test_words_are_found_while_the_codec_runs() -> None:
    """Only their times remain to be set when the audio is delivered; requests without word times are skipped."""
    text, tokens = np.zeros((1, 2), np.int32), TextTokens(2, 0, ((0, 1), (1, 2)))
    turn = Turn("one two", text, text, text_tokens=tokens)
    utterance, silent = (Utterance(number, [turn], SamplingParams()) for number in range(2))
    utterance.words = found = times("one two", [[0, 1]])
    feed(found, 0, [0, 0, 1, 1, 1], 2)
    find_words([PlannedChunk(each, 4, ended=False) for each in (utterance, silent)])
    assert found._turns[0].new == [(0, 0.0, 2.0)]
    assert found.found == []
    found.collect(0, tokens.words, 1.0, 1.0, ended=False)
    assert found.take() == (Word("one", 1.0, 1.2, 0, 3),)
