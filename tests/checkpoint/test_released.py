"""Files as they are released, saved by upstream's tools or published by its users."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.format.directory import read_tokenizer
from shoal.checkpoint.format.layout import missing_files
from shoal.checkpoint.format.model_config import config_document
from shoal.checkpoint.format.weight_norm import unfold_weight_norm
from shoal.checkpoint.inspect import inspect
from shoal.checkpoint.load import Checkpoint, load_checkpoint, load_codec, load_model
from shoal.checkpoint.random import SIZES
from shoal.checkpoint.save import safetensors_name, save_model, upstream_tensors, write_json
from shoal.codec.dac import Codec
from shoal.errors import CheckpointError
from shoal.model.dual_ar import DualAR
from shoal.model.family import NANO, S1, S2
from shoal.model.linear import Fp8Linear, quantize_rows

Tensors = dict[str, Tensor]


def load(directory: Path) -> DualAR:
    return load_model(directory, read_tokenizer(directory))


def assert_same(ours: nn.Module, theirs: nn.Module, tolerance: float = 0.0) -> None:
    mine, others = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(others)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=tolerance, msg=name)


def change_file(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    torch.save(change(torch.load(path, weights_only=True)), path)


# Tensor inventories of the released files


def inventory(tensors: Tensors) -> tuple[int, int]:
    return len(tensors), sum(tensor.numel() for tensor in tensors.values())


def test_s2_pro_has_the_tensors_of_the_released_safetensors() -> None:
    with init_empty_weights():
        model = DualAR(SIZES["s2-pro"][0])
    tensors = {safetensors_name(name): tensor for name, tensor in upstream_tensors(model).items()}
    assert inventory(tensors) == (358, 4_561_852_416)
    lines = sorted(f"{name}|BF16|{'x'.join(map(str, tensor.shape))}" for name, tensor in tensors.items())
    fingerprint = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert fingerprint == "7080b1c9b5d5e95589a1efa18db19616170d7e35664e2e4e7f744bbf7180adad"


def test_s1_mini_has_the_tensors_of_the_released_pickle() -> None:
    with init_empty_weights():
        model = DualAR(SIZES["s1-mini"][0])
    assert inventory(upstream_tensors(model)) == (287, 860_169_216)


def test_the_codec_has_the_tensors_of_the_released_pickle() -> None:
    with init_empty_weights():
        codec = Codec(SIZES["s2-pro"][1])
    assert inventory(unfold_weight_norm(codec.state_dict())) == (535, 391_430_530)


# Fine-tunes saved by upstream's merge tool


@pytest.fixture
def merged(s2: Path, tiny_s2: Checkpoint) -> Path:
    """Directory as upstream's merge tool writes it for S2: flat config.json and model.pth."""
    config = tiny_s2.model.config
    flat = config_document(SIZES["tiny"][0]) | {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": True,
        "norm_fastlayer_input": True,
        "semantic_begin_id": config.semantic_begin_id,
        "semantic_end_id": config.semantic_end_id,
        "audio_embed_dim": config.slow.dim,
    }
    write_json(s2 / "config.json", flat)
    for path in s2.glob("model*"):
        path.unlink()
    torch.save({name: tensor.clone() for name, tensor in upstream_tensors(tiny_s2.model).items()}, s2 / "model.pth")
    return s2


def test_a_merged_fine_tune_of_s2_is_loaded_as_s2(merged: Path, tiny_s2: Checkpoint) -> None:
    checkpoint = load_checkpoint(merged)
    assert checkpoint.model.config == tiny_s2.model.config
    assert checkpoint.model.config.family is S2
    assert checkpoint.profile == tiny_s2.profile
    assert_same(checkpoint.model, tiny_s2.model)


def test_a_released_s1_is_s1_and_the_bundled_model_is_nano(s1: Path) -> None:
    assert load(s1).config.family is S1
    language = inspect("nano").language
    assert language is not None
    assert language.family == NANO.name


# Buffers, prefixes and repeated tensors


def test_stored_buffers_are_ignored(s1: Path, tiny: Checkpoint) -> None:
    buffers = {
        "freqs_cis": torch.zeros(4, 2),
        "fast_freqs_cis": torch.zeros(4, 2),
        "causal_mask": torch.ones(4, 4, dtype=torch.bool),
        "codebook_offsets": torch.arange(10),
        "layers.0.attention.kv_cache.k_cache": torch.zeros(1, 2, 4, 8),
        "fast_layers.0.attention.kv_cache.v_cache": torch.zeros(1, 2, 4, 8),
    }
    change_file(s1 / "model.pth", lambda stored: stored | buffers)
    assert_same(load(s1), tiny.model)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "model._orig_mod.", "model.module."])
def test_prefixes_of_compile_and_distributed_training_are_stripped(prefix: str, s1: Path, tiny: Checkpoint) -> None:
    change_file(s1 / "model.pth", lambda stored: {prefix + name: tensor for name, tensor in stored.items()})
    assert_same(load(s1), tiny.model)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_the_same_prefixes_are_stripped_from_a_codec(prefix: str, s1: Path, tiny: Checkpoint) -> None:
    change_file(s1 / "codec.pth", lambda stored: {prefix + name: tensor for name, tensor in stored.items()})
    assert_same(load_codec(s1), tiny.codec, tolerance=1e-6)


def test_a_tied_head_may_be_stored_a_second_time(merged: Path, tiny_s2: Checkpoint) -> None:
    change_file(merged / "model.pth", lambda stored: stored | {"output.weight": stored["embeddings.weight"].clone()})
    assert_same(load(merged), tiny_s2.model)


