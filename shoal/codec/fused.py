"""Streaming codec decoder on fused kernels: channels-last, half precision, fixed shapes, CUDA graphs.

Computes `Codec.decode_from` over a `SlotPast` with one launch per layer and one per state update. LayerScale factors
are folded into the weights. A call decodes frames of any streams, packed along time, so one CUDA graph per frame bucket
is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from shoal.codec.config import MAX_POSITIONS
from shoal.codec.graph_decoder import FrameSpan, GraphDecoder, ResetCall
from shoal.codec.layers import CausalConv, CausalUpsample, ConvNeXt, ResidualUnit, Snake, WindowLayer
from shoal.kernels.codec_decoder import residual_unit as unit
from shoal.kernels.codec_decoder.conv import Taps, conv, depthwise_norm, update_past
from shoal.kernels.codec_decoder.embed_codes import embed_codes
from shoal.kernels.codec_decoder.output_conv import output_conv
from shoal.kernels.codec_decoder.packing import Packing
from shoal.kernels.codec_decoder.window_attention import MAX_STEPS, count_steps, window_attention
from shoal.kernels.cuda_graph import CapturedGraph, GraphSizes, compile_ahead
from shoal.kernels.linear.linear import linear
from shoal.kernels.linear.split_k_linear import split_k_linear
from shoal.kernels.rms_norm import fused_rms_norm
from shoal.kernels.rope import rope_table
from shoal.kernels.sm90 import convolutions as sm90

if TYPE_CHECKING:
    from shoal.codec.dac import Codec

# Sizes of the captured calls, in frames. A call beyond the largest would be no faster and only take more memory.
FRAME_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
MAX_FRAMES = FRAME_BUCKETS[-1]


def pack_conv(layer: CausalConv, dtype: torch.dtype) -> Taps:
    """Pack a convolution: weight [out, in, kernel] -> [kernel, out, in]."""
    conv = layer.conv
    return Taps(conv.weight.detach().permute(2, 0, 1).contiguous().to(dtype), _bias(conv), conv.dilation[0])


def pack_upsample(layer: CausalUpsample, dtype: torch.dtype) -> Taps:
    """Pack a transposed convolution: taps from oldest to newest input, outputs as `stride` consecutive phases."""
    weight, stride = layer.conv.weight.detach(), layer.stride  # [in, out, kernel]
    phases = weight.unflatten(2, (-1, stride)).flip(2)  # [in, out, taps, stride]
    weights = phases.permute(2, 3, 1, 0).flatten(1, 2).contiguous()
    return Taps(weights.to(dtype), _bias(layer.conv).repeat(stride))


def pack_linear(layer: nn.Linear, dtype: torch.dtype, scale: Tensor | None = None) -> Taps:
    """Pack a linear layer as a convolution of one tap, with `scale` [out] folded into it."""
    weight, bias = layer.weight.detach().float(), layer.bias.detach().float()
    if scale is not None:
        weight, bias = weight * scale[:, None], bias * scale
    return Taps(weight[None].to(dtype), bias.contiguous())


def _add(x: Tensor, inner: Tensor, weight: Tensor) -> Tensor | None:
    """Return the split-K partials [4, rows, out] of inner @ weight.T, which the next norm adds to x.

    If K is not a multiple of 128, add the product to x in place and return None.
    """
    if inner.shape[1] % 128:
        linear(inner, weight, residual=x, out=x)
        return None
    return split_k_linear(inner, weight)


def _bias(layer: nn.Conv1d | nn.ConvTranspose1d) -> Tensor:
    assert layer.bias is not None
    return layer.bias.detach().float().contiguous()


@dataclass(slots=True)
class ConvLayer:
    """A convolution, the frequencies of the Snake after it, and its per-slot left context."""

    taps: Taps
    alpha: Tensor | None
    past: Tensor | None
    # Hopper GPUs only: weights of this upsampling convolution, or of the residual unit that begins with this layer.
    sm90: sm90.Sm90Weights | None = None

    @classmethod
    def of(cls, taps: Taps, slots: int, following: Snake | None) -> ConvLayer:
        alpha = None if following is None else following.alpha.detach().float().flatten().contiguous()
        shape = (slots, taps.steps, taps.weight.shape[2])
        return cls(taps, alpha, taps.weight.new_zeros(shape) if taps.steps else None)


@dataclass(slots=True)
class TransformerLayer:
    """A layer of the window transformer, with keys and values in ring buffers."""

    wqkv: Tensor
    wo: Tensor
    w13: Tensor
    w2: Tensor
    norms: tuple[Tensor, Tensor]
    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class UpsampleStage:
    """An upsampling convolution and the ConvNeXt block after it."""

    up: ConvLayer
    filters: Tensor
    norm: tuple[Tensor, Tensor, Tensor]  # filter bias, LayerNorm scale, LayerNorm shift
    eps: float
    past: Tensor
    expand: Taps
    project: Taps


class FusedCodec:
    """Packed weights and per-slot state, with one extra slot for padding rows."""

    def __init__(self, codec: Codec, slots: int, dtype: torch.dtype) -> None:
        self.config, self.dtype, self.device = codec.config, dtype, codec.device
        self.spare = slots
        quantizer, decoder = codec.quantizer, codec.decoder
        self.seen = torch.zeros(slots + 1, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self.table = quantizer.tables().to(dtype)
            self.sizes = torch.tensor(quantizer.sizes, device=self.device)
            window = codec.config.transformer
            self.rope = rope_table(MAX_POSITIONS, window.head_dim, window.rope_base, self.device)
            self.transformer = [self._pack_layer(cast(WindowLayer, layer)) for layer in quantizer.post_module.layers]
            self.norm = quantizer.post_module.norm.weight.detach().to(dtype)
            stages = [cast(nn.ModuleList, stage) for stage in quantizer.upsample]
            self.upsample = [self._pack_stage(cast(CausalUpsample, up), cast(ConvNeXt, mix)) for up, mix in stages]
            self.layers = self._decoder_layers(decoder.model)
            groups = self._decoder_groups()
            packed = sm90.pack_layers([tuple(layer.taps for layer in group) for group in groups])
            for group, weights in zip(groups, packed, strict=True):
                group[0].sm90 = weights

    def run(self, codes: Tensor, packing: Packing, samples: Tensor) -> None:
        """Decode codes [F, codebooks] of packed streams into samples [F x frame_length]."""
        x = self._transform(embed_codes(codes, self.sizes, self.table), packing)
        for stage in self.upsample:
            x = self._upsample(x, stage, packing)
        self._decode(x, packing, samples)
        count_steps(self.seen, packing)

    def reset(self, slots: Tensor) -> None:
        """Reset these slots to the start of a stream. Keys need no clearing: steps before the first are masked."""
        for state in (self.seen, *self._pasts()):
            state.index_fill_(0, slots, 0)

    @property
    def nbytes(self) -> int:
        rings = [ring for layer in self.transformer for ring in (layer.keys, layer.values)]
        return sum(each.nbytes for each in (*self._pasts(), *rings))

    def _pasts(self) -> list[Tensor]:
        pasts = [*(stage.past for stage in self.upsample), *(layer.past for layer in self.layers)]
        return [past for past in pasts if past is not None]

    def _transform(self, x: Tensor, packing: Packing) -> Tensor:
        """Apply the transformer to x [F, dim], which is overwritten."""
        config, partials = self.config.transformer, None
        for layer in self.transformer:
            normed = fused_rms_norm(x, layer.norms[0], config.norm_eps, partials=partials)
            qkv, cache = linear(normed, layer.wqkv), (layer.keys, layer.values)
            attended = window_attention(qkv, self.rope, self.seen, packing, *cache, config.window_size)
            partials = _add(x, attended, layer.wo)
            normed = fused_rms_norm(x, layer.norms[1], config.norm_eps, partials=partials)
            partials = _add(x, linear(normed, layer.w13, gated=True), layer.w2)
        return fused_rms_norm(x, self.norm, config.norm_eps, partials=partials)

    def _upsample(self, x: Tensor, stage: UpsampleStage, packing: Packing) -> Tensor:
        x = self._apply(x, stage.up, packing)[0].view(-1, self.config.latent_dim)
        bias, scale, shift = stage.norm
        inner = depthwise_norm(x, stage.filters, bias, scale, shift, stage.eps, stage.past, packing)
        update_past(x, stage.past, packing)
        inner, _ = conv(inner, stage.expand, None, packing, activation="gelu")
        return conv(inner, stage.project, None, packing, residual=x)[0]

    def _decode(self, x: Tensor, packing: Packing, samples: Tensor) -> None:
        layers = iter(self.layers)
        activated = self._apply(x, next(layers), packing, plain=False)[1]
        for rate in self.config.decoder_rates:
            outputs = self._upsample_decoder(activated, next(layers), packing)
            x, activated = (each.view(rate * len(each), -1) for each in outputs)
            for _ in range(3):
                x, activated = self._residual(x, activated, next(layers), next(layers), packing)
        last = next(layers)
        assert last.past is not None
        output_conv(activated, last.taps, last.past, packing, samples)
        update_past(activated, last.past, packing)

    def _residual(
        self, x: Tensor, activated: Tensor, inner: ConvLayer, outer: ConvLayer, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """Apply a residual unit to x and activated = snake(x); returns its output y and snake(y)."""
        assert inner.past is not None
        assert inner.alpha is not None
        assert outer.alpha is not None
        hopper = self._hopper(inner, x, packing)
        if hopper is not None and not hopper.whole_unit:
            _, hidden = sm90.conv(activated, hopper, inner.taps, inner.alpha, inner.past, packing)
            self._update_past(activated, inner, packing)
            return self._apply(hidden, outer, packing, residual=x)
        weights = inner.taps, inner.alpha, outer.taps, outer.alpha
        if hopper is not None:
            outputs = sm90.residual_unit(x, activated, hopper, *weights, inner.past, packing)
        elif unit.should_fuse(*x.shape):
            outputs = unit.residual_unit(x, activated, *weights, inner.past, packing)
        else:
            hidden = self._apply(activated, inner, packing, plain=False)[1]
            return self._apply(hidden, outer, packing, residual=x)
        self._update_past(activated, inner, packing)
        return outputs

    def _hopper(self, layer: ConvLayer, x: Tensor, packing: Packing) -> sm90.Sm90Weights | None:
        """Return the weights of the layer's CUDA C++ kernel; None if Triton's is used for these rows."""
        applies = layer.sm90 is not None and layer.sm90.applies(len(x), packing.rate(x))
        return layer.sm90 if applies else None

    def _upsample_decoder(self, activated: Tensor, layer: ConvLayer, packing: Packing) -> tuple[Tensor, Tensor]:
        """Apply an upsampling convolution; the outputs of a row are its phases, one after the other."""
        hopper = self._hopper(layer, activated, packing)
        if hopper is None:
            return self._apply(activated, layer, packing)
        assert layer.past is not None
        assert layer.alpha is not None
        outputs = sm90.conv(activated, hopper, layer.taps, layer.alpha, layer.past, packing)
        self._update_past(activated, layer, packing)
        return outputs

    def _apply(
        self, x: Tensor, layer: ConvLayer, packing: Packing, *, plain: bool = True, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        outputs = conv(x, layer.taps, layer.past, packing, alpha=layer.alpha, plain=plain, residual=residual)
        self._update_past(x, layer, packing)
        return outputs

    def _update_past(self, x: Tensor, layer: ConvLayer, packing: Packing) -> None:
        if layer.past is not None:
            update_past(x, layer.past, packing)

    def _pack_layer(self, layer: WindowLayer) -> TransformerLayer:
        config, attention, forward = self.config.transformer, layer.attention, layer.feed_forward
        shape = (len(self.seen), config.n_head, config.window_size - 1 + MAX_STEPS, config.head_dim)
        keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        wo = attention.wo.weight.float() * layer.attention_layer_scale.gamma[:, None]
        w2 = forward.w2.weight.float() * layer.ffn_layer_scale.gamma[:, None]
        w13 = torch.cat((forward.w1.weight, forward.w3.weight))
        wqkv, wo, w13, w2 = (each.detach().to(self.dtype).contiguous() for each in (attention.wqkv.weight, wo, w13, w2))
        norms = (layer.attention_norm.weight.detach().to(self.dtype), layer.ffn_norm.weight.detach().to(self.dtype))
        return TransformerLayer(wqkv, wo, w13, w2, norms, keys, values)

    def _pack_stage(self, up: CausalUpsample, mix: ConvNeXt) -> UpsampleStage:
        filters = mix.dwconv.conv.weight.detach().squeeze(1).T.contiguous().to(self.dtype)
        norm = (_bias(mix.dwconv.conv), mix.norm.weight.detach().float(), mix.norm.bias.detach().float())
        return UpsampleStage(
            up=ConvLayer.of(pack_upsample(up, self.dtype), len(self.seen), None),
            filters=filters,
            norm=norm,
            eps=mix.norm.eps,
            past=filters.new_zeros(len(self.seen), len(filters) - 1, filters.shape[1]),
            expand=pack_linear(mix.pwconv1, self.dtype),
            project=pack_linear(mix.pwconv2, self.dtype, mix.gamma.detach().float()),
        )

    def _decoder_groups(self) -> list[tuple[ConvLayer, ...]]:
        """Return the upsampling convolutions and, as pairs, the residual units, in the order of `_decode`."""
        layers, found = iter(self.layers[1:]), list[tuple[ConvLayer, ...]]()
        for _ in self.config.decoder_rates:
            found.append((next(layers),))
            found += [(next(layers), next(layers)) for _ in range(3)]
        return found

    def _decoder_layers(self, model: nn.ModuleList) -> list[ConvLayer]:
        """Pack every convolution in order, each with the Snake that follows it."""
        flat: list[nn.Module] = []
        for module in model:
            for each in getattr(module, "block", [module]):
                flat += list(each.block) if isinstance(each, ResidualUnit) else [each]
        layers = []
        for index, module in enumerate(flat):
            following = next((each for each in flat[index + 1 :]), None)
            snake = following if isinstance(following, Snake) else None
            if isinstance(module, CausalConv):
                layers.append(ConvLayer.of(pack_conv(module, self.dtype), len(self.seen), snake))
            elif isinstance(module, CausalUpsample):
                layers.append(ConvLayer.of(pack_upsample(module, self.dtype), len(self.seen), snake))
        return layers


class FusedCall:
    """Workload that decodes up to `frames` packed frames.

    Input rows are slots, starts and counts of a `Packing`, then the codes.
    """

    def __init__(self, codec: FusedCodec, frames: int) -> None:
        self._codec, self.frames = codec, frames
        # Rows start at 16-byte aligned addresses for any number of frames: kernels are specialized on alignment.
        width = -(-frames // 4) * 4
        self.inputs = torch.zeros(3 + codec.config.num_codebooks, width, dtype=torch.int32, device=codec.device)
        self.inputs.copy_(torch.from_numpy(self.padding()))
        self.samples = torch.zeros(frames * codec.config.frame_length, device=codec.device)

    def padding(self) -> np.ndarray:
        """Return inputs in which every frame is padding."""
        inputs = np.zeros(self.inputs.shape, np.int32)
        inputs[0], inputs[1] = self._codec.spare, np.arange(inputs.shape[1])
        return inputs

    def run(self) -> None:
        slots, starts, counts, *_ = self.inputs[:, : self.frames]
        self._codec.run(self.inputs[3:, : self.frames].T, Packing(slots, starts, counts), self.samples)


class FusedDecoder(GraphDecoder[int, FusedCall]):
    """Streaming decoder on fused kernels. A call decodes the frames of all streams, packed along time.

    Raises RuntimeError if no size works.
    """

    backend = "graph"

    def __init__(self, codec: Codec, slots: int, dtype: torch.dtype, *, capture: bool) -> None:
        super().__init__(codec, slots)
        self.past = FusedCodec(codec, slots, dtype)
        largest = min(MAX_FRAMES, slots * MAX_STEPS)
        sizes = [size for size in FRAME_BUCKETS if size < largest]
        sizes.append(min(size for size in FRAME_BUCKETS if size >= largest))
        self._calls = GraphSizes("codec graph", {size: FusedCall(self.past, size) for size in sizes})
        self._reset = CapturedGraph(ResetCall(self.past, slots, codec.device))
        if capture:
            compile_ahead(self._calls[size].workload for size in self._calls)
            self._capture()

    def _split(self, lengths: Sequence[int]) -> Iterator[list[FrameSpan]]:
        return pack_calls(lengths, max(self._calls))

    def _launch(self, codes: np.ndarray, slots: Sequence[int], spans: list[FrameSpan]) -> Tensor:
        used = sum(span.frames for span in spans)
        size = next(size for size in self._calls if size >= used)
        inputs, start = self._calls[size].workload.padding(), 0
        for span in spans:
            place = slice(start, start + span.frames)
            inputs[0, place], inputs[1, place], inputs[2, place] = slots[span.row], start, span.frames
            inputs[3:, place] = codes[span.row, :, span.start : span.start + span.frames]
            start += span.frames
        return self._calls.run(size, inputs).samples[: used * self.codec.config.frame_length]


def pack_calls(lengths: Sequence[int], max_frames: int = MAX_FRAMES) -> Iterator[list[FrameSpan]]:
    """Pack all frames of all rows into as few calls as possible; rows that do not fit continue in the next call."""
    packed = [0] * len(lengths)
    while any(packed[row] < length for row, length in enumerate(lengths)):
        spans, free = list[FrameSpan](), max_frames
        for row, length in enumerate(lengths):
            frames = min(length - packed[row], MAX_STEPS, free)
            if frames:
                spans.append(FrameSpan(row, packed[row], frames))
                packed[row] += frames
                free -= frames
        yield spans
