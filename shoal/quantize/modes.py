"""How the weights of each part are kept: parsed, and held against what a device can do."""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from shoal.errors import InvalidRequest

if TYPE_CHECKING:
    import torch  # at run time only where it is asked: settings are parsed without it

Mode = Literal["none", "int8", "int4", "fp8"]
Component = Literal["slow", "fast", "codec"]

MODES: tuple[Mode, ...] = get_args(Mode)
COMPONENTS: tuple[Component, ...] = get_args(Component)
CODEC_MODES: tuple[Mode, ...] = ("none", "int8")
# Matrix units that know fp8: Ada (8.9), Hopper (9.0) and later.
FP8_CAPABILITY = (8, 9)
SYNTAX = "none, int8, int4, fp8, or by parts, as slow=int8,fast=fp8,codec=int8 (the codec: none or int8)"


@dataclass(frozen=True, slots=True)
class WeightModes:
    """One mode per part. A word alone means both transformers; the codec is quantised only when it is named."""

    slow: Mode = "none"
    fast: Mode = "none"
    codec: Mode = "none"

    @classmethod
    def parse(cls, text: str) -> "WeightModes":
        """Raises InvalidRequest naming the word that means nothing."""
        modes = cls()
        for word in text.replace(" ", "").split(","):
            part, equals, mode = word.rpartition("=")
            if (
                mode not in MODES
                or (equals and part not in COMPONENTS)
                or (part == "codec" and mode not in CODEC_MODES)
            ):
                raise InvalidRequest(f"cannot quantise to {word!r}: {SYNTAX}")
            named: tuple[str, ...] = (part,) if equals else ("slow", "fast")
            modes = replace(modes, **dict.fromkeys(named, mode))
        return modes

    def __bool__(self) -> bool:
        return self != WeightModes()

    def __str__(self) -> str:
        alike = self.slow == self.fast
        words = {part: mode if alike and part == "slow" else f"{part}={mode}" for part, mode in asdict(self).items()}
        given = [words[part] for part in COMPONENTS if getattr(self, part) != "none" and not (alike and part == "fast")]
        return ",".join(given) or "none"


def supported_modes(part: Component, device: "torch.device") -> tuple[Mode, ...]:
    """What a part may be on this device: what runs there, and has something to gain by it."""
    if device.type == "cpu":
        return ("none", "int8")
    if part == "codec":
        return CODEC_MODES
    import torch

    fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    return ("none", "int8", "int4", "fp8") if fp8 else ("none", "int8", "int4")


def require_supported(modes: WeightModes, device: "torch.device") -> None:
    """Raises InvalidRequest with what the device can do when it cannot do what is asked."""
    for part in COMPONENTS:
        mode, possible = getattr(modes, part), supported_modes(part, device)
        if mode not in possible:
            raise InvalidRequest(
                f"{part}={mode} cannot be used on {device.type}; here {part} can be {_either(possible)}"
            )


def has_int8_matmul() -> bool:
    """Return whether this CPU multiplies bytes without overflow (AVX-512 VNNI), by an operator that torch has."""
    import torch

    # ATEN_CPU_CAPABILITY can hold torch back from what the CPU has.
    allowed = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return torch.cpu._is_vnni_supported() and allowed and torch.backends.mkldnn.is_available()


def int8_implementation() -> str:
    """Return what computes int8 weights on this CPU, in the words of the log and of `shoal doctor`."""
    return "int8 (VNNI, oneDNN)" if has_int8_matmul() else "int8 (weight-only)"


def _either(words: tuple[str, ...]) -> str:
    return " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]
