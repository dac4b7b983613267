"""The codec's streaming decoder as a list of native layers: the numbers of `Codec.decode_from`, time first."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from shoal.codec.dac import Codec, DacBlock
from shoal.codec.layers import (
    CausalConv,
    CausalUpsample,
    ConvNeXt,
    Resample,
    ResidualUnit,
    Snake,
    WindowLayer,
    WindowTransformer,
)
from shoal.native.library import Context, Matrix, NativeUnavailable, Tensors

# Kinds of layers; mirrors LayerKind in src/codec.h.
SNAKE, CONV, UPSAMPLE, RESIDUAL, CONVNEXT, ATTENTION, FEED_FORWARD, RMS_NORM, TANH = range(9)
# Frames of the rotary table by which a stream grows.
TABLE_STEP = 4096

_LAYER_SIZES = ("kind", "channels", "taps", "dilation", "stride", "heads", "head_dim", "window")


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in _LAYER_SIZES),
        ("state", ctypes.c_int64),
        ("a", Matrix),
        ("b", Matrix),
        *((name, ctypes.c_void_p) for name in ("alpha", "inverse", "alpha2", "inverse2")),
        ("eps", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    ]


class _Codec(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "tables", "sizes")),
        ("state_size", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("count", "codebooks", "dim", "frame_length", "max_steps")),
    ]


class _Chunks(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("codes", "frames", "slots", "state", "positions", "out")),
        ("out_stride", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("code_stride", ctypes.c_int32),
    ]


class LayerList:
    """Native layers of a codec, with the size of the left context that a stream keeps for them."""

    def __init__(self, codec: Codec) -> None:
        """Raises NativeUnavailable for quantized layers."""
        self.tensors = Tensors()
        self.state_size = 0  # floats per stream
        self.layers: list[_Layer] = []
        for module in (codec.quantizer.post_module, *codec.quantizer.upsample, *codec.decoder.model):
            self._add(module)
        self.layers.append(_Layer(kind=TANH, channels=1))

    def _add(self, module: nn.Module) -> None:
        """Append the layers of a module, in the order of its forward pass."""
        if isinstance(module, DacBlock | Resample):
            for each in module.block if isinstance(module, DacBlock) else module:
                self._add(each)
        elif isinstance(module, WindowTransformer):
            self._add_transformer(module)
        else:
            self.layers.append(self._layer(module))

    def _layer(self, module: nn.Module) -> _Layer:
        if isinstance(module, Snake):
            return _Layer(kind=SNAKE, channels=module.alpha.shape[1], **self._snake(module))
        if isinstance(module, CausalConv):
            return self._conv(module)
        if isinstance(module, CausalUpsample):
            return self._upsample(module)
        if isinstance(module, ResidualUnit):
            return self._residual(module)
        if isinstance(module, ConvNeXt):
            return self._convnext(module)
        raise NativeUnavailable(f"the codec layer {type(module).__name__} is not supported")

    def _add_transformer(self, transformer: WindowTransformer) -> None:
        for layer in transformer.layers:
            assert isinstance(layer, WindowLayer)
            self.layers += (self._attention(layer, transformer), self._feed_forward(layer))
        norm = transformer.norm
        self.layers.append(
            _Layer(kind=RMS_NORM, channels=len(norm.weight), alpha=self.tensors.address(norm.weight), eps=norm.eps)
        )

    def _attention(self, layer: WindowLayer, transformer: WindowTransformer) -> _Layer:
        config, attention = transformer.config, layer.attention
        inner = config.n_head * config.head_dim
        return _Layer(
            kind=ATTENTION,
            channels=config.dim,
            heads=config.n_head,
            head_dim=config.head_dim,
            window=config.window_size,
            state=self._reserve(2 * (config.window_size - 1) * inner),
            a=self.tensors.linear(attention.wqkv),
            b=self.tensors.linear(attention.wo, scale=layer.attention_layer_scale.gamma),
            alpha=self.tensors.address(layer.attention_norm.weight),
            eps=config.norm_eps,
        )

    def _feed_forward(self, layer: WindowLayer) -> _Layer:
        forward, norm = layer.feed_forward, layer.ffn_norm
        if not isinstance(forward.w1, nn.Linear) or not isinstance(forward.w3, nn.Linear):
            raise NativeUnavailable("a quantized codec is not supported")
        return _Layer(
            kind=FEED_FORWARD,
            channels=len(norm.weight),
            a=self.tensors.matrix(torch.cat((forward.w1.weight, forward.w3.weight))),
            b=self.tensors.linear(forward.w2, scale=layer.ffn_layer_scale.gamma),
            alpha=self.tensors.address(norm.weight),
            eps=norm.eps,
        )

    def _conv(self, module: CausalConv) -> _Layer:
        conv = module.conv
        if not isinstance(conv, nn.Conv1d):
            raise NativeUnavailable("a quantized codec is not supported")
        taps, dilation, channels = conv.kernel_size[0], conv.dilation[0], conv.in_channels
        return _Layer(
            kind=CONV,
            channels=channels,
            taps=taps,
            dilation=dilation,
            state=self._reserve((taps - 1) * dilation * channels),
            a=self.tensors.matrix(conv.weight.permute(0, 2, 1), conv.bias),
        )

    def _upsample(self, module: CausalUpsample) -> _Layer:
        conv, stride = module.conv, module.stride
        if not isinstance(conv, nn.ConvTranspose1d):
            raise NativeUnavailable("a quantized codec is not supported")
        taps = conv.kernel_size[0] // stride
        assert conv.bias is not None
        # [in, out, taps * stride] -> [stride, out, taps, in], with the oldest input first
        weight = conv.weight.unflatten(2, (taps, stride)).flip(2).permute(3, 1, 2, 0)
        return _Layer(
            kind=UPSAMPLE,
            channels=conv.in_channels,
            taps=taps,
            stride=stride,
            state=self._reserve((taps - 1) * conv.in_channels),
            a=self.tensors.matrix(weight.flatten(0, 1), conv.bias.repeat(stride)),
        )

    def _residual(self, unit: ResidualUnit) -> _Layer:
        first, wide, second, narrow = unit.block
        assert isinstance(first, Snake)
        assert isinstance(second, Snake)
        assert isinstance(wide, CausalConv)
        assert isinstance(narrow, CausalConv)
        layer, last = self._conv(wide), self._conv(narrow)
        layer.kind, layer.b = RESIDUAL, last.a
        names = ("alpha", "inverse", "alpha2", "inverse2")
        for name, address in zip(names, (*self._snake(first).values(), *self._snake(second).values()), strict=True):
            setattr(layer, name, address)
        return layer

    def _snake(self, snake: Snake) -> dict[str, int]:
        alpha = snake.alpha.detach().flatten()
        return {"alpha": self.tensors.address(alpha), "inverse": self.tensors.address((alpha + 1e-9).reciprocal())}

    def _convnext(self, module: ConvNeXt) -> _Layer:
        conv, norm = module.dwconv.conv, module.norm
        channels, taps = conv.in_channels, conv.kernel_size[0]
        assert conv.bias is not None
        return _Layer(
            kind=CONVNEXT,
            channels=channels,
            taps=taps,
            state=self._reserve((taps - 1) * channels),
            a=self.tensors.linear(module.pwconv1),
            b=self.tensors.linear(module.pwconv2, scale=module.gamma),
            alpha=self.tensors.address(conv.weight.squeeze(1).T),
            inverse=self.tensors.address(conv.bias),
            alpha2=self.tensors.address(norm.weight),
            inverse2=self.tensors.address(norm.bias),
            eps=norm.eps,
        )

    def _reserve(self, size: int) -> int:
        """Return the offset of `size` floats of state."""
        self.state_size += size
        return self.state_size - size


class NativeDecoder:
    """Streaming decoder with per-slot state, like `StreamingDecoder`, in one native call per batch of chunks."""

    backend: Literal["native"] = "native"

    def __init__(self, codec: Codec, slots: int, context: Context) -> None:
        """Raises NativeUnavailable for a codec that is not on the CPU or has quantized layers."""
        if codec.device.type != "cpu":
            raise NativeUnavailable(f"the codec is on {codec.device.type}")
        self.codec, self.context = codec, context
        built = LayerList(codec)
        self._layers = (_Layer * len(built.layers))(*built.layers)
        self._tensors, self._state_size = built.tensors, built.state_size
        self._state = torch.zeros(slots, built.state_size)
        self._positions = np.zeros(slots, np.int64)
        self._sizes = np.array(codec.config.codebook_sizes, np.int32)
        self._rope = torch.empty(0)
        self._structure = self._describe()
        self._grow(1)

    @property
    def _seen(self) -> list[int]:
        """Frames decoded so far by each slot."""
        return [int(each) for each in self._positions]

    def decode(self, codes: Tensor, slots: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
        """Decode codes [n, codebooks, T] of n different slots -> samples [n, frame_length * T].

        With `lengths` [n] only the first lengths[i] frames of row i are decoded; the samples after them are zero.
        Raises RuntimeError when memory runs out.
        """
        count, _, frames = codes.shape
        step = self.codec.config.frame_length
        out = torch.zeros(count, frames * step) if lengths else torch.empty(count, frames * step)
        valid = np.array(lengths or [frames] * count, np.int32)
        rows, grid = np.array(slots, np.int32), codes.long().contiguous()
        self._grow(int(self._positions[rows].max(initial=0)) + frames)
        chunks = _Chunks(
            grid.data_ptr(),
            *(array.ctypes.data for array in (valid, rows)),
            self._state.data_ptr(),
            self._positions.ctypes.data,
            out.data_ptr(),
            frames * step,
            count,
            frames,
        )
        library = self.context.library
        if library.shoal_decode(self.context.handle, ctypes.byref(self._structure), ctypes.byref(chunks)):
            raise RuntimeError("the native codec failed: out of memory")
        return out

    def reset(self, slots: Sequence[int]) -> None:
        """Reset the state of these slots; their next frame is the first of a stream."""
        self._positions[list(slots)] = 0
        self._state[list(slots)] = 0

    def _describe(self) -> _Codec:
        config, tables = self.codec.config, self.codec.quantizer.tables()
        return _Codec(
            ctypes.addressof(self._layers),
            self._tensors.address(tables),
            self._sizes.ctypes.data,
            self._state_size,
            len(self._layers),
            config.num_codebooks,
            config.latent_dim,
            config.frame_length,
            0,
        )

    def _grow(self, frames: int) -> None:
        """Grow the rotary table for streams of up to `frames` frames."""
        if frames <= self._structure.max_steps:
            return
        self.codec.reserve(-(-frames // TABLE_STEP) * TABLE_STEP)
        self._rope = self.codec.quantizer.post_module.table.contiguous()
        for layer in self._attention_layers():
            layer.inverse = self._rope.data_ptr()
        self._structure.max_steps = len(self._rope)

    def _attention_layers(self) -> Iterator[_Layer]:
        return (layer for layer in self._layers if layer.kind == ATTENTION)
