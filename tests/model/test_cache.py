from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.checkpoint.load import Checkpoint
from shoal.model.cache import DenseKVCache, NoKVCache, attend, causal_mask
from shoal.model.dual_ar import DualAR

LENGTH = 24


def random_tokens(checkpoint: Checkpoint, rows: int, length: int) -> Tensor:
    """[rows, length, 1 + codebooks], text and audio mixed."""
    config, generator = checkpoint.model.config, torch.Generator().manual_seed(rows)
    main = torch.randint(0, config.vocab_size, (rows, length, 1), generator=generator)
    codes = torch.randint(0, config.codebook_size, (rows, length, config.num_codebooks), generator=generator)
    return torch.cat((main, codes), dim=-1)


@torch.inference_mode()
def prefill(model: DualAR, tokens: Tensor, cuts: list[int]) -> Tensor:
    """Hidden states [rows, length, dim] of tokens fed in pieces that end at the cuts."""
    rows, length = tokens.shape[:2]
    cache = DenseKVCache(model.config.slow, rows, length, torch.float32, torch.device("cpu"))
    pieces = []
    for begin, end in pairwise([0, *cuts, length]):
        positions = torch.arange(begin, end).repeat(rows)
        hidden = model.slow(tokens[:, begin:end].flatten(0, 1), positions, cache)
        pieces.append(hidden.unflatten(0, (rows, -1)))
    return torch.cat(pieces, dim=1)


@settings(deadline=None, max_examples=25)
@given(cuts=st.sets(st.integers(1, LENGTH - 1)), rows=st.integers(1, 3))
def test_chunked_prefill_gives_the_hidden_states_of_one_pass(cuts: set[int], rows: int, tiny: Checkpoint) -> None:
    tokens = random_tokens(tiny, rows, LENGTH)
    whole = prefill(tiny.model, tokens, [])
    torch.testing.assert_close(prefill(tiny.model, tokens, sorted(cuts)), whole, rtol=0, atol=2e-5)


def test_a_pass_without_cache_gives_the_same_hidden_states(tiny: Checkpoint) -> None:
    tokens = random_tokens(tiny, 2, LENGTH)
    positions = torch.arange(LENGTH).repeat(2)
    with torch.inference_mode():
        hidden = tiny.model.slow(tokens.flatten(0, 1), positions, NoKVCache(2)).unflatten(0, (2, -1))
    torch.testing.assert_close(hidden, prefill(tiny.model, tokens, []), rtol=0, atol=2e-5)


def test_rows_do_not_attend_to_each_other(tiny: Checkpoint) -> None:
    tokens = random_tokens(tiny, 3, LENGTH)
    together = prefill(tiny.model, tokens, [7])
    for row in range(3):
        alone = prefill(tiny.model, tokens[row : row + 1], [7])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=2e-5)


def test_a_token_does_not_attend_to_later_tokens(tiny: Checkpoint) -> None:
    tokens = random_tokens(tiny, 1, LENGTH)
    changed = tokens.clone()
    changed[:, 10:] = 0
    before, after = prefill(tiny.model, tokens, []), prefill(tiny.model, changed, [])
    torch.testing.assert_close(after[:, :10], before[:, :10], rtol=0, atol=2e-5)
    assert not torch.allclose(after[:, 10:], before[:, 10:], atol=1e-2)


def test_stale_entries_of_a_reused_cache_are_never_read(tiny: Checkpoint) -> None:
    model, tokens = tiny.model, random_tokens(tiny, 1, 6)[0]
    whole = DenseKVCache(model.config.slow, 3, 8, torch.float32, torch.device("cpu"))
    cache = whole.first_rows(1)
    with torch.inference_mode():
        first = model.slow(tokens, torch.arange(6), cache)
        whole.keys.fill_(torch.nan)
        whole.values.fill_(torch.nan)
        assert torch.equal(model.slow(tokens, torch.arange(6), whole.first_rows(1)), first)
    assert cache.keys.data_ptr() == whole.keys.data_ptr()


def test_consecutive_query_heads_share_a_key_head() -> None:
    q, k, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    wide = attend(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1))
    torch.testing.assert_close(attend(q, k, v), wide)


@pytest.mark.parametrize(("new", "seen"), [(1, 1), (1, 4), (3, 3), (2, 5)])
def test_the_causal_mask_shows_the_past_and_the_token_itself(new: int, seen: int) -> None:
    mask = causal_mask(new, seen, torch.device("cpu"))
    assert mask.sum(1).tolist() == list(range(seen - new + 1, seen + 1))
