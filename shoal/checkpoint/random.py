"""Models with random weights at any size: for tests, and for measuring speed at the real shapes."""

import base64
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from shoal.checkpoint.empty_weights import init_empty_weights
from shoal.checkpoint.find import RANDOM_PREFIX
from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.profile import FAMILY_PROFILES
from shoal.codec.config import CodecConfig, WindowTransformerConfig
from shoal.codec.dac import Codec
from shoal.codec.layers import LayerScale, Snake
from shoal.errors import ModelNotFound
from shoal.kernels.rms_norm import RMSNorm
from shoal.model.config import BlockConfig, DualARConfig, Family
from shoal.model.dual_ar import DualAR
from shoal.text.tokenizer import Tokenizer, load_tokenizer

# In the order of the released vocabularies; the semantic tokens follow.
S1_CONTROL = (
    "begin_of_text", "end_of_text", "pad", "im_start", "im_end", "phoneme_start", "phoneme_end", "tool_call_start",
    "tool_call_end", "text", "voice", "interleave", "audio_start", "audio_end", "audio",
)  # fmt: skip
S2_CONTROL = (
    "endoftext", "im_start", "im_end", *(f"reserved_{index}" for index in range(23)), "pad", "phoneme_start",
    "phoneme_end", "text", "voice", "interleave", "audio_start", "audio_end", "audio_pad",
)  # fmt: skip
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
    control = S1_CONTROL if family == "s1" else S2_CONTROL
    begin = text_ids + len(control)
    return DualARConfig(
        family=family,
        slow=slow,
        fast=fast,
        vocab_size=begin + codebook_size,
        codebook_size=codebook_size,
        num_codebooks=10,
        semantic_begin_id=begin,
        semantic_end_id=begin + codebook_size - 1,
        stop_id=text_ids + control.index("im_end"),
        tie_word_embeddings=family == "s2",
        scale_codebook_embeddings=True,
        norm_fastlayer_input=family == "s2",
    )


SIZES: dict[str, tuple[DualARConfig, CodecConfig]] = {
    "tiny": (_tiny("s1"), TINY_CODEC),
    "tiny-s2": (_tiny("s2"), TINY_CODEC),
    "s1-mini": (
        _released("s1", BlockConfig(28, 1024, 16, 8, 128, 3072, 1e6, 1e-6, True, 8192), fast_head_dim=64),
        CodecConfig(),
    ),
    "s2-pro": (
        _released("s2", BlockConfig(36, 2560, 32, 8, 128, 9728, 1e6, 1e-6, True, 32768), fast_head_dim=128),
        CodecConfig(),
    ),
}


def random_checkpoint(
    size: str, *, seed: int = 0, dtype: torch.dtype | None = None, device: str = "cpu", encoder: bool = True
) -> Checkpoint:
    """A model of the named size whose weights depend only on the seed (and the device that draws them)."""
    if size not in SIZES:
        raise ModelNotFound(
            f"random:{size}: unknown size, there are {', '.join(RANDOM_PREFIX + name for name in SIZES)}"
        )
    model_config, codec_config = SIZES[size]
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
        profile=FAMILY_PROFILES[model_config.family],
    )


@torch.no_grad()
def fill_random(module: nn.Module, dtype: torch.dtype, device: str, generator: torch.Generator) -> None:
    """Give a skeleton weights that keep activations of ordinary size, so that its output is finite and varied."""
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
                weight.normal_(std=_spread(child, parameter), generator=generator)
            child._parameters[name] = nn.Parameter(weight, requires_grad=False)


def _spread(module: nn.Module, weight: nn.Parameter) -> float:
    if isinstance(module, nn.Embedding):
        return 1.0
    if weight.dim() == 1:
        return 0.02
    if isinstance(module, nn.ConvTranspose1d):
        # Each output sees two taps of every input channel.
        return 0.5 * (2 * module.in_channels) ** -0.5
    # Below one in the codec: its residual units only ever add, and a saturated tanh would hide every difference.
    gain = 0.5 if isinstance(module, nn.Conv1d) else 1.0
    return gain * float(weight[0].numel()) ** -0.5


def synthetic_tokenizer(config: DualARConfig) -> Tokenizer:
    """A tokenizer with one id per byte and the control tokens where the model's configuration expects them."""
    with tempfile.TemporaryDirectory() as folder:
        write_synthetic_tokenizer(Path(folder), config)
        return load_tokenizer(Path(folder))


def write_synthetic_tokenizer(directory: Path, config: DualARConfig) -> None:
    """The same in the files of the S1 layout; the real vocabularies cannot be given away with random weights."""
    control = S1_CONTROL if config.family == "s1" else S2_CONTROL
    text_ids = config.semantic_begin_id - len(control)
    lines = [f"{base64.b64encode(_token_bytes(rank)).decode()} {rank}" for rank in range(text_ids)]
    (directory / "tokenizer.tiktoken").write_text("\n".join(lines) + "\n")
    names = [*control, *(f"semantic:{code}" for code in range(config.codebook_size))]
    specials = {f"<|{name}|>": text_ids + place for place, name in enumerate(names)}
    (directory / "special_tokens.json").write_text(json.dumps(specials))


def _token_bytes(rank: int) -> bytes:
    # 0xFF is in no UTF-8 text, so the tokens that only fill the vocabulary are never met.
    return bytes([rank]) if rank < 256 else b"\xff\xff" + rank.to_bytes(4, "big")
