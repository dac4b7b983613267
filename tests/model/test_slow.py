import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.load import Checkpoint
from shoal.model.slow import Head, SlowTransformer


@pytest.fixture(params=["s1", "s2"])
def slow(request: pytest.FixtureRequest, tiny: Checkpoint, tiny_s2: Checkpoint) -> SlowTransformer:
    return (tiny if request.param == "s1" else tiny_s2).model.slow


def token(slow: SlowTransformer, semantic: int, codes: list[int]) -> Tensor:
    return torch.tensor([[semantic, *codes]])


# Embedding


def test_a_text_token_is_embedded_without_its_codes(slow: SlowTransformer) -> None:
    plain = slow.embed(token(slow, 65, [0] * 10))
    assert torch.equal(plain, slow.embed(token(slow, 65, list(range(10)))))
    assert torch.equal(plain[0], slow.embeddings.weight[65])


def test_an_audio_token_is_embedded_as_the_scaled_sum_of_id_and_codes(slow: SlowTransformer) -> None:
    config, codes = slow.config, [5, 9, 2, 7, 1, 0, 3, 8, 6, 4]
    semantic = config.semantic_begin_id + 5
    rows = [slow.codebook_embeddings.weight[book * config.codebook_size + code] for book, code in enumerate(codes)]
    expected = (slow.embeddings.weight[semantic] + torch.stack(rows).sum(0)) / math.sqrt(11)
    torch.testing.assert_close(slow.embed(token(slow, semantic, codes))[0], expected)


def test_the_first_and_last_semantic_ids_are_audio_and_their_neighbours_are_not(slow: SlowTransformer) -> None:
    config = slow.config
    for semantic, audio in ((config.semantic_begin_id, True), (config.semantic_end_id, True),
                            (config.semantic_begin_id - 1, False), (config.stop_id, False)):  # fmt: skip
        changed = slow.embed(token(slow, semantic, [1] * 10)) - slow.embed(token(slow, semantic, [2] * 10))
        assert bool(changed.any()) is audio


def test_without_scaling_the_embeddings_are_only_summed(slow: SlowTransformer) -> None:
    semantic = slow.config.semantic_begin_id
    scaled = slow.embed(token(slow, semantic, [1] * 10))
    plain = SlowTransformer(replace(slow.config, scale_codebook_embeddings=False))
    plain.load_state_dict(slow.state_dict())
    torch.testing.assert_close(plain.embed(token(slow, semantic, [1] * 10)), scaled * math.sqrt(11))


# Head


def test_the_pruned_head_gives_the_logits_of_the_full_head_at_its_ids(slow: SlowTransformer) -> None:
    cut, whole = Head(slow), Head(slow, full_vocab=True)
    normed = torch.randn(4, slow.config.slow.dim)
    torch.testing.assert_close(cut(normed), whole(normed)[:, cut.ids], rtol=0, atol=1e-5)


def test_the_pruned_head_holds_every_code_in_order_and_then_the_stop_token(slow: SlowTransformer) -> None:
    config = slow.config
    assert Head(slow).ids.tolist() == [*range(config.semantic_begin_id, config.semantic_end_id + 1), config.stop_id]


@pytest.mark.parametrize("whole", [False, True])
def test_logit_index_is_the_inverse_of_ids(whole: bool, slow: SlowTransformer) -> None:
    head = Head(slow, full_vocab=whole)
    assert torch.equal(head.logit_index(head.ids), torch.arange(len(head.ids)))
    everything = torch.arange(slow.config.vocab_size)
    indices = head.logit_index(everything)
    legal = indices < len(head.ids)
    assert set(everything[legal].tolist()) == set(head.ids.tolist())
    assert torch.equal(head.ids[indices[legal]], everything[legal])


def test_an_id_that_cannot_be_sampled_maps_past_the_last_logit(slow: SlowTransformer) -> None:
    head = Head(slow)
    assert head.logit_index(torch.tensor([0, 65])).tolist() == [len(head.ids)] * 2


def test_the_full_head_shares_the_models_weights(slow: SlowTransformer) -> None:
    source = slow.embeddings.weight if slow.config.tie_word_embeddings else slow.output.weight
    assert Head(slow, full_vocab=True).output.weight.data_ptr() == source.data_ptr()
