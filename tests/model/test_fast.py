from dataclasses import replace

import pytest
import torch

from shoal.checkpoint.load import Checkpoint
from shoal.model.cache import DenseKVCache
from shoal.model.config import RESIDUAL_CODES
from shoal.model.fast import FastTransformer


@pytest.fixture(params=["s1", "s2"])
def checkpoint(request: pytest.FixtureRequest, tiny: Checkpoint, tiny_s2: Checkpoint) -> Checkpoint:
    return tiny if request.param == "s1" else tiny_s2


@torch.inference_mode()
def test_code_by_code_gives_the_logits_of_a_teacher_forced_frame(checkpoint: Checkpoint) -> None:
    config, fast = checkpoint.model.config, checkpoint.model.fast
    hidden, codes = torch.randn(3, config.slow.dim), torch.randint(0, 200, (3, config.num_codebooks))
    cache = DenseKVCache(config.fast, 3, config.num_codebooks, torch.float32, torch.device("cpu"))
    steps = [fast.first_logits(hidden, codes[:, 0], cache)]
    steps += [fast.next_logits(codes[:, book - 1], book, cache) for book in range(2, config.num_codebooks)]
    whole = fast.teacher_forced(hidden, codes)[:, 1:, : config.residual_size]
    torch.testing.assert_close(torch.stack(steps, dim=1), whole, rtol=0, atol=2e-5)


@torch.inference_mode()
def test_the_last_code_of_a_frame_is_never_read(checkpoint: Checkpoint) -> None:
    hidden, codes = torch.randn(1, checkpoint.model.config.slow.dim), torch.randint(0, 200, (1, 10))
    other = codes.clone()
    other[:, -1] += 1
    fast = checkpoint.model.fast
    assert torch.equal(fast.teacher_forced(hidden, codes), fast.teacher_forced(hidden, other))


def test_logits_cover_only_codes_that_the_codec_has(tiny: Checkpoint) -> None:
    wide = replace(tiny.model.config, codebook_size=RESIDUAL_CODES + 8)
    assert wide.residual_size == RESIDUAL_CODES
    assert FastTransformer(wide).residual_size == RESIDUAL_CODES
    assert tiny.model.config.residual_size == 256


def test_a_narrower_fast_model_projects_the_hidden_state(tiny: Checkpoint) -> None:
    narrow = replace(tiny.model.config, fast=replace(tiny.model.config.fast, dim=32))
    fast = FastTransformer(narrow)
    assert {"project_in.weight", "project_in.bias"} <= set(fast.state_dict())
    assert fast.teacher_forced(torch.randn(2, 48), torch.zeros(2, 10, dtype=torch.long)).shape == (2, 10, 256)
