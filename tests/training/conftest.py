"""A codec and a language model small enough to be trained in a test."""

from pathlib import Path

import pytest
import torch

from shoal.checkpoint.random import fill_random
from shoal.codec.config import CodecConfig, WindowTransformerConfig
from shoal.codec.dac import Codec
from training.codec import save_codec
from training.language import SHAPES, model_config
from training.packing import Library

CPU = torch.device("cpu")
BOOKS, SIZE = 3, 32
CONFIG = model_config(SHAPES["tiny"], BOOKS, SIZE)


@pytest.fixture
def one_seed() -> None:
    torch.manual_seed(0)


def tiny_codec(codebooks: int = BOOKS, seed: int = 3) -> Codec:
    codec = Codec(
        CodecConfig(
            sample_rate=16_000,
            encoder_dim=4,
            encoder_rates=(2, 4, 4, 5),
            latent_dim=32,
            decoder_dim=32,
            decoder_rates=(5, 4, 4, 2),
            encoder_transformer_layers=(0, 0, 0, 0),
            semantic_codebook_size=SIZE,
            codebook_size=SIZE,
            n_codebooks=codebooks - 1,
            transformer=WindowTransformerConfig(
                n_layer=1, n_head=2, dim=32, intermediate_size=48, head_dim=16, window_size=4
            ),
        )
    )
    fill_random(codec, torch.float32, "cpu", torch.Generator().manual_seed(seed))
    return codec


@pytest.fixture
def codec_folder(tmp_path: Path) -> Path:
    save_codec(tiny_codec(), tmp_path / "codec")
    return tmp_path / "codec"


def library_of(folder: Path) -> Library:
    library = Library(folder, BOOKS, 4000, CPU)
    library.refresh()
    return library
