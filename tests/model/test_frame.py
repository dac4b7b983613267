import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.checkpoint.load import Checkpoint
from shoal.model.frame import FrameSampler, FrameState
from shoal.model.sampling import SamplingTensors
from shoal.model.slow import Head
from shoal.speech import Repetition, SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams(top_p=1e-6)


def fresh(checkpoint: Checkpoint, *settings: SamplingParams) -> FrameState:
    return FrameState.initial(checkpoint.model.config, SamplingTensors.from_settings(list(settings), CPU))


def remember(state: FrameState, semantic_ids: list[int]) -> None:
    """Make the only row sample these semantic tokens, each with its own codes."""
    codebooks = state.window.shape[1] - 1
    for semantic in semantic_ids:
        state.advance(torch.tensor([[semantic, *((semantic + book) % 200 for book in range(codebooks))]]))


# The window


def upstream_window(columns: list[list[int]], length: int) -> list[list[int]]:
    """The loop of the released S1 code: a matrix of zeros, written from its first column on, never with frame 0."""
    previous = [[0] * len(columns[0]) for _ in range(len(columns) + length)]
    for step, column in enumerate(columns[1:]):
        previous[step] = column
    step = len(columns) - 1
    first = 0 if step < length else step - length
    return previous[first : first + length]


@settings(deadline=None, max_examples=60)
@given(semantic_ids=st.lists(st.integers(1, 500), min_size=1, max_size=60))
def test_the_window_is_that_of_upstreams_loop(semantic_ids: list[int], tiny: Checkpoint) -> None:
    state = fresh(tiny, GREEDY)
    remember(state, semantic_ids)
    columns = [[semantic, *((semantic + book) % 200 for book in range(10))] for semantic in semantic_ids]
    assert state.window[0].T.tolist() == upstream_window(columns, 16)
    assert int(state.frame) == len(semantic_ids)


def test_the_window_fills_from_the_left_and_then_slides(tiny: Checkpoint) -> None:
    state = fresh(tiny, GREEDY)
    remember(state, [90, 1, 2])
    assert state.window[0, 0].tolist() == [1, 2, *[0] * 14]
    remember(state, list(range(3, 20)))
    assert state.window[0, 0].tolist() == list(range(4, 20))


def test_the_first_frame_never_enters_the_window(tiny: Checkpoint) -> None:
    state = fresh(tiny, GREEDY)
    remember(state, [90])
    assert not state.window.any()
    assert int(state.frame) == 1


def test_rows_at_different_frames_keep_their_own_windows(tiny: Checkpoint) -> None:
    alone = [fresh(tiny, GREEDY) for _ in range(3)]
    for state, count in zip(alone, (1, 7, 30), strict=True):
        remember(state, list(range(100, 100 + count)))
    together = fresh(tiny, GREEDY, GREEDY, GREEDY)
    together.window = torch.cat([state.window for state in alone])
    together.frame = torch.cat([state.frame for state in alone])
    for state in alone:
        remember(state, [55])
    together.advance(torch.tensor([[55, *((55 + book) % 200 for book in range(10))]] * 3))
    assert torch.equal(together.window, torch.cat([state.window for state in alone]))


def test_the_window_length_is_the_familys(tiny: Checkpoint, tiny_s2: Checkpoint) -> None:
    assert fresh(tiny, GREEDY).window.shape == (1, 11, 16)
    assert fresh(tiny_s2, GREEDY).window.shape == (1, 11, 10)


# The penalty of S1


class Listener(FrameSampler):
    """Keeps the logits that each race is run with."""

    received: Tensor

    def _race(self, logits: Tensor, temperature: Tensor, top_p: Tensor, state: FrameState, noise: Tensor) -> Tensor:
        self.received = logits
        return super()._race(logits, temperature, top_p, state, noise)


def penalized_ids(checkpoint: Checkpoint, sampling: SamplingParams, semantic_ids: list[int]) -> list[int]:
    """Ids of the whole vocabulary whose equal logits the penalty moves after these semantic tokens were sampled."""
    model, state = checkpoint.model, fresh(checkpoint, sampling)
    decoder = Listener(model, Head(model.slow, full_vocab=True))
    remember(state, semantic_ids)
    decoder.sample_semantic(torch.ones(1, model.config.vocab_size), state)
    return (decoder.received[0] < 1).nonzero().flatten().tolist()


