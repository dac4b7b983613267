import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engine.scheduling.blocks import ROOT, block_key
from shoal.engine.scheduling.sequence import Sequence, Tokens
from shoal.engine.utterance import Turn, Utterance
from shoal.speech import SamplingParams


def tokens(count: int, first: int = 0) -> Tokens:
    return np.arange(first, first + count, dtype=np.int32)[:, None].repeat(3, axis=1)


def started(prompt: int = 5, frames: int = 0, max_frames: int = 100) -> Sequence:
    sequence = Sequence.start(0, tokens(prompt), SamplingParams(max_frames=max_frames), 200)
    for token in tokens(frames, first=prompt):
        sequence.append(token)
        sequence.planned += 1
    return sequence


@given(st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_tokens_are_stored_however_they_are_appended(lengths: list[int]) -> None:
    sequence = Sequence.start(0, tokens(lengths[0]), SamplingParams(), 1000)
    for length in lengths[1:]:
        sequence.extend(tokens(length, first=sequence.length))
        sequence.append(tokens(1, first=sequence.length)[0])
    assert np.array_equal(sequence.tokens[: sequence.length], tokens(sequence.length))


@given(st.integers(1, 70), st.integers(1, 9))
def test_every_full_block_has_a_key_of_all_tokens_before_it(length: int, size: int) -> None:
    sequence = Sequence.start(0, tokens(length), SamplingParams(), 1000)
    sequence.extend_keys(size)
    before = ROOT
    for index in range(length // size):
        before = block_key(before, tokens(size, first=index * size))
        assert sequence.keys[index] == before
    assert len(sequence.keys) == length // size


@pytest.mark.parametrize(("frames", "expected"), [(0, 0), (1, 0), (2, 1), (5, 4), (6, 4)])
def test_recent_frames_exclude_the_first_frame(frames: int, expected: int) -> None:
    sequence = started(5, frames)
    assert np.array_equal(sequence.recent(4), tokens(expected, first=5 + frames - expected))


def test_the_limit_counts_the_frames_of_this_turn_that_are_planned() -> None:
    sequence = started(5, frames=2, max_frames=3)
    assert not sequence.exhausted
    sequence.planned += 1
    assert sequence.exhausted
    sequence.begin_turn(tokens(4), SamplingParams(max_frames=3))
    assert not sequence.exhausted


def test_no_limit_means_the_context() -> None:
    sequence = Sequence.start(0, tokens(5), SamplingParams(max_frames=0), 8)
    sequence.planned = 7
    assert not sequence.exhausted
    sequence.planned = 8
    assert sequence.exhausted


def test_a_new_turn_keeps_the_kv_cache_and_discards_what_is_in_flight() -> None:
    sequence = started(5, frames=3)
    sequence.computed, sequence.planned, sequence.bound, epoch = 9, 10, True, sequence.epoch
    sequence.begin_turn(tokens(4), SamplingParams(seed=2))
    assert (sequence.turn_start, sequence.length, sequence.planned, sequence.computed) == (12, 12, 12, 8)
    assert not sequence.bound
    assert sequence.epoch == epoch + 1
    assert sequence.frames == 0


def test_every_turn_and_attempt_has_its_own_seed() -> None:
    turns = [Turn("words", tokens(2), tokens(1))] * 3
    utterance = Utterance(0, turns, SamplingParams(seed=2**64 - 1, temperature=0.5))
    seeds = set()
    for utterance.attempt in range(3):
        for utterance.turn in range(3):
            sampling = utterance.turn_sampling()
            assert sampling.temperature == 0.5
            seeds.add(sampling.seed)
    assert len(seeds) == 9
    utterance.turn = utterance.attempt = 0
    assert utterance.turn_sampling() == utterance.sampling


def test_a_restart_drops_all_frames() -> None:
    utterance = Utterance(0, [Turn("words", tokens(2), tokens(1))], SamplingParams())
    utterance.codes = [np.zeros(2, np.int32)] * 3
    utterance.buffered, utterance.decoded, utterance.turn = [np.zeros(4, np.float32)], 2, 1
    assert (utterance.backlog, utterance.all_codes().shape) == (1, (2, 3))
    utterance.restart()
    assert (utterance.backlog, utterance.turn, utterance.attempt, utterance.buffered) == (0, 0, 1, [])
    assert utterance.all_codes().shape == (2, 0)
