import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.kernels.sampling.sample import apply_repetition_penalty, exponential_noise, exponential_race, probabilities
from shoal.model.sampling import SamplingTensors
from shoal.speech import SamplingParams

NO_LIMIT = 2**31


def probs(logits: list[float], temperature: float = 1.0, top_p: float = 1.0, top_k: int = NO_LIMIT) -> Tensor:
    row = torch.tensor([temperature]), torch.tensor([top_p]), torch.tensor([top_k])
    return probabilities(torch.tensor([logits]), *row)[0]


def survivors(distribution: Tensor) -> list[int]:
    return distribution.nonzero().flatten().tolist()


def noise(seed: int, frame: int, lane: int, size: int) -> Tensor:
    return exponential_noise(torch.tensor([seed]), torch.tensor([frame]), lane, size)[0]


# Filters


def log(*shares: float) -> list[float]:
    return [math.log(share) for share in shares]


def test_the_token_that_crosses_top_p_is_dropped() -> None:
    assert survivors(probs(log(0.5, 0.3, 0.2), top_p=0.7)) == [0]
    assert survivors(probs(log(0.5, 0.3, 0.2), top_p=0.81)) == [0, 1]


def test_the_most_likely_token_is_always_kept() -> None:
    assert survivors(probs(log(0.2, 0.7, 0.1), top_p=1e-6)) == [1]
    assert survivors(probs(log(0.2, 0.7, 0.1), top_k=1)) == [1]
    assert survivors(probs(log(0.2, 0.7, 0.1), temperature=0.0)) == [1]


def test_top_p_is_applied_before_the_temperature() -> None:
    """Temperature must not change which tokens survive top-p."""
    shares = log(0.6, 0.2, 0.15, 0.05)
    for temperature in (0.2, 1.0, 1.9):
        assert survivors(probs(shares, temperature, top_p=0.9)) == [0, 1]


def test_the_temperature_sharpens_the_kept_tokens() -> None:
    left = probs(log(0.6, 0.2, 0.15, 0.05), temperature=0.5, top_p=0.9)
    torch.testing.assert_close(left, torch.tensor([0.9, 0.1, 0.0, 0.0]))


def test_top_k_and_top_p_both_apply() -> None:
    shares = log(0.4, 0.3, 0.2, 0.1)
    assert survivors(probs(shares, top_p=0.95, top_k=2)) == [0, 1]
    assert survivors(probs(shares, top_p=0.5, top_k=3)) == [0]


def test_ties_keep_exactly_top_k_tokens() -> None:
    assert len(survivors(probs([1.0] * 10, top_k=4))) == 4


def test_impossible_tokens_stay_impossible() -> None:
    assert float(probs([0.0, -math.inf, 0.0], temperature=2.0)[1]) == 0.0


LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30)


@settings(deadline=None)
@given(logits=LOGITS, temperature=st.floats(0, 2), top_p=st.floats(1e-6, 1), top_k=st.integers(1, 40))
def test_probabilities_sum_to_one_and_keep_the_order_of_the_logits(
    logits: list[float], temperature: float, top_p: float, top_k: int
) -> None:
    found = probs(logits, temperature, top_p, top_k)
    assert abs(float(found.sum()) - 1) < 1e-5
    assert 1 <= len(survivors(found)) <= top_k
    likeliest = torch.tensor(logits) == max(logits)  # of tied tokens, any one may be kept
    assert float(found[likeliest].max()) == float(found.max())


ROWS = st.lists(
    st.tuples(st.floats(0, 2), st.floats(1e-3, 1), st.integers(0, 30), st.floats(0.1, 2), st.integers(0, 2**64 - 1)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=50)
@given(rows=ROWS, data=st.data())
def test_a_row_is_sampled_the_same_alone_and_in_any_batch(
    rows: list[tuple[float, float, int, float, int]], data: st.DataObject
) -> None:
    wanted = [
        SamplingParams(temperature=t, top_p=p, top_k=k, repetition_penalty=r, seed=s, repetition="window")
        for t, p, k, r, s in rows
    ]
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(len(rows)))
    penalized_tokens = torch.randint(
        0, 51, (len(rows), 4), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    frames = torch.arange(len(rows)) * 7
    together = sample(wanted, logits, penalized_tokens, frames)
    for index in range(len(rows)):
        here = slice(index, index + 1)
        alone = sample(wanted[here], logits[here], penalized_tokens[here], frames[here])
        assert alone.tolist() == together[here].tolist()


def sample(settings: list[SamplingParams], logits: Tensor, penalized_tokens: Tensor, frames: Tensor) -> Tensor:
    rows = SamplingTensors.from_settings(settings, torch.device("cpu"))
    left = probabilities(
        apply_repetition_penalty(logits, penalized_tokens, rows.penalty), rows.temperature, rows.top_p, rows.top_k
    )
    return exponential_race(left, exponential_noise(rows.seed, frames, 0, logits.shape[-1]))


# Penalty


def test_the_penalty_lowers_positive_and_negative_logits() -> None:
    penalized = apply_repetition_penalty(torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[0, 1]]), torch.tensor([2.0]))
    assert penalized.tolist() == [[1.0, -4.0, 1.0]]


