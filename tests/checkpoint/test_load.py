import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.checkpoint.load import Checkpoint, load_checkpoint, load_codec, load_model
from shoal.checkpoint.random import random_checkpoint
from shoal.checkpoint.save import save_model, save_random, upstream_tensors
from shoal.errors import CheckpointError, InvalidRequest, ModelNotFound, UnsafeCheckpoint
from shoal.model.dual_ar import DualAR
from shoal.model.generate import generate
from shoal.model.linear import Int8Linear
from shoal.model.slow import Head
from shoal.speech import SamplingParams
from shoal.text.tokenizer import load_tokenizer

INT8 = "quant/fs-1.2-int8-20250603_120000"


def load(directory: Path) -> DualAR:
    return load_model(directory, load_tokenizer(directory))


def assert_same(ours: nn.Module, theirs: nn.Module, tolerance: float = 0.0) -> None:
    mine, others = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(others)
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=tolerance, msg=name)


# Round trips


@pytest.mark.parametrize("family", ["s1", "s2"])
def test_a_saved_checkpoint_loads_bit_for_bit(family: str, saved: Path, tiny: Checkpoint, tiny_s2: Checkpoint) -> None:
    original, loaded = tiny if family == "s1" else tiny_s2, load_checkpoint(saved / family)
    assert loaded.model.config == original.model.config
    assert loaded.codec.config == original.codec.config
    assert_same(loaded.model, original.model)
    assert_same(loaded.codec, original.codec, tolerance=1e-6)  # folding divides by a norm and multiplies it again
    assert loaded.tokenizer.encode("Hé!") == original.tokenizer.encode("Hé!")


def test_weights_keep_their_stored_dtype_unless_another_is_given(tmp_path: Path) -> None:
    save_random(tmp_path / "bf16", random_checkpoint("tiny"))
    assert load(tmp_path / "bf16").dtype == torch.bfloat16
    wide = load_model(tmp_path / "bf16", load_tokenizer(tmp_path / "bf16"), dtype=torch.float32)
    assert {tensor.dtype for tensor in wide.state_dict().values()} == {torch.float32}
    codec = load_checkpoint(tmp_path / "bf16").codec
    assert {tensor.dtype for tensor in codec.state_dict().values()} == {torch.float32}


def test_a_single_safetensors_file_is_read_for_either_family(
    s1: Path, s2: Path, tiny: Checkpoint, tiny_s2: Checkpoint
) -> None:
    (s1 / "model.pth").unlink()
    (s2 / "model.safetensors.index.json").unlink()
    for directory, checkpoint in ((s1, tiny), (s2, tiny_s2)):
        save_model(directory / "model.safetensors", checkpoint.model)
        assert_same(load(directory), checkpoint.model)


def test_shards_take_precedence_over_one_file_and_safetensors_over_a_pickle(s2: Path, tiny_s2: Checkpoint) -> None:
    (s2 / "model.pth").write_bytes(b"not read")
    (s2 / "model.safetensors").write_bytes(b"not read either")
    assert_same(load(s2), tiny_s2.model)


def test_a_lightning_file_is_unwrapped(s1: Path, tiny: Checkpoint) -> None:
    tensors = {f"model.{name}": tensor.clone() for name, tensor in upstream_tensors(tiny.model).items()}
    torch.save({"state_dict": tensors, "epoch": 3}, s1 / "model.pth")
    assert_same(load(s1), tiny.model)


def test_tensors_of_the_audio_tower_are_ignored(s1: Path, tiny: Checkpoint) -> None:
    tensors = {name: tensor.clone() for name, tensor in upstream_tensors(tiny.model).items()}
    torch.save(tensors | {"audio_projector.weight": torch.zeros(3)}, s1 / "model.pth")
    assert_same(load(s1), tiny.model)


def test_separate_query_key_and_value_weights_are_stacked(s1: Path, tiny: Checkpoint) -> None:
    tensors = {name: tensor.clone() for name, tensor in upstream_tensors(tiny.model).items()}
    for name in [name for name in tensors if ".wqkv." in name]:
        block = tiny.model.config.fast if name.startswith("fast_") else tiny.model.config.slow
        heads = [block.n_head, block.n_local_heads, block.n_local_heads]
        pieces = tensors.pop(name).split([count * block.head_dim for count in heads])
        tensors |= {name.replace("wqkv", w): piece.clone() for w, piece in zip(("wq", "wk", "wv"), pieces, strict=True)}
    torch.save(tensors, s1 / "model.pth")
    assert_same(load(s1), tiny.model)


