import pytest
import torch

from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import SIZES, random_checkpoint
from shoal.codec.config import CodecConfig
from shoal.codec.dac import Codec
from shoal.errors import ModelNotFound
from shoal.model.config import DualARConfig
from shoal.model.dual_ar import DualAR


@pytest.mark.parametrize(
    ("size", "parameters", "tensors"), [("s1-mini", 860_169_216, 287), ("s2-pro", 4_561_852_416, 358)]
)
def test_the_released_sizes_have_the_released_numbers_of_parameters(size: str, parameters: int, tensors: int) -> None:
    with init_empty_weights():
        model = DualAR(SIZES[size][0])
    stacked = sum(name.endswith("w13.weight") for name in model.state_dict())
    assert sum(tensor.numel() for tensor in model.state_dict().values()) == parameters
    assert len(model.state_dict()) + stacked == tensors


def test_the_released_codec_has_its_number_of_parameters() -> None:
    with init_empty_weights():
        codec, decoder = Codec(CodecConfig()), Codec(CodecConfig(), encoder=False)
    # Upstream counts a magnitude per normed row besides; folded, they are gone.
    assert round(sum(p.numel() for p in codec.parameters()) / 391_430_530, 3) == 1.0
    assert round(sum(p.numel() for p in decoder.parameters()) / 184_500_000, 2) == 1.0


@pytest.mark.parametrize(("size", "ids"), [("s1-mini", (151658, 155753, 151647)), ("s2-pro", (151678, 155773, 151645))])
def test_the_released_sizes_have_the_released_token_ids(size: str, ids: tuple[int, int, int]) -> None:
    config = SIZES[size][0]
    assert (config.semantic_begin_id, config.semantic_end_id, config.stop_id) == ids


@pytest.mark.parametrize(("size", "expected"), [("s1-mini", 114_688), ("s2-pro", 147_456)])
def test_the_released_sizes_need_this_much_cache_per_token(size: str, expected: int) -> None:
    assert SIZES[size][0].kv_bytes_per_token == expected


@pytest.mark.parametrize(("size", "expected"), [("s1-mini", 6144), ("s2-pro", 30720), ("tiny", 1024)])
def test_prompts_leave_context_for_generated_frames(size: str, expected: int) -> None:
    config: DualARConfig = SIZES[size][0]
    assert config.max_prompt == expected


def test_weights_depend_on_the_seed_and_nothing_else(tiny: Checkpoint) -> None:
    again, other = (random_checkpoint("tiny", seed=seed, dtype=torch.float32) for seed in (0, 1))
    name = "slow.layers.0.attention.wqkv.weight"
    assert torch.equal(again.model.state_dict()[name], tiny.model.state_dict()[name])
    assert not torch.equal(other.model.state_dict()[name], tiny.model.state_dict()[name])


def test_the_tokenizer_agrees_with_the_configuration(tiny: Checkpoint, tiny_s2: Checkpoint) -> None:
    for checkpoint in (tiny, tiny_s2):
        tokenizer, config = checkpoint.tokenizer, checkpoint.model.config
        ids = (tokenizer.semantic_begin, tokenizer.semantic_end, tokenizer.stop_id)
        assert ids == (config.semantic_begin_id, config.semantic_end_id, config.stop_id)
        assert tokenizer.vocab_size <= config.vocab_size
        assert tokenizer.encode("ä") == list("ä".encode())


def test_an_unknown_size_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match=r"random:huge: unknown size, expected one of random:tiny, .*random:s2-pro"):
        random_checkpoint("huge")
