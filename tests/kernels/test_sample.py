"""The plain sampling path: what survives, what is drawn, and that noise is a pure function of its place."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.kernels.sample import exponential_noise, penalise, probabilities, race

PROBABILITIES = torch.tensor([0.5, 0.3, 0.15, 0.05])
LOGITS = PROBABILITIES.log()[None]


def filtered(
    *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 100, logits: torch.Tensor = LOGITS
) -> torch.Tensor:
    rows = len(logits)
    return probabilities(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k),
    )


def survivors(probs: torch.Tensor) -> list[int]:
    return probs[0].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("top_p", "expected"), [(0.49, [0]), (0.51, [0]), (0.81, [0, 1]), (0.96, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
)
def test_the_token_that_crosses_the_edge_is_dropped_and_the_first_always_stays(
    top_p: float, expected: list[int]
) -> None:
    assert survivors(filtered(top_p=top_p)) == expected


def test_the_nucleus_is_taken_before_the_temperature() -> None:
    # At temperature 0.1 the first token alone would hold nearly everything; the nucleus does not see that.
    assert survivors(filtered(top_p=0.81, temperature=0.1)) == [0, 1]
    assert survivors(filtered(top_p=0.81, temperature=1.9)) == [0, 1]


def test_temperature_sharpens_what_survived() -> None:
    probs = filtered(temperature=0.5)
    torch.testing.assert_close(probs[0], PROBABILITIES**2 / (PROBABILITIES**2).sum())
    assert filtered(temperature=0.0)[0, 0] == 1.0


def test_top_k_counts_from_the_likeliest() -> None:
    assert survivors(filtered(top_k=1)) == [0]
    assert survivors(filtered(top_k=3)) == [0, 1, 2]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.01, 1.0), st.integers(1, 40)), min_size=1, max_size=6),
)
def test_a_row_is_filtered_the_same_alone_and_in_company(seed: int, rows: list[tuple[float, float, int]]) -> None:
    logits = torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(seed))
    temperature, top_p, top_k = (torch.tensor(column) for column in zip(*rows, strict=True))
    together = probabilities(logits, temperature.float(), top_p.float(), top_k)
    for row in range(len(rows)):
        one = slice(row, row + 1)
        alone = probabilities(logits[one], temperature[one].float(), top_p[one].float(), top_k[one])
        assert torch.equal(alone[0] > 0, together[row] > 0)
        torch.testing.assert_close(alone[0], together[row])


def test_a_penalty_moves_logits_of_both_signs_down_and_only_where_it_is_told() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    pushed = penalise(logits, torch.tensor([[0, 1, 1, 4]]), torch.tensor([2.0]))
    assert pushed.tolist() == [[1.0, -4.0, 1.0, -1.0]]


def test_noise_is_exponential() -> None:
    seeds = torch.arange(64) * 7919
    noise = exponential_noise(seeds, torch.arange(64), 3, 4096)
    assert noise.min() > 0
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 1.0) < 0.01
    assert abs(float(noise.var()) - 1.0) < 0.03
    # The share beyond t is exp(-t), also far out.
    for t in (0.01, 0.5, 2.0, 6.0):
        assert abs(float((noise > t).float().mean()) - math.exp(-t)) < 0.005


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 10_000), st.integers(0, 10))
def test_noise_depends_on_seed_frame_and_lane_and_nothing_else(seed: int, frame: int, lane: int) -> None:
    def noise(seed: int, frame: int, lane: int) -> torch.Tensor:
        return exponential_noise(torch.tensor([seed]), torch.tensor([frame]), lane, 64)[0]

    here = noise(seed, frame, lane)
    company = exponential_noise(torch.tensor([seed ^ 1, seed]), torch.tensor([frame + 5, frame]), lane, 64)
    assert torch.equal(here, company[1])
    for other in (noise(seed ^ 1, frame, lane), noise(seed, frame + 1, lane), noise(seed, frame, lane + 1)):
        assert (here != other).float().mean() > 0.9


def test_neighbouring_places_are_uncorrelated() -> None:
    seeds = torch.full((500,), 42)
    frames = torch.arange(500)
    lanes = torch.stack([exponential_noise(seeds, frames, lane, 256) for lane in range(4)])
    centred = lanes - 1.0
    for shifted in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(1, 2)):
        assert abs(float((centred * shifted).mean())) < 0.01


def test_races_are_won_in_proportion_to_the_probabilities() -> None:
    draws = 20_000
    noise = exponential_noise(torch.arange(draws), torch.zeros(draws, dtype=torch.long), 0, 4)
    won = race(PROBABILITIES.expand(draws, 4), noise)
    share = torch.bincount(won, minlength=4) / draws
    torch.testing.assert_close(share, PROBABILITIES, atol=0.012, rtol=0)
