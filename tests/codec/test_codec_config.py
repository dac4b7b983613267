import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.random import TINY_CODEC
from shoal.codec.config import CodecConfig
from shoal.errors import CheckpointError


@pytest.mark.parametrize("config", [CodecConfig(), TINY_CODEC], ids=["released", "tiny"])
def test_a_configuration_round_trips(config: CodecConfig) -> None:
    assert CodecConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_the_configuration_file_of_upstream_loads(golden: Path) -> None:
    stored = json.loads((golden / "codec" / "config.json").read_text())
    config = CodecConfig.from_dict(stored)
    assert (config.latent_dim, config.transformer.window_size, config.encoder_window) == (32, 8, 24)
    assert config.codebook_sizes == (512, *[128] * 9)
    assert config.frame_length == stored["derived"]["frame_length"]


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ((), {"colour": 1}, "colour"),
        (("quantizer",), {"colour": 1}, "colour"),
        (("window_transformer",), {"colour": 1}, "unknown keys in window_transformer: colour"),
        ((), {"encoder_rates": [2, 4, 8]}, "different products"),
        ((), {"encoder_rates": [2, 0, 8, 8]}, r"encoder_rates = \(2, 0, 8, 8\) must be integers >= 1"),
        ((), {"encoder_rates": []}, r"encoder_rates = \(\)"),
        ((), {"encoder_transformer_layers": [0]}, "one entry per encoder rate"),
        ((), {"latent_dim": 31}, "latent_dim = 31 is not the transformer's dim"),
        ((), {"sample_rate": 44100.5}, r"sample_rate = 44100\.5"),
        (("quantizer",), {"codebook_size": "many"}, "codebook_size = 'many'"),
        (("window_transformer",), {"window_size": 0}, "window_size = 0"),
        (("window_transformer",), {"norm_eps": "small"}, "norm_eps must be a number"),
        ((), {"quantizer": [9]}, r"quantizer = \[9\] must be an object"),
        ((), {"quantizer": "nine"}, "quantizer = 'nine' must be an object"),
    ],
)
def test_an_invalid_field_is_named(
    section: tuple[str, ...], change: dict[str, Any], message: str, golden: Path
) -> None:
    stored = json.loads((golden / "codec" / "config.json").read_text())
    target = stored
    for name in section:
        target = target[name]
    target |= change
    with pytest.raises(CheckpointError, match=f"codec configuration: .*{message}"):
        CodecConfig.from_dict(stored)


@pytest.mark.parametrize("section", ["quantizer", "window_transformer", "encoder_transformer"])
def test_a_missing_section_is_named(section: str, golden: Path) -> None:
    stored = json.loads((golden / "codec" / "config.json").read_text())
    del stored[section]
    with pytest.raises(CheckpointError, match=f"codec configuration: '{section}' is missing"):
        CodecConfig.from_dict(stored)


@pytest.mark.parametrize(
    ("section", "key"),
    [("encoder_transformer", "head_dim"), ("window_transformer", "dim"), ("window_transformer", "n_layer")],
)
def test_a_missing_key_is_named_with_its_section(section: str, key: str, golden: Path) -> None:
    stored = json.loads((golden / "codec" / "config.json").read_text())
    del stored[section][key]
    with pytest.raises(CheckpointError, match=f"codec configuration: keys missing in {section}: {key}"):
        CodecConfig.from_dict(stored)


def test_an_error_names_no_python_class(golden: Path) -> None:
    stored = json.loads((golden / "codec" / "config.json").read_text())
    with pytest.raises(CheckpointError, match="codec configuration: unknown keys in the codec: colour"):
        CodecConfig.from_dict(stored | {"colour": 1})
    with pytest.raises(CheckpointError, match=r"codec configuration: \[1\] must be an object"):
        CodecConfig.from_dict([1])  # type: ignore[arg-type]


def test_training_options_are_ignored(golden: Path) -> None:
    stored = json.loads((golden / "codec" / "config.json").read_text())
    stored["quantizer"]["quantizer_dropout"] = 0.9
    stored["decoder_transformer_layers"] = [7, 7, 7, 7]
    again = json.loads((golden / "codec" / "config.json").read_text())
    assert CodecConfig.from_dict(stored) == CodecConfig.from_dict(again)


def test_another_frame_length_follows_from_the_rates() -> None:
    config = replace(TINY_CODEC, downsample_factor=(2,))
    assert config.frame_length == 320
    assert config.frame_rate == 50
