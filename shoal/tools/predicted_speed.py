"""Speed that common GPUs should reach, predicted from memory bandwidth and from what was measured on an H200.

A frame reads the weights of the slow transformer once and those of the fast one once per codebook. Its time is a
latency per layer plus the time to read these bytes at the fraction of the card's bandwidth that the H200 reached. Both
constants are fitted to the two measured models. Each further sequence in the batch adds its time on the H200, scaled by
bandwidth.
"""

from dataclasses import dataclass
from functools import cache

from shoal.engine.memory.capacity import DTYPE, GPU, MODELS, SHARE, card_capacity, skeletons
from shoal.quantize import frame_time
from shoal.quantize.frame_time import KERNELS_FROM
from shoal.quantize.modes import WeightModes
from shoal.quantize.policy import AUTO, choose_modes

CONTEXT = 1024  # tokens per sequence, for the number of sequences that fit into memory


@dataclass(frozen=True, slots=True)
class Card:
    """Data sheet of a GPU."""

    name: str
    gigabytes: int
    bandwidth: float  # bytes per second
    capability: tuple[int, int]


H200 = Card("H200", 141, 4.8e12, (9, 0))
CARDS = (
    Card("RTX 3060", 12, 360e9, (8, 6)),
    Card("RTX 4060 Ti", 16, 288e9, (8, 9)),
    Card("RTX 4090", 24, 1008e9, (8, 9)),
    Card("L4", 24, 300e9, (8, 9)),
    Card("T4", 16, 320e9, (7, 5)),
    Card("A10", 24, 600e9, (8, 6)),
    Card("A100", 80, 2039e9, (8, 0)),
    H200,
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds on an H200 in bf16: a frame of one sequence, and a step of 64 with its share of the codec."""

    frame: float
    step_of_64: float


# docs/optimization-log.md: 1.06 ms and 728 audio-s/s; 5.23 ms and 324 audio-s/s, at 21.53 frames per second of audio.
MEASURED = {"s1-mini": Measured(1.06e-3, 64 / (728 * 21.53)), "s2-pro": Measured(5.23e-3, 64 / (324 * 21.53))}
# A frame of S1-mini in graphs of plain operators, for cards without fused kernels.
PLAIN_FRAME = 6.1e-3


@dataclass(frozen=True, slots=True)
class PredictedSpeed:
    """Prediction for one model on one card; only the H200 was measured."""

    card: str
    model: str
    weights: str
    backend: str
    frame_ms: float  # one sequence
    rtf: float  # one sequence
    voices: int | None  # sequences in real time and within memory; None with plain operators


def predicted_table() -> list[PredictedSpeed]:
    return [predict(card, model) for model in MODELS for card in CARDS]


def predict(card: Card, model: str) -> PredictedSpeed:
    skeleton, codec = skeletons(model)
    memory = int(SHARE * card.gigabytes * 1e9)
    bandwidth = card.bandwidth if card.capability >= KERNELS_FROM else None
    modes = choose_modes(AUTO, skeleton, codec, device=GPU, dtype=DTYPE, memory=memory, bandwidth=bandwidth).modes
    frame, kernels = frame_seconds(card, model, modes), card.capability >= KERNELS_FROM
    duration, measured = 1 / codec.config.frame_rate, MEASURED[model]
    another = (measured.step_of_64 - measured.frame) / 63 * H200.bandwidth / card.bandwidth
    real_time = 1 + int((duration - frame) / another) if frame < duration else 0
    fitting = card_capacity(card.gigabytes, model, bandwidth).voices[CONTEXT]["16-bit"]
    return PredictedSpeed(
        card.name,
        model,
        str(modes),
        "graph" if kernels else "plain-graph",
        round(frame * 1e3, 2),
        round(frame / duration, 3),
        min(real_time, fitting) if kernels else None,
    )


def frame_seconds(card: Card, model: str, modes: WeightModes) -> float:
    """Return the predicted time of a frame of one sequence."""
    latency, efficiency = fitted()
    if card.capability >= KERNELS_FROM:
        return layer_passes(model) * latency + frame_bytes(model, modes) / (efficiency * card.bandwidth)
    plain = PLAIN_FRAME - frame_bytes("s1-mini", WeightModes()) / (efficiency * H200.bandwidth)
    moved = plain_frame_bytes(model, modes) / (efficiency * card.bandwidth)
    return plain * layer_passes(model) / layer_passes("s1-mini") + moved


def plain_frame_bytes(model: str, modes: WeightModes) -> int:
    """Return the bytes that plain operators move: quantized weights are copied to 16 bits, then the copy is read."""
    quantized = (modes.slow, modes.fast) != ("none", "none")
    return frame_bytes(model, modes) + (2 * frame_bytes(model, WeightModes()) if quantized else 0)


@cache
def fitted() -> tuple[float, float]:
    """Return seconds per layer pass and the fraction of the bandwidth that explain both measured frames."""
    (first, one, few), (second, two, many) = (
        (MEASURED[model].frame, frame_bytes(model, WeightModes()), layer_passes(model)) for model in MODELS
    )
    per_byte = (second - first * many / few) / (two - one * many / few)
    return (first - one * per_byte) / few, 1 / (per_byte * H200.bandwidth)


def layer_passes(model: str) -> int:
    return frame_time.layer_passes(skeletons(model)[0].config)


@cache
def frame_bytes(model: str, modes: WeightModes) -> int:
    return frame_time.frame_bytes(skeletons(model)[0], modes, DTYPE)
