import pytest
import torch

from shoal.model.sampling import SamplingTensors
from shoal.model.sampling_settings import fold_seed
from shoal.speech import SamplingParams


@pytest.mark.parametrize("low", [0, 1, 2**31, 2**32 - 1])
def test_all_64_bits_of_a_seed_count(low: int) -> None:
    seeds = [(high << 32) | low for high in (*range(1000), *(1 << bit for bit in range(10, 32)))]
    assert len({fold_seed(seed) for seed in seeds}) == len(seeds)
    seeds = [(low << 32) | half for half in (*range(1000), *(1 << bit for bit in range(10, 32)))]
    assert len({fold_seed(seed) for seed in seeds}) == len(seeds)


def test_seeds_that_fit_into_32_bits_are_taken_as_they_are() -> None:
    assert [fold_seed(seed) for seed in (0, 1, 2**32 - 1)] == [0, 1, 2**32 - 1]


def test_top_k_zero_means_no_limit() -> None:
    rows = SamplingTensors.from_settings([SamplingParams(top_k=0), SamplingParams(top_k=5)], torch.device("cpu"))
    assert rows.top_k.tolist() == [2**31, 5]


def test_the_host_knows_whether_any_row_has_a_penalty() -> None:
    plain, penalized = SamplingParams(repetition_penalty=1.0), SamplingParams(repetition_penalty=1.2)
    assert SamplingTensors.from_settings([plain, penalized], torch.device("cpu")).has_penalty
    assert not SamplingTensors.from_settings([plain, plain], torch.device("cpu")).has_penalty


def test_rows_can_be_selected_in_any_order() -> None:
    settings = [SamplingParams(seed=1), SamplingParams(seed=2), SamplingParams(seed=3, top_k=4, repetition="window")]
    chosen = SamplingTensors.from_settings(settings, torch.device("cpu")).select(torch.tensor([2, 0]), has_penalty=True)
    assert chosen.seed.tolist() == [3, 1]
    assert chosen.top_k.tolist() == [4, 2**31]
    assert chosen.whole_window.tolist() == [True, False]
