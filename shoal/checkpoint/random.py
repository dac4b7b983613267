"""Models with random weights: small ones for tests, and the released sizes for benchmarks."""

import base64
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.find import RANDOM_PREFIX
from shoal.checkpoint.format.profile import default_profile
from shoal.checkpoint.load import Checkpoint
from shoal.codec.config import CodecConfig, WindowTransformerConfig
from shoal.codec.dac import Codec
from shoal.codec.layers import LayerScale, Snake
from shoal.errors import ModelNotFound
from shoal.kernels.rms_norm import RMSNorm
from shoal.model.config import BlockConfig, DualARConfig
from shoal.model.dual_ar import DualAR
from shoal.model.family import S1, S2, Family
from shoal.text.tokenizer import Tokenizer, load_tokenizer

# Text tokens of the released vocabularies.
TEXT_IDS = 151643

TINY_CODEC = CodecConfig(
    sample_rate=16000,
    encoder_dim=4,
    encoder_rates=(2, 4, 4, 5),
    latent_dim=32,
    decoder_dim=64,
    decoder_rates=(5, 4, 4, 2),
    encoder_transformer_layers=(0, 0, 0, 0),
    semantic_codebook_size=256,
    codebook_size=128,
    transformer=WindowTransformerConfig(n_layer=2, n_head=2, dim=32, intermediate_size=48, head_dim=16, window_size=16),
)


def _tiny(family: Family) -> DualARConfig:
    slow = BlockConfig(3, 48, 4, 2, 16, 96, 1e6, 1e-6, attention_qk_norm=True, max_seq_len=2048)
    fast = replace(slow, n_layer=2, attention_qk_norm=False, max_seq_len=10)
    return _config(family, slow, fast, codebook_size=256, text_ids=256)


def _released(family: Family, slow: BlockConfig, fast_head_dim: int) -> DualARConfig:
    fast = replace(slow, n_layer=4, head_dim=fast_head_dim, attention_qk_norm=False, max_seq_len=10)
    config = _config(family, slow, fast, codebook_size=4096, text_ids=TEXT_IDS)
    return replace(config, vocab_size=155776)


def _config(family: Family, slow: BlockConfig, fast: BlockConfig, codebook_size: int, text_ids: int) -> DualARConfig:
    begin = text_ids + len(family.control_tokens)
    return DualARConfig(
        family=family,
        slow=slow,
        fast=fast,
        vocab_size=begin + codebook_size,
        codebook_size=codebook_size,
        num_codebooks=10,
        semantic_begin_id=begin,
        semantic_end_id=begin + codebook_size - 1,
        stop_id=text_ids + family.control_tokens.index("im_end"),
        tie_word_embeddings=family.tied_embeddings,
        scale_codebook_embeddings=True,
        norm_fastlayer_input=family.norm_fast_input,
    )


SIZES: dict[str, tuple[DualARConfig, CodecConfig]] = {
    "tiny": (_tiny(S1), TINY_CODEC),
    "tiny-s2": (_tiny(S2), TINY_CODEC),
    "s1-mini": (
        _released(S1, BlockConfig(28, 1024, 16, 8, 128, 3072, 1e6, 1e-6, True, 8192), fast_head_dim=64),
        CodecConfig(),
    ),
    "s2-pro": (
        _released(S2, BlockConfig(36, 2560, 32, 8, 128, 9728, 1e6, 1e-6, True, 32768), fast_head_dim=128),
        CodecConfig(),
    ),
}


def random_checkpoint(
    size: str, *, seed: int = 0, dtype: torch.dtype | None = None, device: str = "cpu", encoder: bool = True
) -> Checkpoint:
    """Return a model of a named size whose weights depend only on the seed and the device. Raises ModelNotFound."""
    model_config, codec_config = _configs(size)
    with init_empty_weights():
        model, codec = DualAR(model_config), Codec(codec_config, encoder=encoder)
    generator = torch.Generator(device).manual_seed(seed)
    fill_random(model, dtype or torch.bfloat16, device, generator)
    fill_random(codec, torch.float32, device, generator)
    return Checkpoint(
        name=f"{RANDOM_PREFIX}{size}",
        model=model.to(device).eval(),
        codec=codec.to(device).eval(),
        tokenizer=synthetic_tokenizer(model_config),
        profile=default_profile(model_config.family),
    )


def random_family(size: str) -> Family:
    """Return the family of the models of a named size. Raises ModelNotFound."""
    return _configs(size)[0].family


def _configs(size: str) -> tuple[DualARConfig, CodecConfig]:
    if size not in SIZES:
        raise ModelNotFound(
            f"random:{size}: unknown size, expected one of {', '.join(RANDOM_PREFIX + name for name in SIZES)}"
        )
    return SIZES[size]


@torch.no_grad()
def fill_random(module: nn.Module, dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    """Initialize a skeleton so that activations keep their scale and the output is finite and varied."""
    for child in module.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is None:
                continue
            weight = torch.empty(parameter.shape, dtype=dtype, device=device)
            if isinstance(child, RMSNorm | Snake | nn.LayerNorm):
                weight.fill_(0.0 if name == "bias" else 1.0)
            elif isinstance(child, LayerScale) or name == "gamma":
                weight.fill_(0.5)
            else:
                weight.normal_(std=_std(child, parameter), generator=generator)
            child._parameters[name] = nn.Parameter(weight, requires_grad=False)


def _std(module: nn.Module, weight: nn.Parameter) -> float:
    if isinstance(module, nn.Embedding):
        return 1.0
    if weight.dim() == 1:
        return 0.02
    if isinstance(module, nn.ConvTranspose1d):
        # Each output sums two taps of every input channel.
        return 0.5 * (2 * module.in_channels) ** -0.5
    # Below one in the codec: residual units only add up, and a saturated tanh would hide differences.
    gain = 0.5 if isinstance(module, nn.Conv1d) else 1.0
    return gain * float(weight[0].numel()) ** -0.5


def synthetic_tokenizer(config: DualARConfig) -> Tokenizer:
    """Return a tokenizer with one id per byte and the control tokens at the ids of the model's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        write_synthetic_tokenizer(Path(folder), config)
        return load_tokenizer(Path(folder))


def write_synthetic_tokenizer(directory: Path, config: DualARConfig) -> None:
    """Write a synthetic tokenizer in the S1 layout; random weights may not come with a released vocabulary."""
    text_ids = config.semantic_begin_id - len(config.family.control_tokens)
    lines = [f"{base64.b64encode(_token_bytes(rank)).decode()} {rank}" for rank in range(text_ids)]
    (directory / "tokenizer.tiktoken").write_text("\n".join(lines) + "\n")
    names = config.family.special_tokens(config.codebook_size)
    specials = {name: text_ids + place for place, name in enumerate(names)}
    (directory / "special_tokens.json").write_text(json.dumps(specials))


def _token_bytes(rank: int) -> bytes:
    # 0xFF occurs in no UTF-8 text, so tokens that only pad the vocabulary are never produced.
    return bytes([rank]) if rank < 256 else b"\xff\xff" + rank.to_bytes(4, "big")
