"""Settings and progress of a codec training run."""

from __future__ import annotations

from dataclasses import dataclass

import training.run
from shoal.codec.config import CodecConfig, WindowTransformerConfig

NANO = CodecConfig(
    sample_rate=16_000,
    encoder_dim=16,
    encoder_rates=(2, 4, 4, 5),
    latent_dim=256,
    decoder_dim=384,
    decoder_rates=(5, 4, 4, 2),
    encoder_transformer_layers=(0, 0, 0, 0),
    downsample_factor=(2, 2),
    semantic_codebook_size=1024,
    codebook_size=1024,
    n_codebooks=9,
    codebook_dim=8,
    transformer=WindowTransformerConfig(
        n_layer=3, n_head=4, dim=256, intermediate_size=768, head_dim=64, window_size=32
    ),
)

NANO_24K = CodecConfig(
    sample_rate=24_000,
    encoder_dim=24,
    encoder_rates=(3, 4, 4, 5),
    latent_dim=256,
    decoder_dim=512,
    decoder_rates=(3, 4, 4, 5),
    encoder_transformer_layers=(0, 0, 0, 0),
    downsample_factor=(2, 2),
    semantic_codebook_size=1024,
    codebook_size=1024,
    n_codebooks=9,
    codebook_dim=8,
    transformer=WindowTransformerConfig(
        n_layer=4, n_head=4, dim=256, intermediate_size=768, head_dim=64, window_size=32
    ),
)
CONFIGS = {"16k": NANO, "24k": NANO_24K}


@dataclass(frozen=True)
class Plan:
    """All settings of a run except the corpus."""

    config: CodecConfig = NANO
    minutes: float = 22.0
    batch: int = 16
    frames: int = 64
    seed: int = 0
    rate: float = 6e-4
    discriminator_rate: float = 3e-4
    final_share: float = 0.02
    warm_up: int = 400
    free_steps: int = 1000
    layout_frames: int = 65_536
    adversary_from: float = 0.42
    adversary_ramp: int = 600
    revive_every: int = 200
    revive_until: float = 0.8
    ema: float = 0.999
    discriminator_width: int = 32
    max_steps: int = 1 << 40
    freeze_codes: bool = False
    augmented_share: float = 0.0  # share of examples with noise, reverberation and another frequency response
    phoneme_weight: float = 1.0  # weight of the phoneme classification loss on the first codebook
    recoveries: int = 2
    # Frames of each example that are decoded; 0: all. The decoder and the discriminators cost most of a step, and a
    # window transformer needs longer examples than they do.
    decoded_frames: int = 0
    sampled_share: float = 0.0  # share of examples with codes that the language model sampled; needs a CodedReel
    # How many codebooks an example uses; the spread makes every prefix of the codebooks a codec of its own.
    depths: tuple[int, ...] = (10, 10, 10, 10, 10, 10, 10, 8, 8, 8, 8, 8, 8, 8, 8, 6, 6, 4, 9, 7)

    @property
    def length(self) -> int:
        return self.frames * self.config.frame_length

    @property
    def heard_frames(self) -> int:
        return self.decoded_frames or self.frames


@dataclass
class Pace(training.run.Pace):
    quantised_from: int = -1
    adversary_since: int = -1


@dataclass(frozen=True)
class Mode:
    """Losses that a step computes."""

    codes: bool
    adversary: bool