def test_a_tied_head_that_differs_from_the_embeddings_is_refused(merged: Path) -> None:
    change_file(merged / "model.pth", lambda stored: stored | {"output.weight": stored["embeddings.weight"] + 1})
    with pytest.raises(CheckpointError, match="output matrix differs from the embeddings"):
        load(merged)


def test_the_configuration_and_tensors_of_an_audio_encoder_are_ignored(s2: Path, tiny_s2: Checkpoint) -> None:
    stored = json.loads((s2 / "config.json").read_text())
    write_json(s2 / "config.json", stored | {"audio_encoder_config": {"hidden_size": 8}})
    assert_same(load(s2), tiny_s2.model)


def test_training_tensors_of_a_codec_are_ignored(s1: Path, tiny: Checkpoint) -> None:
    training = {
        "discriminator.0.weight": torch.zeros(2),
        "quantizer.semantic_predictor_module.layers.0.weight": torch.zeros(2),
        "quantizer.semantic_quantizer.quantizers.0.cluster_size": torch.zeros(2),
        "quantizer.semantic_quantizer.quantizers.0.embed_avg": torch.zeros(2),
        "ema.decoder.model.0.conv.bias": torch.zeros(2),
        "quantizer.post_module.layers.0.attention.kv_cache.k_cache": torch.zeros(2),
        "quantizer.post_module.causal_mask": torch.zeros(2),
    }
    change_file(s1 / "codec.pth", lambda stored: stored | training)
    assert_same(load_codec(s1), tiny.codec, tolerance=1e-6)


# Special tokens


def test_special_tokens_may_be_a_list_of_names(s1: Path, tiny: Checkpoint) -> None:
    names = list(json.loads((s1 / "special_tokens.json").read_text()))
    (s1 / "special_tokens.json").write_text(json.dumps(names))
    tokenizer = read_tokenizer(s1)
    assert (tokenizer.semantic_begin, tokenizer.stop_id) == (tiny.tokenizer.semantic_begin, tiny.tokenizer.stop_id)
    assert tokenizer.vocab_size == tiny.tokenizer.vocab_size


def test_special_tokens_may_be_absent_if_the_codebook_has_upstreams_size(s1: Path) -> None:
    (s1 / "special_tokens.json").unlink()
    assert missing_files(s1, codec=True) == ["special_tokens.json"]
    stored = json.loads((s1 / "config.json").read_text())
    write_json(s1 / "config.json", stored | {"codebook_size": 4096, "vocab_size": 4400})
    assert missing_files(s1, codec=True) == []
    tokenizer = read_tokenizer(s1)
    assert (tokenizer.semantic_begin, tokenizer.semantic_end) == (271, 271 + 4095)


# fp8 files of the community


@pytest.fixture
def fp8(s2: Path, tiny_s2: Checkpoint) -> tuple[Path, Tensors]:
    """Matrices as fp8 with fp32 scales [out, 1] in X.weight.scale, the rest as it was; and the dequantized matrices."""
    for path in s2.glob("model*"):
        path.unlink()
    tensors: Tensors = {}
    floats: Tensors = {}
    for name, tensor in upstream_tensors(tiny_s2.model).items():
        if tensor.dim() == 2 and "embeddings" not in name:
            q, scales = quantize_rows(tensor, torch.float8_e4m3fn, torch.float32)
            tensors |= {name: q, f"{name}.scale": scales[:, None].contiguous()}
            floats[name] = q.float() * scales[:, None]
        else:
            tensors[name] = floats[name] = tensor.clone()
    save_file(tensors, s2 / "model.safetensors")
    return s2, floats


def test_fp8_weights_with_a_scale_per_row_are_loaded(fp8: tuple[Path, Tensors], tiny_s2: Checkpoint) -> None:
    directory, floats = fp8
    model = load(directory)
    layer = model.get_submodule("slow.layers.0.feed_forward.w13")
    assert isinstance(layer, Fp8Linear)
    names = [f"layers.0.feed_forward.{piece}.weight" for piece in ("w1", "w3")]
    assert torch.equal(layer.dequantize(torch.float32), torch.cat([floats[name] for name in names]))
    assert torch.equal(model.slow.embeddings.weight, tiny_s2.model.slow.embeddings.weight)
    found = inspect(str(directory))
    assert found.problems == []
    assert found.language is not None
    assert found.language.quantization == "fp8"


def test_weights_of_other_quantization_tools_are_refused_with_what_is_supported(s1: Path) -> None:
    scale = {"layers.0.attention.wo.weight_scale": torch.ones(1)}
    change_file(s1 / "model.pth", lambda stored: stored | scale)
    with pytest.raises(CheckpointError, match=r"unsupported tool \(layers\.0\.attention\.wo\.weight_scale\)"):
        load(s1)


def test_a_row_scale_beside_a_float_weight_is_refused(s1: Path) -> None:
    change_file(s1 / "model.pth", lambda stored: stored | {"layers.0.attention.wo.weight.scale": torch.ones(48, 1)})
    with pytest.raises(CheckpointError, match=r"wo\.weight\.scale \[48, 1\] must be one scale per row of an fp8"):
        load(s1)


# What Shoal writes


def test_a_written_s1_has_no_key_that_upstreams_s1_code_rejects(saved: Path, tmp_path: Path, tiny: Checkpoint) -> None:
    stored = json.loads((saved / "s1" / "config.json").read_text())
    assert "norm_fastlayer_input" not in stored
    copied = Path(shutil.copytree(saved / "s1", tmp_path / "copy"))
    (copied / "model.pth").unlink()
    save_model(copied / "model.safetensors", tiny.model)
    assert_same(load(copied), tiny.model)