def test_a_token_listed_twice_is_penalized_once() -> None:
    penalized = apply_repetition_penalty(torch.tensor([[2.0, 1.0]]), torch.tensor([[0, 0, 0]]), torch.tensor([2.0]))
    assert penalized.tolist() == [[1.0, 1.0]]


def test_an_index_beyond_the_last_token_is_ignored() -> None:
    logits = torch.tensor([[2.0, 1.0]])
    assert torch.equal(apply_repetition_penalty(logits, torch.tensor([[2, 2]]), torch.tensor([1.5])), logits)


# Noise


def test_noise_is_a_pure_function_of_seed_frame_and_lane() -> None:
    assert torch.equal(noise(7, 3, 2, 100), noise(7, 3, 2, 100))
    torch.manual_seed(1)
    first = noise(7, 3, 2, 100)
    torch.manual_seed(2)
    assert torch.equal(noise(7, 3, 2, 100), first)


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_size() -> None:
    assert torch.equal(noise(7, 3, 2, 1000)[:10], noise(7, 3, 2, 10))


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_noise_is_exponential(seed: int) -> None:
    """Mean and variance are 1, and the Kolmogorov-Smirnov distance is below the 0.1 % critical value."""
    drawn = noise(seed, 5, 0, 200_000).double().sort().values
    n = len(drawn)
    assert abs(float(drawn.mean()) - 1) < 4 / math.sqrt(n)
    assert abs(float(drawn.var()) - 1) < 4 * math.sqrt(8 / n)
    expected = 1 - torch.exp(-drawn)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    gap = torch.maximum((steps[1:] - expected).abs().max(), (expected - steps[:-1]).abs().max())
    assert float(gap) < 1.95 / math.sqrt(n)


def test_noise_is_never_zero_and_always_finite() -> None:
    frames = torch.arange(64)
    drawn = exponential_noise(torch.zeros(64, dtype=torch.long), frames, 0, 50_000)
    assert float(drawn.min()) > 0
    assert float(drawn.max()) < 17
    assert bool(drawn.isfinite().all())


def test_the_extreme_uniform_numbers_are_neither_zero_nor_one() -> None:
    """The smallest and largest uniform numbers stay strictly between 0 and 1 in fp32."""
    for bits in (0, 2**23 - 1):
        uniform = (torch.tensor(bits).float() + 0.5) * 2.0**-23
        assert 0 < float(uniform) < 1


SOURCES = [
    ("seeds", lambda i: noise(i, 0, 0, 4096)),
    ("frames", lambda i: noise(0, i, 0, 4096)),
    ("lanes", lambda i: noise(0, 0, i, 4096)),
    ("mixed", lambda i: noise(i, i, i % 11, 4096)),
]


@pytest.mark.parametrize("source", [s for _, s in SOURCES], ids=[name for name, _ in SOURCES])
def test_adjacent_seeds_frames_and_lanes_are_uncorrelated(source: object) -> None:
    assert callable(source)
    drawn = torch.stack([source(index) for index in range(11)]).double()
    correlation = torch.corrcoef(drawn) - torch.eye(11)
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(4096)
    assert not any(torch.equal(drawn[i], drawn[j]) for i in range(11) for j in range(i))


def test_noise_within_one_draw_is_uncorrelated() -> None:
    drawn = noise(3, 1, 0, 100_000).double() - 1
    for lag in (1, 2, 7, 64, 1024):
        assert abs(float((drawn[lag:] * drawn[:-lag]).mean())) < 4.5 / math.sqrt(len(drawn))


def test_lanes_of_different_frames_never_collide() -> None:
    """Eleven lanes are used and 64 are reserved per frame, so (frame, lane) maps to a unique number."""
    seen = {float(noise(0, frame, lane, 4).double().sum()) for frame in range(200) for lane in range(11)}
    assert len(seen) == 200 * 11


def test_tokens_are_sampled_as_often_as_their_probabilities_say() -> None:
    wanted = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    frames, n = torch.arange(40_000), 40_000
    drawn = exponential_noise(torch.full((n,), 11), frames, 0, 5)
    counts = exponential_race(wanted.expand(n, 5), drawn).bincount(minlength=5) / n
    sigma = (wanted * (1 - wanted) / n).sqrt()
    assert bool(((counts - wanted).abs() <= 4 * sigma).all())
    assert float(counts[4]) == 0.0


def test_sampling_from_thousands_of_equal_tokens_is_fair() -> None:
    """With so many tokens the winning noise is tiny; its coarse resolution there must not bias the result."""
    n, size = 8_000, 4097
    wins = torch.zeros(size)
    for start in range(0, n, 1000):
        drawn = exponential_noise(torch.full((1000,), 5), torch.arange(start, start + 1000), 0, size)
        wins += exponential_race(torch.full((1, size), 1 / size), drawn).bincount(minlength=size)
    expected = n / size
    chi_square = float(((wins - expected) ** 2 / expected).sum())
    assert abs(chi_square - (size - 1)) < 4 * math.sqrt(2 * (size - 1))
