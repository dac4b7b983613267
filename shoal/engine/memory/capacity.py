"""Capacity planning: how many sequences a GPU holds, computed from meta tensors without the GPU."""

from dataclasses import dataclass
from functools import cache

import torch

from shoal.checkpoint.empty_weights import init_empty_weights
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
CONTEXTS = (1024, 4096)  # tokens per sequence: about 47 s and three minutes of reference and speech
# Share of a card's memory that the engine may use; the rest is for the driver and fragmentation.
SHARE = float(EngineConfig.gpu_memory)
# Bytes of graphs, workspaces of prompts and cuDNN, and the driver. Measured on an H200 with S1-mini and 16 slots: an
# engine needed 5.43 GB beside its KV cache, and 0.26 GB outside torch; the parts computed below are 4.5 GB.
WORKSPACE = int(1.2e9)
GPU, DTYPE = torch.device("cuda"), torch.bfloat16
KINDS = {"16-bit": DTYPE, "8-bit": torch.int8}


@dataclass(frozen=True, slots=True)
class CardCapacity:
    """One model on one card. `voices` is the number of sequences by context length and KV dtype."""

    card: int  # GB
    model: str
    weights: str
    weight_bytes: int
    voices: dict[int, dict[str, int]]


def capacity_table(cards: tuple[int, ...] = CARDS, models: tuple[str, ...] = MODELS) -> list[CardCapacity]:
    return [card_capacity(card, model) for model in models for card in cards]


def card_capacity(card: int, model: str, bandwidth: float | None = None) -> CardCapacity:
    """Return the capacity of a card of `card` GB with the default `gpu_memory` and the weights that `auto` selects.

    `bandwidth` is that of the card's memory in bytes per second; None: fast enough for the largest weights.
    """
    cap = int(SHARE * card * 1e9)
    skeleton, codec = skeletons(model)
    modes = choose_modes(AUTO, skeleton, codec, device=GPU, dtype=DTYPE, memory=cap, bandwidth=bandwidth).modes
    size = weight_bytes(skeleton, codec, modes)
    return CardCapacity(
        card,
        model,
        str(modes),
        size,
        {
            tokens: {
                name: max_sequences(cap - size - WORKSPACE, codec.config, tokens * _token_bytes(skeleton, dtype))
                for name, dtype in KINDS.items()
            }
            for tokens in CONTEXTS
        },
    )


def weight_bytes(model: DualAR, codec: Codec, modes: WeightModes) -> int:
    """Return the resident bytes of all weights, including the copy that the fused decoder packs of the codec's."""
    size = model_bytes(model, modes, DTYPE) + codec_bytes(codec, modes.codec)
    return size + _packed_bytes(codec.config) if modes.codec == "none" else size


@cache
def _packed_bytes(config: CodecConfig) -> int:
    with init_empty_weights():
        return codec_bytes(Codec(config, encoder=False), "none") // 2


def max_sequences(available: int, codec: CodecConfig, kv_bytes: int) -> int:
    """Return how many sequences fit into `available` bytes with KV cache, codec streams and the largest codec call."""
    count = 0
    while (count + 1) * (kv_bytes + _stream_bytes(codec)) + _work_bytes(codec, count + 1) <= available:
        count += 1
    return count


def _token_bytes(model: DualAR, dtype: torch.dtype) -> int:
    return PagedKV.bytes_per_block(model.config.slow, 1, dtype)


@cache
def skeletons(model: str) -> tuple[DualAR, Codec]:
    """Return a model and its codec on the meta device: shapes without memory."""
    config, sound = SIZES[model]
    with init_empty_weights():
        return DualAR(config), Codec(sound)


def _work_bytes(codec: CodecConfig, sequences: int) -> int:
    """Return the workspace of the largest decoder call, which has at most MAX_FRAMES frames."""
    frames = min(sequences * EngineConfig.max_chunk_frames, MAX_FRAMES)
    return _decoding(codec)[0] * frames


def _stream_bytes(codec: CodecConfig) -> int:
    return _decoding(codec)[1]


@cache
def _decoding(codec: CodecConfig) -> tuple[int, int]:
    """Return the workspace in bytes per frame of a long chunk, and the bytes of the state of one stream."""
    frames = EngineConfig.max_chunk_frames
    with init_empty_weights():
        empty = Codec(codec, encoder=False)
    with torch.device("meta"), torch.inference_mode():
        decoder = StreamingDecoder(empty, 1)
        codes = torch.zeros(1, codec.num_codebooks, frames, dtype=torch.long)
        decoder.decode(codes, [0])  # allocates the persistent state
        with AllocationTracker() as tracker:
            decoder.decode(codes, [0])
    return tracker.peak_bytes // frames, decoder.past.nbytes
