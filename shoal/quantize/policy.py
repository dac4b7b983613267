"""Choose the quantization modes: those requested, or for `auto` those that suit device, model and memory."""

from dataclasses import astuple, dataclass
from functools import cache

import torch

from shoal.codec.dac import Codec
from shoal.errors import InvalidRequest
from shoal.model.dual_ar import DualAR
from shoal.quantize.apply import benefits_from_int8, decode_side, modes_of
from shoal.quantize.frame_time import frame_seconds
from shoal.quantize.modes import (
    Mode,
    WeightModes,
    has_int8_matmul,
    int8_implementation,
    require_supported,
    supported_modes,
)
from shoal.quantize.sizes import codec_bytes, model_bytes

AUTO = "auto"
# Share of memory that weights may take; the rest is for the KV cache, codec streams and activations.
MAX_WEIGHT_FRACTION = 0.6
# Tried by `auto` from the largest to the smallest; each costs a little more quality. int4 is used for the slow
# transformer only: in the fast one it changes the code distributions more than everything else together.
AUTO_MODES = tuple(map(WeightModes.parse, ("none", "int8", "slow=int4,fast=int8")))
# Bytes that must be left beside the weights: S1-mini with 16 slots takes 2.4 GB of torch's memory on an H200, and the
# driver 0.3 GB, before the KV cache.
MIN_WORKING_MEMORY = 2.8e9
# `auto` takes smaller weights than memory allows if a frame of one sequence is predicted to take more than this share
# of its duration: below 1, because the codec needs time as well.
REAL_TIME_SHARE = 0.9
# The last resort. An int8 codec has no fused kernels: it is several times slower, and with many slots its graphs of
# plain operators take more memory than it saves.
SMALLEST = WeightModes.parse("slow=int4,fast=int8,codec=int8")


@dataclass(frozen=True, slots=True)
class QuantizationChoice:
    """Chosen modes and the reason, for the log."""

    modes: WeightModes
    reason: str
    native: bool = False  # computed by the native backend

    def describe(self, device: torch.device) -> str:
        """Return modes and reason for the log; on a CPU also the int8 implementation."""
        int8 = device.type == "cpu" and not self.native and "int8" in astuple(self.modes)
        return f"{self.modes} ({self.reason})" + (f", computed as {int8_implementation()}" if int8 else "")


def check_requested(requested: str, device: torch.device) -> None:
    """Raise InvalidRequest if the setting is invalid or unsupported on the device. Runs before any file is read."""
    if requested != AUTO:
        require_supported(WeightModes.parse(requested), device)


def choose_modes(
    requested: str,
    model: DualAR,
    codec: Codec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    memory: int,
    bandwidth: float | None = None,
    native: bool = False,
) -> QuantizationChoice:
    """Return the requested modes, or for `auto` those that suit the device, the stored weights and `memory` bytes.

    `bandwidth` of a GPU's memory, in bytes per second, limits `auto` to weights that are read in real time; None: no
    limit. `native` says that the native CPU backend will run, whose speed depends on the bytes of the weights. Raises
    InvalidRequest if the device cannot compute the modes, or on a CPU if int8 would have no effect.
    """
    on_cpu, stored = device.type == "cpu", modes_of(model, codec)
    if requested != AUTO:
        modes = WeightModes.parse(requested)
        if on_cpu:
            _require_effect(modes, stored, model, codec)
        if on_cpu and "w8a8" in astuple(modes) and not native:
            raise InvalidRequest("w8a8 needs the native backend in float32: install g++ or clang++, or use int8")
        return QuantizationChoice(modes, "as requested", native)
    if on_cpu:
        return _choose_for_cpu(model, stored, native=native)
    if stored:
        return _choose_stored(stored, device)
    return _choose_for_gpu(model, codec, dtype, memory, bandwidth)


def _choose_for_gpu(
    model: DualAR, codec: Codec, dtype: torch.dtype, memory: int, bandwidth: float | None
) -> QuantizationChoice:
    """Return the largest modes that leave enough memory and are predicted to be real time, if any of them is."""

    @cache
    def codec_size(mode: Mode) -> int:
        return codec_bytes(codec, mode)

    @cache
    def size(modes: WeightModes) -> int:
        return model_bytes(model, modes, dtype) + codec_size(modes.codec)

    def is_real_time(modes: WeightModes) -> bool:
        seconds = 0.0 if bandwidth is None else frame_seconds(model, modes, dtype, bandwidth)
        return seconds * codec.config.frame_rate <= REAL_TIME_SHARE

    limit = min(MAX_WEIGHT_FRACTION * memory, memory - MIN_WORKING_MEMORY)
    fitting = [modes for modes in AUTO_MODES if size(modes) <= limit] or [SMALLEST]
    modes = next(filter(is_real_time, fitting), fitting[0])
    reason = f"weights of {size(modes) / 1e9:.1f} GB in {memory / 1e9:.1f} GB of memory"
    if modes != fitting[0]:
        reason += f"; larger ones are predicted to be slower than real time at {(bandwidth or 0) / 1e9:.0f} GB/s"
    return QuantizationChoice(modes, reason)


def _require_effect(modes: WeightModes, stored: WeightModes, model: DualAR, codec: Codec) -> None:
    """Raise InvalidRequest for modes without effect. Weights that are stored as int8 may stay int8."""
    if "int8" in (modes.slow, modes.fast) and not _has_int8(stored) and not benefits_from_int8(model):
        raise InvalidRequest("this model's matrices are too small for int8 on a CPU: leave --quantize out")
    if modes.codec == "int8" and not any(map(benefits_from_int8, decode_side(codec))):
        raise InvalidRequest("this codec's matrices are too small for int8 on a CPU: leave codec=int8 out")


def _choose_for_cpu(model: DualAR, stored: WeightModes, *, native: bool) -> QuantizationChoice:
    if (native or has_int8_matmul()) and benefits_from_int8(model):
        slow, fast = (_int8_if_possible(mode) for mode in (stored.slow, stored.fast))
        reason = "the native backend reads int8 weights" if native else "this CPU multiplies int8 faster than floats"
        return QuantizationChoice(WeightModes(slow, fast), reason, native=native)
    if native and _has_int8(stored):
        slow, fast = (_int8_if_stored(mode) for mode in (stored.slow, stored.fast))
        return QuantizationChoice(WeightModes(slow, fast), "as stored, read by the native backend", native)
    return QuantizationChoice(WeightModes(), "floats are the fastest for this model on this CPU")


def _has_int8(modes: WeightModes) -> bool:
    return "int8" in (modes.slow, modes.fast)


def _int8_if_possible(stored: Mode) -> Mode:
    return "int8" if stored in ("none", "int8") else "none"


def _int8_if_stored(stored: Mode) -> Mode:
    return "int8" if stored == "int8" else "none"


def _choose_stored(stored: WeightModes, device: torch.device) -> QuantizationChoice:
    if all(getattr(stored, component) in supported_modes(component, device) for component in ("slow", "fast")):
        return QuantizationChoice(stored, "as stored")
    raise InvalidRequest(f"this model is stored as {stored}, which {device} cannot compute: use --quantize none")