def test_upstreams_penalty_reads_the_oldest_token_as_eleven_ids(tiny: Checkpoint) -> None:
    semantic_ids = list(range(300, 325))
    oldest = semantic_ids[-16]
    expected = {oldest, *((oldest + book) % 200 for book in range(10))}
    assert penalized_ids(tiny, SamplingParams(repetition_penalty=1.5), semantic_ids) == sorted(expected)


def test_upstreams_penalty_applies_to_id_zero_while_the_window_is_empty(tiny: Checkpoint) -> None:
    assert penalized_ids(tiny, SamplingParams(repetition_penalty=1.5), [300]) == [0]


def test_the_window_penalty_applies_to_all_semantic_tokens_of_the_window(tiny: Checkpoint) -> None:
    sampling = SamplingParams(repetition_penalty=1.5, repetition="window")
    assert penalized_ids(tiny, sampling, list(range(300, 325))) == list(range(309, 325))


def test_the_window_penalty_ignores_empty_places_of_the_window(tiny: Checkpoint) -> None:
    sampling = SamplingParams(repetition_penalty=1.5, repetition="window")
    assert penalized_ids(tiny, sampling, [300]) == []
    assert penalized_ids(tiny, sampling, [300, 301, 302]) == [301, 302]


@pytest.mark.parametrize("repetition", ["upstream", "window"])
def test_the_first_frame_is_never_penalized(repetition: Repetition, tiny: Checkpoint) -> None:
    sampling = SamplingParams(repetition_penalty=1.9, repetition=repetition)
    assert penalized_ids(tiny, sampling, []) == []


def test_a_penalty_of_one_changes_nothing(tiny: Checkpoint) -> None:
    assert penalized_ids(tiny, SamplingParams(repetition_penalty=1.0), list(range(300, 325))) == []


# Draws


@pytest.mark.parametrize("family", ["s1", "s2"])
@pytest.mark.parametrize("repetition", ["upstream", "window"])
def test_a_row_samples_the_same_frames_alone_and_in_a_batch(
    family: str, repetition: Repetition, tiny: Checkpoint, tiny_s2: Checkpoint
) -> None:
    checkpoint = tiny if family == "s1" else tiny_s2
    wanted = [
        SamplingParams(temperature=t, top_p=p, top_k=k, repetition_penalty=r, seed=s, repetition=repetition)
        for t, p, k, r, s in ((0.8, 0.8, 0, 1.1, 1), (1.5, 0.99, 30, 1.0, 2**63), (0.1, 0.5, 3, 1.9, 7))
    ]
    hidden = torch.randn(25, 3, checkpoint.model.config.slow.dim, generator=torch.Generator().manual_seed(5))
    together = draw_frames(checkpoint, wanted, hidden)
    for row in range(3):
        alone = draw_frames(checkpoint, wanted[row : row + 1], hidden[:, row : row + 1])
        assert torch.equal(alone[:, 0], together[:, row])


@torch.inference_mode()
def draw_frames(checkpoint: Checkpoint, settings: list[SamplingParams], hidden: Tensor) -> Tensor:
    decoder = FrameSampler(checkpoint.model, Head(checkpoint.model.slow))
    state = fresh(checkpoint, *settings)
    return torch.stack([decoder.sample(step, state) for step in hidden])


@pytest.mark.parametrize("family", ["s1", "s2"])
@torch.inference_mode()
def test_sampled_tokens_are_always_in_range(family: str, tiny: Checkpoint, tiny_s2: Checkpoint) -> None:
    checkpoint = tiny if family == "s1" else tiny_s2
    config = checkpoint.model.config
    wild = [SamplingParams(temperature=2.0, top_p=1.0, seed=seed) for seed in range(32)]
    columns = draw_frames(checkpoint, wild, torch.randn(4, 32, config.slow.dim)).flatten(0, 1)
    semantic, codes = columns[:, 0], columns[:, 1:]
    spoken = semantic != config.stop_id
    assert bool(((semantic[spoken] >= config.semantic_begin_id) & (semantic[spoken] <= config.semantic_end_id)).all())
    assert torch.equal(codes[spoken, 0], semantic[spoken] - config.semantic_begin_id)
    assert bool((codes >= 0).all())
    assert bool((codes[:, 1:] < config.residual_size).all())


