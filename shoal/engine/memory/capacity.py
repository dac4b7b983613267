"""How many voices a card would hold, told without the card: sizes are counted on skeletons, nothing is computed."""

from dataclasses import dataclass
from functools import cache

import torch

from shoal.checkpoint.random import SIZES
from shoal.codec.config import CodecConfig
from shoal.codec.dac import Codec
from shoal.codec.fused import MAX_FRAMES
from shoal.codec.streaming import StreamingDecoder
from shoal.config import EngineConfig
from shoal.engine.kv_cache import PagedKV
from shoal.engine.memory.allocation_tracker import AllocationTracker
from shoal.model.dual_ar import DualAR
from shoal.quantize.modes import WeightModes
from shoal.quantize.policy import AUTO, choose_modes
from shoal.quantize.sizes import codec_bytes, model_bytes

CARDS = (8, 12, 16, 24, 80, 141)  # GB
MODELS = ("s1-mini", "s2-pro")
CONTEXTS = (1024, 4096)  # tokens of one voice: about 47 s of reference and speech, and three minutes of them
# The rest is the driver's, and for the gaps between allocations.
SHARE = float(EngineConfig.gpu_memory)
GPU, DTYPE = torch.device("cuda"), torch.bfloat16
KINDS = {"16-bit": DTYPE, "8-bit": torch.int8}


@dataclass(frozen=True, slots=True)
class CardCapacity:
    """One model on one card. `voices` by tokens of context and type of keys and values."""

    card: int  # GB
    model: str
    weights: str
    weight_bytes: int
    voices: dict[int, dict[str, int]]


def capacity_table(cards: tuple[int, ...] = CARDS, models: tuple[str, ...] = MODELS) -> list[CardCapacity]:
    return [card_capacity(card, model) for model in models for card in cards]


def card_capacity(card: int, model: str) -> CardCapacity:
    """What fits into the usual share of a card, with weights as `auto` would have them."""
    cap = int(SHARE * card * 1e9)
    skeleton, codec = _skeletons(model)
    modes = choose_modes(AUTO, skeleton, codec, device=GPU, dtype=DTYPE, memory=cap).modes
    size = weight_bytes(skeleton, codec, modes)
    return CardCapacity(
        card,
        model,
        str(modes),
        size,
        {
            tokens: {
                name: max_sequences(cap - size, codec.config, tokens * _column_bytes(skeleton, dtype))
                for name, dtype in KINDS.items()
            }
            for tokens in CONTEXTS
        },
    )


def weight_bytes(model: DualAR, codec: Codec, modes: WeightModes) -> int:
    """Everything that stays in memory; beside plain codec weights lie those that the fused decoder packs for itself."""
    size = model_bytes(model, modes, DTYPE) + codec_bytes(codec, modes.codec)
    if modes.codec == "none":
        with torch.device("meta"):
            size += codec_bytes(Codec(codec.config, encoder=False), "none") // 2
    return size


def max_sequences(room: int, codec: CodecConfig, kv_bytes: int) -> int:
    """Voices whose keys and values, streams and largest call of the codec fit into `room` bytes."""
    voices = 0
    while (voices + 1) * (kv_bytes + _stream_bytes(codec)) + _work_bytes(codec, voices + 1) <= room:
        voices += 1
    return voices


def _column_bytes(model: DualAR, dtype: torch.dtype) -> int:
    return PagedKV.bytes_per_block(model.config.slow, 1, dtype)


@cache
def _skeletons(model: str) -> tuple[DualAR, Codec]:
    config, sound = SIZES[model]
    with torch.device("meta"):
        return DualAR(config), Codec(sound)


def _work_bytes(codec: CodecConfig, voices: int) -> int:
    """The most that one call of the decoder takes; a call takes no more than MAX_FRAMES frames."""
    frames = min(voices * EngineConfig.max_chunk_frames, MAX_FRAMES)
    return _decoding(codec)[0] * frames


def _stream_bytes(codec: CodecConfig) -> int:
    return _decoding(codec)[1]


@cache
def _decoding(codec: CodecConfig) -> tuple[int, int]:
    """Bytes to decode one frame of a long chunk, and to remember one stream."""
    frames = EngineConfig.max_chunk_frames
    with torch.device("meta"), torch.inference_mode():
        decoder = StreamingDecoder(Codec(codec, encoder=False), 1)
        codes = torch.zeros(1, codec.num_codebooks, frames, dtype=torch.long)
        decoder.decode(codes, [0])  # makes what stays
        with AllocationTracker() as peak:
            decoder.decode(codes, [0])
    return peak.most // frames, decoder.past.nbytes
