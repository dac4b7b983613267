"""Quantize the weights of a model or a codec in place, one matrix at a time."""

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from shoal.codec.dac import Codec
from shoal.codec.layers import CausalConv, CausalUpsample
from shoal.errors import InvalidRequest
from shoal.model.dual_ar import DualAR
from shoal.model.linear import (
    QUANTIZED_LINEARS,
    AnyLinear,
    DynamicInt8Linear,
    Int8Linear,
    Quantized,
    QuantizedLinear,
    W8A8Linear,
    WeightOnlyInt8Linear,
    dequantized,
)
from shoal.quantize.convolution import Int8Conv
from shoal.quantize.modes import Mode, WeightModes, has_int8_matmul

# Smaller matrices stay floats on a CPU: quantizing their activations costs more than the int8 product saves.
MIN_INT8_WEIGHTS = 1_000_000

T = TypeVar("T")
OnLayer = Callable[[str], None]  # called with the component's name after each quantized layer


def prepare_model(
    model: DualAR, modes: WeightModes, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> None:
    """Quantize a model for serving on its device, in place, and drop the output rows that are never sampled."""
    model.slow.prune_output()
    on_cpu = torch.device(device or model.device).type == "cpu"
    quantize_model(model, modes, device=device, dtype=dtype, min_weights=MIN_INT8_WEIGHTS if on_cpu else 0)
    if on_cpu:
        convert_int8_for_cpu(model)


def prepare_codec(codec: Codec, mode: Mode) -> None:
    """Quantize a codec for serving on its device, in place."""
    on_cpu = codec.device.type == "cpu"
    quantize_codec(codec, mode, min_weights=MIN_INT8_WEIGHTS if on_cpu else 0, convolutions=not on_cpu)
    if on_cpu:
        convert_int8_for_cpu(codec)


def quantize_model(
    model: DualAR,
    modes: WeightModes,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    min_weights: int = 0,
    on_layer: OnLayer = lambda component: None,
) -> None:
    """Quantize both transformers in place and move them to a device and a dtype.

    Matrices with fewer than `min_weights` entries stay floats. Each matrix is quantized before the next one is moved,
    so the device never holds the model at full size. Raises InvalidRequest for weights that are already quantized in
    another mode.
    """
    for component in ("slow", "fast"):
        for holder, name, layer in _drain(list(_linears(getattr(model, component)))):
            wanted: Mode = getattr(modes, component)
            # Small matrices too: the native backend multiplies int8 activations faster at every size.
            mode = wanted if wanted == "w8a8" or layer.weight.numel() >= min_weights else "none"
            setattr(holder, name, to_mode(layer.to(device=device), mode, component, dtype or model.dtype))
            on_layer(component)
    _move_floats(model, device, dtype)


def quantize_codec(codec: Codec, mode: Mode, *, min_weights: int = 0, convolutions: bool = True) -> None:
    """Quantize the decode side to int8, in place. The encode side stays exact, because it decides a voice's codes."""
    if mode == "none":
        return
    for part in decode_side(codec):
        for holder, name, layer in _drain(list(_linears(part))):
            if layer.weight.numel() >= min_weights:
                setattr(holder, name, to_mode(layer, "int8", "codec", torch.float32))
        for holder, conv in _drain(list(_convolutions(part))) if convolutions else ():
            if is_large_conv(conv):
                holder.conv = Int8Conv.from_conv(conv)


def _drain(items: list[T]) -> Iterator[T]:
    """Yield and remove each item: the layers that a loop has replaced are freed while it runs, not after it."""
    items.reverse()
    while items:
        yield items.pop()


def decode_side(codec: Codec) -> tuple[nn.Module, ...]:
    """Return the modules that only decoding uses."""
    return codec.decoder, codec.quantizer.post_module, codec.quantizer.upsample


def to_mode(layer: AnyLinear, mode: Mode, component: str, dtype: torch.dtype) -> nn.Module:
    """Return the layer quantized or dequantized to `mode`. Raises InvalidRequest between two quantized modes."""
    if mode_of(layer) == mode:
        return layer
    if isinstance(layer, QuantizedLinear):
        if mode == "none":
            return dequantized(layer, dtype)
        if (layer.mode, mode) == ("int8", "w8a8"):
            return W8A8Linear.from_quantized(layer.weight, layer.scales, layer.bias)
        raise InvalidRequest(
            f"{component} is stored as {layer.mode} and cannot be quantized again to {mode}: "
            f"use the original weights, {component}={layer.mode} or {component}=none"
        )
    return layer if mode == "none" else QUANTIZED_LINEARS[mode].from_linear(layer)


def mode_of(layer: nn.Module) -> Mode:
    """Return the mode of a single layer; `none` for float weights."""
    return layer.mode if isinstance(layer, Quantized) else "none"


def modes_of(model: DualAR, codec: Codec | None = None) -> WeightModes:
    """Return the mode of each component: that of its first quantized layer."""

    def of(module: nn.Module) -> Mode:
        return next((mode for mode in map(mode_of, module.modules()) if mode != "none"), "none")

    return WeightModes(of(model.slow), of(model.fast), "none" if codec is None else of(codec))


def convert_int8_for_cpu(module: nn.Module, min_weights: int | None = None) -> None:
    """Convert int8 layers to the form this CPU computes fastest, in place.

    Large matrices stay int8; those with fewer than `min_weights` entries (default MIN_INT8_WEIGHTS) and convolutions
    are dequantized.
    """
    for holder, name, layer in list(_linears(module)):
        if isinstance(layer, Int8Linear):
            setattr(holder, name, _for_cpu(layer, MIN_INT8_WEIGHTS if min_weights is None else min_weights))
    for causal, conv in list(_convolutions(module)):
        if isinstance(conv, Int8Conv):
            causal.conv = conv.dequantize()


def benefits_from_int8(module: nn.Module) -> bool:
    """Return whether any matrix is large enough for int8 to pay off on a CPU."""
    return any(layer.weight.numel() >= MIN_INT8_WEIGHTS for _, _, layer in _linears(module))


def is_large_conv(conv: nn.Module) -> TypeGuard[nn.Conv1d | nn.ConvTranspose1d]:
    """Return whether a convolution is worth quantizing; depthwise ones have too few weights per scale."""
    return isinstance(conv, nn.Conv1d | nn.ConvTranspose1d) and conv.groups == 1


def _for_cpu(layer: Int8Linear, min_weights: int) -> nn.Module:
    if layer.weight.numel() < min_weights:
        return dequantized(layer, torch.float32)
    kind = DynamicInt8Linear if has_int8_matmul() else WeightOnlyInt8Linear
    return kind(layer.weight, layer.scales, layer.bias)


def _linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, AnyLinear]]:
    for holder in module.modules():
        for name, child in holder.named_children():
            if isinstance(child, nn.Linear | QuantizedLinear):
                yield holder, name, child


def _convolutions(module: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    for holder in module.modules():
        if isinstance(holder, CausalConv | CausalUpsample):
            yield holder, holder.conv


def _move_floats(model: nn.Module, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
    """Move and cast the float parameters. `Module.to` would also cast fp8 weights and rotary tables."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                moved: Tensor = weight.detach().to(device=device, dtype=dtype)
                module._parameters[name] = nn.Parameter(moved, requires_grad=False)
    if device is not None:
        model.to(device)