@torch.inference_mode()
def test_a_text_token_from_the_full_head_has_code_zero(tiny: Checkpoint) -> None:
    model = tiny.model
    head = Head(model.slow, full_vocab=True)
    decoder, state = FrameSampler(model, head), fresh(tiny, GREEDY)
    decoder.sample_semantic = lambda logits, state: torch.tensor([65])  # type: ignore[method-assign]
    assert decoder.sample(torch.randn(1, model.config.slow.dim), state)[0, :2].tolist() == [65, 0]


FIRST, SECOND = 0, 5  # columns: the likeliest, and the one that wins when S2 draws again


@pytest.fixture
def repeating(tiny_s2: Checkpoint) -> tuple[FrameSampler, FrameState]:
    """A decoder that samples the likeliest logit first and another one when it resamples."""

    def noise(seed: Tensor, frame: Tensor, lane: int, size: int) -> Tensor:
        drawn = torch.full((1, size), 1e3)
        drawn[0, SECOND if lane == tiny_s2.model.config.num_codebooks else FIRST] = 1e-3
        return drawn

    decoder = FrameSampler(tiny_s2.model, Head(tiny_s2.model.slow), noise)
    state = fresh(tiny_s2, SamplingParams(top_k=30))
    remember(state, [0, int(decoder.head.ids[FIRST])])
    return decoder, state


def likeliest(decoder: FrameSampler, column: int) -> Tensor:
    logits = torch.zeros(1, len(decoder.head.ids))
    logits[0, column], logits[0, SECOND] = 2.0, 1.9
    return logits


def test_ras_resamples_a_token_found_in_the_window(repeating: tuple[FrameSampler, FrameState]) -> None:
    decoder, state = repeating
    assert int(decoder.sample_semantic(likeliest(decoder, FIRST), state)) == SECOND


def test_ras_forgets_a_token_after_ten_frames(repeating: tuple[FrameSampler, FrameState]) -> None:
    decoder, state = repeating
    remember(state, [1] * 9)
    assert int(decoder.sample_semantic(likeliest(decoder, FIRST), state)) == SECOND
    remember(state, [1])
    assert int(decoder.sample_semantic(likeliest(decoder, FIRST), state)) == FIRST


def test_ras_never_resamples_the_first_frame(repeating: tuple[FrameSampler, FrameState]) -> None:
    decoder, state = repeating
    state.frame.zero_()
    assert int(decoder.sample_semantic(likeliest(decoder, FIRST), state)) == FIRST


def test_the_second_sample_respects_top_k(repeating: tuple[FrameSampler, FrameState]) -> None:
    decoder, state = repeating
    state.settings.top_k[:] = 1
    assert int(decoder.sample_semantic(likeliest(decoder, FIRST), state)) == FIRST


def test_the_stop_token_is_never_resampled(repeating: tuple[FrameSampler, FrameState]) -> None:
    decoder, state = repeating
    stop = len(decoder.head.ids) - 1
    state.window[0, 0, 0] = decoder.head.stop_id
    decoder.noise = lambda seed, frame, lane, size: torch.ones(1, size)
    assert int(decoder.sample_semantic(likeliest(decoder, stop), state)) == stop


def test_the_cache_of_the_fast_transformer_is_kept_once_and_not_per_batch_size(tiny: Checkpoint) -> None:
    model = tiny.model
    decoder, kept = FrameSampler(model, Head(model.slow), max_rows=4), set[int]()
    with torch.inference_mode():
        for rows in (1, 3, 4, 2):
            hidden = torch.zeros(rows, model.config.slow.dim)
            decoder.sample(hidden, fresh(tiny, *[GREEDY] * rows))
            assert decoder._cache is not None
            kept.add(decoder._cache.keys.data_ptr())
    assert len(kept) == 1
    assert decoder._cache is not None
    assert decoder._cache.rows == 4