def test_a_codec_under_a_generator_prefix_is_found_among_other_parts(s1: Path, tiny: Checkpoint) -> None:
    stored = torch.load(s1 / "codec.pth", weights_only=True)
    wrapped = {f"generator.{name}": tensor for name, tensor in stored.items()}
    torch.save({"state_dict": wrapped | {"discriminator.weight": torch.zeros(2)}}, s1 / "codec.pth")
    assert_same(load_codec(s1), tiny.codec, tolerance=1e-6)


def test_a_codec_in_safetensors_is_read_too(s1: Path, tiny: Checkpoint) -> None:
    save_file(torch.load(s1 / "codec.pth", weights_only=True), s1 / "codec.safetensors")
    (s1 / "codec.pth").unlink()
    assert_same(load_codec(s1), tiny.codec, tolerance=1e-6)


def test_a_codec_without_codec_json_is_the_released_one(s1: Path) -> None:
    (s1 / "codec.json").unlink()
    with pytest.raises(CheckpointError, match=r"codec\.pth: \d+ tensors are missing"):
        load_codec(s1)


def test_a_codec_without_encoder_holds_only_the_decode_side(s1: Path, tiny: Checkpoint) -> None:
    codec = load_codec(s1, encoder=False)
    assert not any(name.startswith(("encoder.", "quantizer.pre", "quantizer.down")) for name in codec.state_dict())
    codes = torch.randint(0, 100, (1, 10, 5))
    torch.testing.assert_close(codec.decode(codes), tiny.codec.decode(codes), rtol=0, atol=1e-5)
    with pytest.raises(InvalidRequest, match="without its encoder"):
        codec.encode(torch.zeros(1, 100))


# Quantised directories


def test_upstreams_int8_directory_loads_and_generates_with_either_head(golden: Path) -> None:
    directory = golden / INT8
    model = load_model(directory, load_tokenizer(directory), dtype=torch.float32)
    assert isinstance(model.get_submodule("slow.layers.0.attention.wqkv"), Int8Linear)
    assert isinstance(model.slow.output, Int8Linear)
    prompt = torch.tensor([[65, 66, 67], *[[0, 0, 0]] * 10])
    for whole in (False, True):
        codes = generate(
            model, Head(model.slow, full_vocab=whole), prompt, SamplingParams(max_frames=3, top_p=0.9)
        ).codes
        assert codes.shape[0] == 10


def test_a_quantized_directory_without_codec_says_where_to_get_one(golden: Path, s1: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no codec, expected.*that of the original model with --codec"):
        load_checkpoint(golden / INT8)
    assert load_checkpoint(golden / INT8, codec=s1).codec.can_encode
    assert load_checkpoint(golden / INT8, codec=s1 / "codec.pth").codec.can_encode


def test_quantization_is_detected_from_the_tensors_not_the_directory_name(golden: Path, tmp_path: Path) -> None:
    renamed = Path(shutil.copytree(golden / INT8, tmp_path / "my-model"))
    assert isinstance(load(renamed).get_submodule("slow.layers.0.attention.wo"), Int8Linear)


# Bad input, each with its own words


def test_a_directory_that_does_not_exist_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no such directory; .*shoal pull s1-mini"):
        load_checkpoint(tmp_path / "nowhere")


def test_an_empty_directory_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer found"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.pth", "codec.pth", "special_tokens.json"])
def test_a_missing_file_is_named(name: str, s1: Path) -> None:
    (s1 / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_checkpoint(s1)


@pytest.mark.parametrize("name", ["model.pth", "codec.pth"])
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.99, 0.9999])
def test_a_truncated_pickle_is_named(name: str, kept: float, s1: Path) -> None:
    truncate(s1 / name, kept)
    with pytest.raises(CheckpointError, match=rf"{name}: truncated, or not a PyTorch file"):
        load_checkpoint(s1)


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.9999])
def test_a_truncated_shard_is_named(kept: float, s2: Path) -> None:
    shard = second_shard(s2)
    truncate(shard, kept)
    with pytest.raises(CheckpointError, match=rf"{shard.name}: truncated"):
        load_checkpoint(s2)


def test_a_missing_shard_is_named(s2: Path) -> None:
    shard = second_shard(s2)
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}: no such file"):
        load_checkpoint(s2)


def test_a_tensor_that_no_shard_holds_is_named(s2: Path) -> None:
    index = s2 / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["text_model.model.lost.weight"] = second_shard(s2).name
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"1 tensor is in no shard: text_model\.model\.lost\.weight"):
        load_checkpoint(s2)


