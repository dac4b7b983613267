"""What `auto` comes to on a machine, and why."""

from dataclasses import astuple, dataclass

import torch

from shoal.codec.dac import Codec
from shoal.errors import InvalidRequest
from shoal.model.dual_ar import DualAR
from shoal.quantize.apply import benefits_from_int8, decode_side, modes_of
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
# The rest is for keys and values, the codec's streams and what a step computes with.
MAX_WEIGHT_FRACTION = 0.6
# From the largest to the smallest; each costs a little more quality than the one before it. int4 is for the slow
# transformer alone: in the fast one it moves the distributions of the codes by more than all else together.
AUTO_MODES = tuple(map(WeightModes.parse, ("none", "int8", "int8,codec=int8", "slow=int4,fast=int8,codec=int8")))


@dataclass(frozen=True, slots=True)
class QuantizationChoice:
    modes: WeightModes
    reason: str

    def describe(self, device: torch.device) -> str:
        """Return the modes and the reason for the log; on a CPU also what computes int8."""
        int8 = device.type == "cpu" and "int8" in astuple(self.modes)
        return f"{self.modes} ({self.reason})" + (f", computed as {int8_implementation()}" if int8 else "")


def check_requested(wish: str, device: torch.device) -> None:
    """Raises InvalidRequest for a wish that means nothing, or nothing on this device; before anything is read."""
    if wish != AUTO:
        require_supported(WeightModes.parse(wish), device)


def choose_modes(
    wish: str, model: DualAR, codec: Codec, *, device: torch.device, dtype: torch.dtype, memory: int
) -> QuantizationChoice:
    """The wish itself, or what suits the device, the model as it is stored and `memory` bytes for everything."""
    on_cpu = device.type == "cpu"
    if wish != AUTO:
        modes = WeightModes.parse(wish)
        if on_cpu:
            _refuse_what_gains_nothing(modes, model, codec)
        return QuantizationChoice(modes, "asked for")
    stored = modes_of(model, codec)
    if on_cpu:
        return _for_cpu(model, stored)
    if stored:
        return _as_stored(stored, device)
    for modes in AUTO_MODES:
        size = model_bytes(model, modes, dtype) + codec_bytes(codec, modes.codec)
        if size <= MAX_WEIGHT_FRACTION * memory:
            break
    return QuantizationChoice(modes, f"weights of {size / 1e9:.1f} GB in {memory / 1e9:.1f} GB of memory")


def _refuse_what_gains_nothing(modes: WeightModes, model: DualAR, codec: Codec) -> None:
    """Rather than accept a wish and do nothing about it."""
    if "int8" in (modes.slow, modes.fast) and not benefits_from_int8(model):
        raise InvalidRequest("this model's matrices are too small to gain by int8 on a CPU: leave --quantize out")
    if modes.codec == "int8" and not any(map(benefits_from_int8, decode_side(codec))):
        raise InvalidRequest("this codec's matrices are too small to gain by int8 on a CPU: leave codec=int8 out")


def _for_cpu(model: DualAR, stored: WeightModes) -> QuantizationChoice:
    if has_int8_matmul() and benefits_from_int8(model):
        slow, fast = (_integers(mode) for mode in (stored.slow, stored.fast))
        return QuantizationChoice(WeightModes(slow, fast), "this CPU multiplies integers faster than floats")
    return QuantizationChoice(WeightModes(), "floats are the fastest for this model on this CPU")


def _integers(stored: Mode) -> Mode:
    return "int8" if stored in ("none", "int8") else "none"


def _as_stored(stored: WeightModes, device: torch.device) -> QuantizationChoice:
    possible = {part: getattr(stored, part) in supported_modes(part, device) for part in ("slow", "fast")}
    if all(possible.values()):
        return QuantizationChoice(stored, "as it is stored")
    raise InvalidRequest(f"this model is stored as {stored}, which {device} cannot compute: use --quantize none")
