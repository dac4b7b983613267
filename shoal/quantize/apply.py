"""Modules -> the same modules over quantised weights, one matrix at a time."""

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from shoal.codec.dac import Codec
from shoal.codec.layers import CausalConv, CausalUpsample
from shoal.errors import InvalidRequest
from shoal.model.dual_ar import DualAR
from shoal.model.linear import (
    AnyLinear,
    CpuInt8Linear,
    DynamicInt8Linear,
    Fp8Linear,
    Int4Linear,
    Int8Linear,
    PerChannelLinear,
    WeightOnlyInt8Linear,
    dense,
)
from shoal.quantize.convolution import Int8Conv
from shoal.quantize.modes import Mode, WeightModes, has_int8_matmul

# Smaller matrices are left to floats on a CPU: to round the activations costs more there than integers gain.
MIN_INT8_WEIGHTS = 1_000_000

Tick = Callable[[str], None]


def prepare_model(
    model: DualAR, modes: WeightModes, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> None:
    """`quantize_model` as the device computes it, and nothing kept that speaking never reads."""
    model.slow.prune_output()
    on_cpu = torch.device(device or model.device).type == "cpu"
    quantize_model(model, modes, device=device, dtype=dtype, fewest=MIN_INT8_WEIGHTS if on_cpu else 0)
    if on_cpu:
        convert_int8_for_cpu(model)


def prepare_codec(codec: Codec, mode: Mode) -> None:
    """`quantize_codec` as its device computes it."""
    on_cpu = codec.device.type == "cpu"
    quantize_codec(codec, mode, fewest=MIN_INT8_WEIGHTS if on_cpu else 0, convolutions=not on_cpu)
    if on_cpu:
        convert_int8_for_cpu(codec)


def quantize_model(
    model: DualAR,
    modes: WeightModes,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    fewest: int = 0,
    tick: Tick = lambda done: None,
) -> None:
    """Bring both transformers to these modes, to a device and a type, in place; matrices under `fewest` stay floats.

    A matrix arrives on the device as it will stay there, so the device never holds the model at its full size. Raises
    InvalidRequest for weights that are quantised in another way already.
    """
    for part in ("slow", "fast"):
        for holder, name, layer in list(_linears(getattr(model, part))):
            mode: Mode = getattr(modes, part) if layer.weight.numel() >= fewest else "none"
            moved = layer.to(device=device)
            setattr(holder, name, to_mode(moved, mode, part, dtype or model.dtype))
            tick(part)
    _move_plain(model, device, dtype)


def quantize_codec(codec: Codec, mode: Mode, *, fewest: int = 0, convolutions: bool = True) -> None:
    """The decode side in int8, in place: what a recording is encoded to must not depend on how speech is decoded."""
    if mode == "none":
        return
    for part in decode_side(codec):
        for holder, name, layer in list(_linears(part)):
            if layer.weight.numel() >= fewest:
                setattr(holder, name, to_mode(layer, "int8", "codec", torch.float32))
        for holder, conv in list(_convolutions(part)) if convolutions else ():
            if is_large_conv(conv):
                holder.conv = Int8Conv.from_conv(conv)


def decode_side(codec: Codec) -> tuple[nn.Module, ...]:
    return codec.decoder, codec.quantizer.post_module, codec.quantizer.upsample


def to_mode(layer: AnyLinear, mode: Mode, part: str, dtype: torch.dtype) -> nn.Module:
    """The layer in that mode: itself if it is, quantised or made whole if it is not."""
    if mode_of(layer) == mode:
        return layer
    if isinstance(layer, nn.Linear):
        return _quantised(layer, mode)
    if mode != "none":
        raise InvalidRequest(
            f"{part} is {mode_of(layer)} already, and {mode} made of that would be neither: "
            f"take the original weights, or {part}={mode_of(layer)}, or {part}=none"
        )
    assert isinstance(layer, PerChannelLinear | Int4Linear)
    return dense(layer.dequantize(dtype), getattr(layer, "bias", None))


def mode_of(layer: nn.Module) -> Mode:
    if isinstance(layer, Int8Linear | CpuInt8Linear | Int8Conv):
        return "int8"
    if isinstance(layer, Fp8Linear):
        return "fp8"
    return "int4" if isinstance(layer, Int4Linear) else "none"


def modes_of(model: DualAR, codec: Codec | None = None) -> WeightModes:
    """What the parts are kept in."""

    def of(module: nn.Module) -> Mode:
        return next((mode for mode in map(mode_of, module.modules()) if mode != "none"), "none")

    return WeightModes(of(model.slow), of(model.fast), "none" if codec is None else of(codec))


def convert_int8_for_cpu(module: nn.Module, fewest: int | None = None) -> None:
    """int8 layers as this CPU computes them, in place: large ones from int8, small ones and convolutions in floats."""
    for holder, name, layer in list(_linears(module)):
        if isinstance(layer, Int8Linear):
            setattr(holder, name, _for_cpu(layer, MIN_INT8_WEIGHTS if fewest is None else fewest))
    for causal, conv in list(_convolutions(module)):
        if isinstance(conv, Int8Conv):
            causal.conv = conv.dequantize()


def benefits_from_int8(module: nn.Module) -> bool:
    """Whether any matrix is large enough for a CPU to multiply it in integers."""
    return any(layer.weight.numel() >= MIN_INT8_WEIGHTS for _, _, layer in _linears(module))


def is_large_conv(conv: nn.Module) -> TypeGuard[nn.Conv1d | nn.ConvTranspose1d]:
    """Whether int8 saves anything worth having: depthwise ones are all rows and no columns."""
    return isinstance(conv, nn.Conv1d | nn.ConvTranspose1d) and conv.groups == 1


def _quantised(layer: nn.Linear, mode: Mode) -> nn.Module:
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    if mode == "int4":
        # Pairs of columns share a byte, and a bias has no place in upstream's layout.
        return layer if bias is not None or weight.shape[1] % 2 else Int4Linear.from_weight(weight)
    return Int8Linear.from_weight(weight, bias) if mode == "int8" else Fp8Linear.from_weight(weight, bias)


def _for_cpu(layer: Int8Linear, fewest: int) -> nn.Module:
    if layer.weight.numel() < fewest:
        return dense(layer.dequantize(torch.float32), layer.bias)
    kind = DynamicInt8Linear if has_int8_matmul() else WeightOnlyInt8Linear
    return kind(layer.weight, layer.scales, layer.bias)


def _linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, AnyLinear]]:
    for holder in module.modules():
        for name, child in holder.named_children():
            if isinstance(child, nn.Linear | PerChannelLinear | Int4Linear):
                yield holder, name, child


def _convolutions(module: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    for holder in module.modules():
        if isinstance(holder, CausalConv | CausalUpsample):
            yield holder, holder.conv


def _move_plain(model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    """Everything that is not quantised. `Module.to` would cast fp8 weights and rotary tables too."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                moved: Tensor = weight.detach().to(device=device, dtype=dtype)
                module._parameters[name] = nn.Parameter(moved, requires_grad=False)
    if device is not None:
        model.to(device)