@pytest.mark.parametrize("shard", ["../s1/model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 7, None])
def test_an_index_cannot_point_out_of_its_directory(shard: object, s2: Path) -> None:
    document = {"weight_map": {"text_model.model.norm.weight": shard}}
    (s2 / "model.safetensors.index.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"file names beside it|no such file"):
        load_checkpoint(s2)


@pytest.mark.parametrize("document", [{}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_without_a_map_is_refused(document: object, s2: Path) -> None:
    (s2 / "model.safetensors.index.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="weight_map must map"):
        load_checkpoint(s2)


@pytest.mark.parametrize("name", ["config.json", "codec.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[1]", b'"text"'])
def test_garbage_in_place_of_json_is_named(name: str, content: bytes, s2: Path) -> None:
    (s2 / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name}: (not readable as JSON|expected a JSON object)"):
        load_checkpoint(s2)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(s1: Path) -> None:
    change(s1 / "model.pth", {"layers.1.attention.wo.weight": torch.zeros(48, 65)})
    with pytest.raises(CheckpointError, match=r"slow\.layers\.1\.attention\.wo\.weight is \[48, 65\].*\[48, 64\]"):
        load(s1)


def test_missing_and_unexpected_tensors_are_named(s1: Path) -> None:
    change(s1 / "model.pth", {"norm.weight": None})
    with pytest.raises(CheckpointError, match=r"1 tensor is missing: slow\.norm\.weight"):
        load(s1)
    change(s1 / "model.pth", {"norm.weight": torch.ones(48), "layers.7.attention.wo.weight": torch.zeros(48, 64)})
    with pytest.raises(CheckpointError, match=r"1 unexpected tensor: slow\.layers\.7\.attention\.wo\.weight"):
        load(s1)


def test_many_missing_tensors_are_counted_and_a_few_named(s1: Path) -> None:
    torch.save({"norm.weight": torch.ones(48)}, s1 / "model.pth")
    with pytest.raises(CheckpointError, match=r"\d\d tensors are missing: .*, .* and \d\d more"):
        load(s1)


def test_integers_in_place_of_weights_are_refused(s1: Path) -> None:
    change(s1 / "model.pth", {"norm.weight": torch.ones(48, dtype=torch.long)})
    with pytest.raises(CheckpointError, match=r"slow\.norm\.weight is stored as torch\.int64, expected torch\.float32"):
        load(s1)


def test_floats_in_place_of_quantized_weights_are_refused(golden: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(golden / INT8, tmp_path / "int8"))
    stored = torch.load(directory / "model.pth", weights_only=True)
    change(directory / "model.pth", {"output.weight": stored["output.weight"].float()})
    with pytest.raises(
        CheckpointError, match=r"slow\.output\.weight is stored as torch\.float32, expected torch\.int8"
    ):
        load(directory)


def test_unmerged_lora_weights_are_refused(s1: Path) -> None:
    change(s1 / "model.pth", {"layers.0.attention.wqkv.lora_A": torch.zeros(8, 48)})
    with pytest.raises(CheckpointError, match=r"unmerged LoRA weights \(layers\.0\.attention\.wqkv\.lora_A\)"):
        load(s1)


@pytest.mark.parametrize(
    "stored", [[torch.zeros(1)], {"a": 1}, torch.zeros(3), {"state_dict": {"a": "b"}}, {1: torch.zeros(1)}]
)
def test_a_pickle_of_something_else_is_refused(stored: object, s1: Path) -> None:
    torch.save(stored, s1 / "model.pth")
    with pytest.raises(CheckpointError, match=r"model\.pth: expected a dictionary of tensors"):
        load(s1)


def test_a_weight_norm_magnitude_without_direction_is_named(s1: Path) -> None:
    change(s1 / "codec.pth", {"decoder.model.0.conv.parametrizations.weight.original1": None})
    with pytest.raises(
        CheckpointError, match=r"decoder\.model\.0\.conv\.parametrizations\.weight\.original0 is stored without"
    ):
        load_codec(s1)


def dangerous_pickle(evidence: Path) -> object:
    class Runs:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(evidence), "w")

    return {"norm.weight": torch.ones(48), "trap": Runs()}


@pytest.mark.parametrize("name", ["model.pth", "codec.pth"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_in_it_is_refused_and_never_run(name: str, zipped: bool, s1: Path, tmp_path: Path) -> None:
    evidence = tmp_path / "it-ran"
    torch.save(dangerous_pickle(evidence), s1 / name, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnsafeCheckpoint, match=rf"{name}: this pickle would run code") as refusal:
        load_checkpoint(s1)
    assert refusal.value.exit_code == 7
    assert not evidence.exists()


def second_shard(directory: Path) -> Path:
    return sorted(directory.glob("model-*.safetensors"))[1]


def truncate(path: Path, kept: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])


def change(path: Path, tensors: dict[str, Tensor | None]) -> None:
    """Replace, add, or with None remove tensors of a pickle."""
    stored = torch.load(path, weights_only=True) | tensors
    torch.save({name: tensor for name, tensor in stored.items() if tensor is not None}, path)


# Wrong configurations


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dim", "large", r"config\.json: dim = 'large'"),
        ("dim", 0, r"config\.json: dim = 0"),
        ("dim", None, r"config\.json: dim = None"),
        ("n_layer", -1, r"config\.json: n_layer = -1"),
        ("n_layer", 2.5, r"config\.json: n_layer = 2\.5"),
        ("n_layer", 10**9, r"config\.json: n_layer = 1000000000 must be an integer from 1 to 1,000"),
        (
            "max_seq_len",
            2**63,
            r"config\.json: max_seq_len = 9223372036854775808 must be an integer from 1 to 1,048,576",
        ),
        ("vocab_size", True, r"config\.json: vocab_size = True"),
        ("head_dim", 15, r"config\.json: head_dim = 15"),
        ("n_local_heads", 3, r"config\.json: n_local_heads = 3"),
        ("rope_base", "big", r"config\.json: rope_base = 'big' must be a number greater than 0"),
        ("rope_base", None, r"config\.json: rope_base = None must be a number greater than 0"),
        ("norm_eps", [1e-5], r"config\.json: norm_eps = \[1e-05\] must be a number greater than 0"),
        ("rope_base", math.nan, r"config\.json: rope_base = nan must be a number greater than 0"),
        ("norm_eps", 10**400, r"config\.json: int too large to convert to float"),
        ("vocab_size", 300, r"config\.json: .*vocab_size"),
        ("codebook_size", 100, r"config\.json: .*codebook_size"),
        ("n_fast_layers", 4, "unknown keys n_fast_layers"),
        ("attention_qkv_bias", True, "attention_qkv_bias = True is not supported"),
    ],
)
def test_a_wrong_value_in_the_configuration_is_named(key: str, value: object, message: str, s1: Path) -> None:
    document = json.loads((s1 / "config.json").read_text())
    (s1 / "config.json").write_text(json.dumps(document | {key: value}))
    with pytest.raises(CheckpointError, match=message):
        load(s1)


@pytest.mark.parametrize("section", ["text_config", "audio_decoder_config"])
def test_a_section_that_is_not_an_object_is_refused(section: str, s2: Path) -> None:
    document = json.loads((s2 / "config.json").read_text())
    (s2 / "config.json").write_text(json.dumps(document | {section: 5}))
    with pytest.raises(CheckpointError, match=section):
        load(s2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder_rates": "fast"}, "codec configuration: encoder_rates"),
        ({"encoder_rates": 512}, "codec configuration: encoder_rates = 512 must be integers"),
        ({"latent_dim": -4}, "codec configuration: latent_dim"),
        ({"latent_dim": None}, "codec configuration: latent_dim"),
        ({"sample_rate": 2**63}, "codec configuration: sample_rate = 9223372036854775808 must be an integer >= 1"),
        ({"sample_rate": [16000]}, "codec configuration: sample_rate"),
        ({"colour": 1}, "codec configuration: .*colour"),
        ({"quantizer": 3}, "codec configuration: "),
        ({"quantizer": "x"}, "codec configuration: "),
        ({"quantizer": {"colour": 1}}, "codec configuration: .*colour"),
        ({"window_transformer": {}}, "codec configuration: "),
        ({"encoder_transformer": {}}, "codec configuration: "),
    ],
)
def test_a_wrong_codec_description_is_named(change: dict[str, object], message: str, s1: Path) -> None:
    document = json.loads((s1 / "codec.json").read_text())
    (s1 / "codec.json").write_text(json.dumps(document | change))
    with pytest.raises(CheckpointError, match=message):
        load_codec(s1)


def test_the_configuration_of_another_size_is_noticed(s1: Path, tiny: Checkpoint) -> None:
    document = json.loads((s1 / "config.json").read_text())
    (s1 / "config.json").write_text(json.dumps(document | {"intermediate_size": 97}))
    with pytest.raises(CheckpointError, match=r"is \[192, 48\], expected \[194, 48\]"):
        load(s1)


def test_mapped_weights_are_not_written_through(s1: Path) -> None:
    before = (s1 / "model.pth").read_bytes()
    model = load(s1)
    with torch.no_grad():
        model.slow.norm.weight.fill_(7.0)
    assert (s1 / "model.pth").read_bytes() == before
