"""Streaming decoder of the codec, `Codec.decode_from` as a list of native layers. Activations are [time, channels]."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.codec.arrays import CodecArrays
from shoal.codec.config import DILATIONS, KERNEL, CodecConfig
from shoal.kernels.rope_values import rope_values
from shoal.native.library import Arrays, Context, Matrix, find_weight

# Kinds of layers; mirrors LayerKind in src/codec.h.
SNAKE, CONV, UPSAMPLE, RESIDUAL, CONVNEXT, ATTENTION, FEED_FORWARD, RMS_NORM, TANH = range(9)
# Fixed parts of a ConvNeXt block.
CONVNEXT_RATIO, CONVNEXT_EPS = 4, 1e-6
# The length of the rotary table, in frames, is a multiple of this.
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


class _Codebook(ctypes.Structure):
    _fields_ = [
        ("entries", ctypes.c_void_p),
        ("projection", Matrix),
        ("size", ctypes.c_int32),
        ("dim", ctypes.c_int32),
    ]


class _Codec(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layers", "books")),
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
    """Native layers of a codec with packed weights, and the size of the state that each stream keeps for them."""

    def __init__(self, codec: CodecArrays) -> None:
        """Pack the weights. Raises CheckpointError for weights that are missing or have another shape."""
        self.arrays, self._codec = Arrays(), codec
        self.state_size = 0  # floats per stream
        self.layers: list[_Layer] = [*self._transformer("quantizer.post_module")]
        config = codec.config
        for index, factor in enumerate(reversed(config.downsample_factor)):
            self.layers.append(self._upsample(f"quantizer.upsample.{index}.0", config.latent_dim, factor, factor))
            self.layers.append(self._convnext(f"quantizer.upsample.{index}.1", config.latent_dim))
        self.layers += self._decoder(config)
        self.layers.append(_Layer(kind=TANH, channels=1))

    def codebooks(self) -> list[_Codebook]:
        """Return the entries and the projection of every codebook, the semantic one first."""
        config = self._codec.config
        residual = [f"quantizer.quantizer.quantizers.{index}" for index in range(config.n_codebooks)]
        names = ["quantizer.semantic_quantizer.quantizers.0", *residual]
        return [self._codebook(name, size) for name, size in zip(names, config.codebook_sizes, strict=True)]

    def _codebook(self, name: str, size: int) -> _Codebook:
        latent, dim = self._codec.config.latent_dim, self._codec.config.codebook_dim
        weight = self._weight(f"{name}.out_proj.weight", latent, dim, 1)[:, :, 0]
        bias = self._weight(f"{name}.out_proj.bias", latent)
        entries = self._address(f"{name}.codebook.weight", size, dim)
        return _Codebook(entries, self.arrays.matrix(weight, bias), size, dim)

    def _decoder(self, config: CodecConfig) -> Iterator[_Layer]:
        channels, name = config.decoder_dim, "decoder.model"
        yield self._conv(f"{name}.0", config.latent_dim, channels, KERNEL)
        for index, rate in enumerate(config.decoder_rates, start=1):
            yield self._snake(f"{name}.{index}.block.0", channels)
            yield self._upsample(f"{name}.{index}.block.1", channels, 2 * rate, rate, channels // 2)
            channels //= 2
            for unit, dilation in enumerate(DILATIONS, start=2):
                yield self._residual(f"{name}.{index}.block.{unit}", channels, dilation)
        last = len(config.decoder_rates) + 1
        yield self._snake(f"{name}.{last}", channels)
        yield self._conv(f"{name}.{last + 1}", channels, 1, KERNEL)

    def _transformer(self, name: str) -> Iterator[_Layer]:
        config = self._codec.config.transformer
        for index in range(config.n_layer):
            yield self._attention(f"{name}.layers.{index}")
            yield self._feed_forward(f"{name}.layers.{index}")
        alpha = self._address(f"{name}.norm.weight", config.dim)
        yield _Layer(kind=RMS_NORM, channels=config.dim, alpha=alpha, eps=config.norm_eps)

    def _attention(self, name: str) -> _Layer:
        config, weights = self._codec.config.transformer, self._codec.weights
        inner = config.n_head * config.head_dim
        gamma = self._weight(f"{name}.attention_layer_scale.gamma", config.dim)
        return _Layer(
            kind=ATTENTION,
            channels=config.dim,
            heads=config.n_head,
            head_dim=config.head_dim,
            window=config.window_size,
            state=self._reserve(2 * (config.window_size - 1) * inner),
            a=self.arrays.linear(weights, f"{name}.attention.wqkv", (3 * inner, config.dim)),
            b=self.arrays.linear(weights, f"{name}.attention.wo", (config.dim, inner), scale=gamma),
            alpha=self._address(f"{name}.attention_norm.weight", config.dim),
            eps=config.norm_eps,
        )

    def _feed_forward(self, name: str) -> _Layer:
        config, weights = self._codec.config.transformer, self._codec.weights
        dim, wide = config.dim, config.intermediate_size
        gamma = self._weight(f"{name}.ffn_layer_scale.gamma", dim)
        return _Layer(
            kind=FEED_FORWARD,
            channels=dim,
            a=self.arrays.stacked(weights, [f"{name}.feed_forward.{each}" for each in ("w1", "w3")], (wide, dim)),
            b=self.arrays.linear(weights, f"{name}.feed_forward.w2", (dim, wide), scale=gamma),
            alpha=self._address(f"{name}.ffn_norm.weight", dim),
            eps=config.norm_eps,
        )

    def _conv(self, name: str, channels: int, out: int, taps: int, dilation: int = 1) -> _Layer:
        weight, bias = self._weight(f"{name}.conv.weight", out, channels, taps), self._weight(f"{name}.conv.bias", out)
        return _Layer(
            kind=CONV,
            channels=channels,
            taps=taps,
            dilation=dilation,
            state=self._reserve((taps - 1) * dilation * channels),
            a=self.arrays.matrix(weight.transpose(0, 2, 1), bias),
        )

    def _upsample(self, name: str, channels: int, kernel: int, stride: int, out: int | None = None) -> _Layer:
        taps, out = kernel // stride, out or channels
        weight = self._weight(f"{name}.conv.weight", channels, out, kernel)
        bias = self._weight(f"{name}.conv.bias", out)
        # [in, out, taps * stride] -> [stride * out, taps, in], with the oldest input first
        weight = weight.reshape(channels, out, taps, stride)[:, :, ::-1].transpose(3, 1, 2, 0)
        return _Layer(
            kind=UPSAMPLE,
            channels=channels,
            taps=taps,
            stride=stride,
            state=self._reserve((taps - 1) * channels),
            a=self.arrays.matrix(weight.reshape(stride * out, taps, channels), np.tile(bias, stride)),
        )

    def _residual(self, name: str, channels: int, dilation: int) -> _Layer:
        layer = self._conv(f"{name}.block.1", channels, channels, KERNEL, dilation)
        layer.kind, layer.b = RESIDUAL, self._conv(f"{name}.block.3", channels, channels, 1).a
        layer.alpha, layer.inverse = self._frequencies(f"{name}.block.0", channels)
        layer.alpha2, layer.inverse2 = self._frequencies(f"{name}.block.2", channels)
        return layer

    def _snake(self, name: str, channels: int) -> _Layer:
        alpha, inverse = self._frequencies(name, channels)
        return _Layer(kind=SNAKE, channels=channels, alpha=alpha, inverse=inverse)

    def _frequencies(self, name: str, channels: int) -> tuple[int, int]:
        """Return the addresses of the frequencies of a Snake and of their reciprocals."""
        alpha = self._weight(f"{name}.alpha", 1, channels, 1).reshape(-1)
        return self.arrays.address(alpha), self.arrays.address(np.float32(1) / (alpha + np.float32(1e-9)))

    def _convnext(self, name: str, channels: int) -> _Layer:
        weights, wide = self._codec.weights, CONVNEXT_RATIO * channels
        gamma = self._weight(f"{name}.gamma", channels)
        return _Layer(
            kind=CONVNEXT,
            channels=channels,
            taps=KERNEL,
            state=self._reserve((KERNEL - 1) * channels),
            a=self.arrays.linear(weights, f"{name}.pwconv1", (wide, channels)),
            b=self.arrays.linear(weights, f"{name}.pwconv2", (channels, wide), scale=gamma),
            alpha=self.arrays.address(self._weight(f"{name}.dwconv.conv.weight", channels, 1, KERNEL)[:, 0].T),
            inverse=self._address(f"{name}.dwconv.conv.bias", channels),
            alpha2=self._address(f"{name}.norm.weight", channels),
            inverse2=self._address(f"{name}.norm.bias", channels),
            eps=CONVNEXT_EPS,
        )

    def _weight(self, name: str, *shape: int) -> NDArray[np.float32]:
        return find_weight(self._codec.weights, name, shape).astype(np.float32, copy=False)

    def _address(self, name: str, *shape: int) -> int:
        return self.arrays.address(self._weight(name, *shape))

    def _reserve(self, size: int) -> int:
        """Reserve `size` floats in the state of a stream; return their offset."""
        self.state_size += size
        return self.state_size - size


class NativeDecoder:
    """Streaming decoder with per-slot state, like `StreamingDecoder`, in one native call per batch of chunks."""

    backend: Literal["native"] = "native"

    def __init__(self, codec: CodecArrays, slots: int, context: Context) -> None:
        """Pack the weights. Raises CheckpointError for weights that are missing or have another shape."""
        self.config, self.context = codec.config, context
        built = LayerList(codec)
        self._layers = (_Layer * len(built.layers))(*built.layers)
        self._arrays = built.arrays
        self._state = np.zeros((slots, built.state_size), np.float32)
        self._positions = np.zeros(slots, np.int64)
        self._books = (_Codebook * codec.config.num_codebooks)(*built.codebooks())
        self._rope = np.empty(0, np.float32)
        self._structure = self._describe(built)
        self._grow(1)

    @property
    def _seen(self) -> list[int]:
        """Frames decoded so far by each slot."""
        return [int(each) for each in self._positions]

    def decode(
        self, codes: NDArray[Any], slots: Sequence[int], lengths: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """Decode codes [n, codebooks, T] of n different slots -> samples [n, frame_length * T].

        With `lengths` [n] only the first lengths[i] frames of row i are decoded; the samples after them are zero.
        Raises RuntimeError when memory runs out.
        """
        count, _, frames = codes.shape
        step = self.config.frame_length
        out = (np.zeros if lengths else np.empty)((count, frames * step), np.float32)
        valid, rows = np.array(lengths or [frames] * count, np.int32), np.array(slots, np.int32)
        grid = np.ascontiguousarray(codes, np.int64)
        self._grow(int(self._positions[rows].max(initial=0)) + frames)
        chunks = _Chunks(
            *(array.ctypes.data for array in (grid, valid, rows, self._state, self._positions, out)),
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

    def _describe(self, built: LayerList) -> _Codec:
        return _Codec(
            ctypes.addressof(self._layers),
            ctypes.addressof(self._books),
            built.state_size,
            len(self._layers),
            self.config.num_codebooks,
            self.config.latent_dim,
            self.config.frame_length,
            0,
        )

    def _grow(self, frames: int) -> None:
        """Grow the rotary table for streams of up to `frames` frames."""
        if frames <= self._structure.max_steps:
            return
        length, config = -(-frames // TABLE_STEP) * TABLE_STEP, self.config.transformer
        self._rope = rope_values(length, config.head_dim, config.rope_base)
        for layer in self._attention_layers():
            layer.inverse = self._rope.ctypes.data
        self._structure.max_steps = length

    def _attention_layers(self) -> Iterator[_Layer]:
        return (layer for layer in self._layers if layer.kind == ATTENTION)
