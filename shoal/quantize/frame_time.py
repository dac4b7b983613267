"""Time of a frame of one sequence on a GPU, predicted from the bytes it reads and the bandwidth of the memory."""

from functools import cache

import torch

from shoal.model.config import DualARConfig
from shoal.model.dual_ar import DualAR
from shoal.model.slow import candidate_ids
from shoal.quantize.modes import WeightModes
from shoal.quantize.sizes import stack_bytes

# Fitted to the frames of S1-mini and S2-Pro on an H200 (`shoal.tools.predicted_speed.fitted`).
LAYER_SECONDS = 7.45e-6  # latency of a layer
BANDWIDTH_SHARE = 0.648  # share of the data sheet's bandwidth that frames reach
# Below this compute capability there are no fused kernels, and other costs than reading weights dominate.
KERNELS_FROM = (8, 0)


def frame_seconds(model: DualAR, modes: WeightModes, dtype: torch.dtype, bandwidth: float) -> float:
    """Return the predicted seconds of a frame of one sequence; `bandwidth` in bytes per second by the data sheet."""
    reading = frame_bytes(model, modes, dtype) / (BANDWIDTH_SHARE * bandwidth)
    return layer_passes(model.config) * LAYER_SECONDS + reading


def layer_passes(config: DualARConfig) -> int:
    """Return the layers that a frame runs through, those of the fast transformer once per residual codebook."""
    return config.slow.n_layer + (config.num_codebooks - 1) * config.fast.n_layer


def frame_bytes(model: DualAR, modes: WeightModes, dtype: torch.dtype) -> int:
    """Return the bytes of weights that a frame reads."""
    config = model.config
    slow = stack_bytes(model.slow.layers, modes.slow, dtype)
    fast = stack_bytes(model.fast.layers, modes.fast, dtype)
    passes = config.num_codebooks - 1
    heads = len(candidate_ids(config)) * config.slow.dim + passes * config.residual_size * config.fast.dim
    return slow + passes * fast + heads * dtype.itemsize


@cache
def memory_bandwidth(device: torch.device) -> float | None:
    """Return the bytes per second of a GPU's memory by its clock and bus; None if unknown or without fused kernels."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    if torch.cuda.get_device_capability(device) < KERNELS_FROM:
        return None
    properties = torch.cuda.get_device_properties(device)
    # Older versions of torch have neither; a driver may report 0.
    kilohertz, bits = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return 2e3 * kilohertz * bits / 8 or None  # two transfers per clock
