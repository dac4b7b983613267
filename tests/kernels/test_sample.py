import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.kernels.sample import apply_repetition_penalty, exponential_noise, exponential_race, probabilities
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


def test_the_token_that_crosses_the_edge_of_the_nucleus_is_dropped() -> None:
    assert survivors(probs(log(0.5, 0.3, 0.2), top_p=0.7)) == [0]
    assert survivors(probs(log(0.5, 0.3, 0.2), top_p=0.81)) == [0, 1]


def test_the_likeliest_token_always_stays() -> None:
    assert survivors(probs(log(0.2, 0.7, 0.1), top_p=1e-6)) == [1]
    assert survivors(probs(log(0.2, 0.7, 0.1), top_k=1)) == [1]
    assert survivors(probs(log(0.2, 0.7, 0.1), temperature=0.0)) == [1]


def test_the_nucleus_is_taken_before_the_temperature() -> None:
    """A flatter distribution would let more into the nucleus; a sharper one fewer. Neither happens."""
    shares = log(0.6, 0.2, 0.15, 0.05)
    for temperature in (0.2, 1.0, 1.9):
        assert survivors(probs(shares, temperature, top_p=0.9)) == [0, 1]


def test_the_temperature_sharpens_what_is_left() -> None:
    left = probs(log(0.6, 0.2, 0.15, 0.05), temperature=0.5, top_p=0.9)
    torch.testing.assert_close(left, torch.tensor([0.9, 0.1, 0.0, 0.0]))


def test_the_limit_of_ranks_holds_besides_the_nucleus() -> None:
    shares = log(0.4, 0.3, 0.2, 0.1)
    assert survivors(probs(shares, top_p=0.95, top_k=2)) == [0, 1]
    assert survivors(probs(shares, top_p=0.5, top_k=3)) == [0]


def test_equal_logits_lose_no_more_than_the_limit_asks_for() -> None:
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
    likeliest = torch.tensor(logits) == max(logits)  # of equals, any one may be the one that is kept
    assert float(found[likeliest].max()) == float(found.max())


ROWS = st.lists(
    st.tuples(st.floats(0, 2), st.floats(1e-3, 1), st.integers(0, 30), st.floats(0.1, 2), st.integers(0, 2**64 - 1)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=50)
@given(rows=ROWS, data=st.data())
def test_a_row_comes_out_the_same_alone_or_in_any_batch(
    rows: list[tuple[float, float, int, float, int]], data: st.DataObject
) -> None:
    wanted = [
        SamplingParams(temperature=t, top_p=p, top_k=k, repetition_penalty=r, seed=s, repetition="window")
        for t, p, k, r, s in rows
    ]
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(len(rows)))
    columns = torch.randint(
        0, 51, (len(rows), 4), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    )
    frames = torch.arange(len(rows)) * 7
    together = draw(wanted, logits, columns, frames)
    for index in range(len(rows)):
        here = slice(index, index + 1)
        assert draw(wanted[here], logits[here], columns[here], frames[here]).tolist() == together[here].tolist()


def draw(settings: list[SamplingParams], logits: Tensor, columns: Tensor, frames: Tensor) -> Tensor:
    rows = SamplingTensors.from_settings(settings, torch.device("cpu"))
    left = probabilities(
        apply_repetition_penalty(logits, columns, rows.penalty), rows.temperature, rows.top_p, rows.top_k
    )
    return exponential_race(left, exponential_noise(rows.seed, frames, 0, logits.shape[-1]))


# Penalty


def test_the_penalty_pushes_towards_less_likely_on_either_side_of_zero() -> None:
    pushed = apply_repetition_penalty(torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[0, 1]]), torch.tensor([2.0]))
    assert pushed.tolist() == [[1.0, -4.0, 1.0]]


def test_a_token_named_twice_is_penalised_once() -> None:
    pushed = apply_repetition_penalty(torch.tensor([[2.0, 1.0]]), torch.tensor([[0, 0, 0]]), torch.tensor([2.0]))
    assert pushed.tolist() == [[1.0, 1.0]]


def test_a_column_behind_the_last_is_ignored() -> None:
    logits = torch.tensor([[2.0, 1.0]])
    assert torch.equal(apply_repetition_penalty(logits, torch.tensor([[2, 2]]), torch.tensor([1.5])), logits)


# Noise


def test_noise_is_a_pure_function_of_seed_frame_and_lane() -> None:
    assert torch.equal(noise(7, 3, 2, 100), noise(7, 3, 2, 100))
    torch.manual_seed(1)
    first = noise(7, 3, 2, 100)
    torch.manual_seed(2)
    assert torch.equal(noise(7, 3, 2, 100), first)


def test_noise_of_a_column_does_not_depend_on_how_many_there_are() -> None:
    assert torch.equal(noise(7, 3, 2, 1000)[:10], noise(7, 3, 2, 10))


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_noise_is_exponential(seed: int) -> None:
    """Mean and variance 1, and the largest gap to the distribution within what chance explains once in a thousand."""
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


def test_the_extremes_of_the_generator_stay_inside() -> None:
    """The smallest and largest uniform numbers it can make: neither is 0 or 1 in fp32."""
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
def test_neighbouring_sources_of_noise_have_nothing_in_common(source: object) -> None:
    assert callable(source)
    drawn = torch.stack([source(index) for index in range(11)]).double()
    correlation = torch.corrcoef(drawn) - torch.eye(11)
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(4096)
    assert not any(torch.equal(drawn[i], drawn[j]) for i in range(11) for j in range(i))


def test_columns_of_one_draw_have_nothing_in_common() -> None:
    drawn = noise(3, 1, 0, 100_000).double() - 1
    for lag in (1, 2, 7, 64, 1024):
        assert abs(float((drawn[lag:] * drawn[:-lag]).mean())) < 4.5 / math.sqrt(len(drawn))


def test_lanes_of_a_frame_never_meet_those_of_the_next() -> None:
    """Eleven lanes are used and 64 are reserved, so (frame, lane) is one number without collisions."""
    seen = {float(noise(0, frame, lane, 4).double().sum()) for frame in range(200) for lane in range(11)}
    assert len(seen) == 200 * 11


def test_a_race_is_won_as_often_as_the_probabilities_say() -> None:
    wanted = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    frames, n = torch.arange(40_000), 40_000
    drawn = exponential_noise(torch.full((n,), 11), frames, 0, 5)
    counts = exponential_race(wanted.expand(n, 5), drawn).bincount(minlength=5) / n
    sigma = (wanted * (1 - wanted) / n).sqrt()
    assert bool(((counts - wanted).abs() <= 4 * sigma).all())
    assert float(counts[4]) == 0.0


def test_a_race_over_thousands_of_columns_is_fair() -> None:
    """With so many columns the winner's noise is tiny: its coarseness there must not favour anyone."""
    n, size = 8_000, 4097
    wins = torch.zeros(size)
    for start in range(0, n, 1000):
        drawn = exponential_noise(torch.full((1000,), 5), torch.arange(start, start + 1000), 0, size)
        wins += exponential_race(torch.full((1, size), 1 / size), drawn).bincount(minlength=size)
    expected = n / size
    chi_square = float(((wins - expected) ** 2 / expected).sum())
    assert abs(chi_square - (size - 1)) < 4 * math.sqrt(2 * (size - 1))
