"""Weights of torch modules as the arrays that the native backend packs. Only this file of the package imports torch."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, float32, nn

from shoal.codec.arrays import CodecArrays
from shoal.codec.dac import Codec
from shoal.model.arrays import ModelArrays
from shoal.model.dual_ar import DualAR
from shoal.model.linear import DequantizedLinear, Quantized
from shoal.model.slow import Head
from shoal.native.library import NativeUnavailable

Named = Iterator[tuple[str, NDArray[Any]]]
DECODE_SIDE = (
    "decoder.", "quantizer.post_module.", "quantizer.upsample.", "quantizer.semantic_quantizer.", "quantizer.quantizer."
)  # fmt: skip


def model_arrays(model: DualAR, head: Head) -> ModelArrays:
    """Return the weights of a model, sharing its memory.

    Raises NativeUnavailable for a dtype, a device or a weight layout that the library does not support.
    """
    if model.device.type != "cpu" or model.dtype != float32:
        raise NativeUnavailable(f"the model is {model.dtype} on {model.device.type}: float32 on cpu is supported")
    if head.full_vocab:
        raise NativeUnavailable("sampling from the whole vocabulary is not supported")
    return ModelArrays(model.config, dict((*_arrays(model, without="slow.output"), *layer_arrays("head", head.output))))


def codec_arrays(codec: Codec) -> CodecArrays:
    """Return the decode-side weights of a codec, sharing its memory.

    Raises NativeUnavailable for a codec that is not on the CPU or has quantized convolutions.
    """
    if codec.device.type != "cpu":
        raise NativeUnavailable(f"the codec is on {codec.device.type}")
    return CodecArrays(codec.config, {name: each for name, each in _arrays(codec) if name.startswith(DECODE_SIDE)})


def _arrays(module: nn.Module, *, without: str = "") -> Named:
    """Yield the arrays of all layers except the one named `without`."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear | Quantized):
            yield from () if name == without else layer_arrays(name, layer)
        else:
            yield from ((f"{name}.{part}", _array(value)) for part, value in layer.named_parameters(recurse=False))


def layer_arrays(name: str, layer: nn.Module) -> Named:
    """Yield the arrays of one linear layer. Raises NativeUnavailable for weights in a layout of another backend."""
    layer = layer.int8 if isinstance(layer, DequantizedLinear) else layer
    if not (isinstance(layer, nn.Linear) or (isinstance(layer, Quantized) and layer.native)):
        raise NativeUnavailable(f"{type(layer).__name__} weights are not supported")
    yield f"{name}.weight", _array(layer.weight)
    if layer.bias is not None:
        yield f"{name}.bias", _array(layer.bias)
    if isinstance(layer, Quantized):
        yield f"{name}.scales", _array(layer.scales)
    if isinstance(layer, Quantized) and layer.mode == "w8a8":
        yield f"{name}.w8a8", np.ones(1, np.bool_)


def _array(tensor: Tensor) -> NDArray[Any]:
    tensor = tensor.detach()
    array: NDArray[Any] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return array
