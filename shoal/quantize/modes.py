"""Quantization mode per component: parsing, and support by device. Parsing works without torch."""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from shoal.errors import InvalidRequest

if TYPE_CHECKING:
    import torch  # imported at run time only where needed: settings are parsed without torch

Mode = Literal["none", "int8", "int4", "fp8", "w8a8"]
Component = Literal["slow", "fast", "codec"]

MODES: tuple[Mode, ...] = get_args(Mode)
COMPONENTS: tuple[Component, ...] = get_args(Component)
CODEC_MODES: tuple[Mode, ...] = ("none", "int8")
# Compute capability with fp8 tensor cores: Ada (8.9), Hopper (9.0) and later.
FP8_CAPABILITY = (8, 9)
SYNTAX = (
    "none, int8, int4, fp8, w8a8, or one mode per component as in slow=int8,fast=fp8,codec=int8 (codec: none or int8)"
)


@dataclass(frozen=True, slots=True)
class WeightModes:
    """One mode per component. A mode without a component name applies to both transformers, never to the codec."""

    slow: Mode = "none"
    fast: Mode = "none"
    codec: Mode = "none"

    @classmethod
    def parse(cls, text: str) -> "WeightModes":
        """Parse `int8` or `slow=int8,fast=fp8`. Raises InvalidRequest naming the invalid word."""
        modes = cls()
        for word in text.replace(" ", "").split(","):
            component, equals, mode = word.rpartition("=")
            known = CODEC_MODES if component == "codec" else MODES
            if mode not in known or (equals and component not in COMPONENTS):
                raise InvalidRequest(f"cannot quantize to {word!r}: expected {SYNTAX}")
            named: tuple[str, ...] = (component,) if equals else ("slow", "fast")
            modes = replace(modes, **dict.fromkeys(named, mode))
        return modes

    def __bool__(self) -> bool:
        return self != WeightModes()

    def __str__(self) -> str:
        alike = self.slow == self.fast
        words = {name: mode if alike and name == "slow" else f"{name}={mode}" for name, mode in asdict(self).items()}
        given = [words[name] for name in COMPONENTS if getattr(self, name) != "none" and not (alike and name == "fast")]
        return ",".join(given) or "none"


def supported_modes(component: Component, device: "torch.device") -> tuple[Mode, ...]:
    """Return the modes a component may have on this device."""
    if device.type in ("cpu", "mps"):
        return ("none", "int8", "w8a8") if device.type == "cpu" and component != "codec" else ("none", "int8")
    if component == "codec":
        return CODEC_MODES
    import torch

    fp8 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    return ("none", "int8", "int4", *(("fp8",) if fp8 else ()), "w8a8")


def require_supported(modes: WeightModes, device: "torch.device") -> None:
    """Raise InvalidRequest, with the supported modes, if the device does not support a mode."""
    for component in COMPONENTS:
        mode, supported = getattr(modes, component), supported_modes(component, device)
        if mode not in supported:
            raise InvalidRequest(
                f"{component}={mode} is not supported on {device.type}: {component} can be {_either(supported)}"
            )


def has_int8_matmul() -> bool:
    """Return whether torch can multiply int8 matrices on this CPU (AVX-512 VNNI through oneDNN)."""
    import torch

    # ATEN_CPU_CAPABILITY can restrict torch to less than the CPU offers.
    allowed = "AVX512" in torch.backends.cpu.get_cpu_capability()
    return torch.cpu._is_vnni_supported() and allowed and torch.backends.mkldnn.is_available()


def int8_implementation() -> str:
    """Return the name of this CPU's int8 implementation for the log and `shoal doctor`."""
    return "int8 (VNNI, oneDNN)" if has_int8_matmul() else "int8 (weight-only)"


def _either(words: tuple[str, ...]) -> str:
    return " or ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]
