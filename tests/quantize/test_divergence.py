import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.load import Checkpoint
from shoal.engine.kv_cache import AttentionMetadata, PagedKV, PrefillSegment
from shoal.model.dual_ar import DualAR
from shoal.quantize.apply import quantize_model
from shoal.quantize.divergence import Divergence, divergence, mean
from shoal.quantize.modes import Mode, WeightModes


@pytest.fixture(scope="module")
def speech(tiny: Checkpoint) -> Tensor:
    """A prompt of 20 columns and 40 frames."""
    config, generator = tiny.model.config, torch.Generator().manual_seed(1)
    columns = torch.randint(0, 100, (60, 11), generator=generator)
    columns[20:, 0] = config.semantic_begin_id + columns[20:, 1]
    return columns


def quantized(model: DualAR, mode: Mode) -> DualAR:
    copied = copy.deepcopy(model)
    quantize_model(copied, WeightModes(mode, mode))
    return copied


def test_a_model_does_not_diverge_from_itself(tiny: Checkpoint, speech: Tensor) -> None:
    assert divergence(tiny.model, tiny.model, speech) == Divergence(0.0, 0.0, 1.0, frames=40)


def test_fewer_bits_diverge_more(tiny: Checkpoint, speech: Tensor) -> None:
    modes: tuple[Mode, ...] = ("int8", "fp8", "int4")
    found = [divergence(tiny.model, quantized(tiny.model, mode), speech) for mode in modes]
    for smaller, larger in pairwise(found):
        assert 0 < smaller.semantic < larger.semantic
        assert 0 < smaller.codes < larger.codes


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-9), (torch.int8, 1e-3), (torch.float8_e4m3fn, 1e-2)])
def test_the_divergence_of_a_quantized_kv_cache_is_measured(
    dtype: torch.dtype, limit: float, tiny: Checkpoint, speech: Tensor
) -> None:
    kv = PagedKV(tiny.model.config.slow, blocks=4, size=16, dtype=dtype, device="cpu")
    no_decodes = torch.zeros(0, 4, dtype=torch.long)
    kv.begin_pass(
        AttentionMetadata(torch.arange(60), [PrefillSegment(0, 60, 60, torch.arange(4))], no_decodes, no_decodes[:, 0])
    )
    found = divergence(tiny.model, tiny.model, speech, cache=kv)
    assert found.semantic < limit
    assert (found.semantic > 1e-9) == (dtype != torch.float32)


def test_utterances_are_weighted_by_their_frames() -> None:
    parts = [Divergence(1.0, 0.0, 1.0, frames=1), Divergence(4.0, 3.0, 0.0, frames=2)]
    assert mean(parts) == Divergence(3.0, 2.0, pytest.approx(1 / 3), frames=3)  # type: ignore[arg-type]
