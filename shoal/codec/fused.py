"""The decode path of the codec through fused kernels: channels-last, half precision, fixed shapes.

The same function as `Codec.decode_from` over a `SlotPast`, one launch per layer and one for what it remembers. Scales
that follow a product are folded into its weights. A call decodes frames of any streams, packed one behind the other, so
a CUDA graph for each of a few numbers of frames is all it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.codec.layers import CausalConv, CausalUpsample, ConvNeXt, ResidualUnit, Snake, WindowLayer
from shoal.kernels import residual_unit as unit
from shoal.kernels.conv import Taps, conv, depthwise_norm, remember
from shoal.kernels.cuda_graph import CapturedGraph, compile_ahead, to_host
from shoal.kernels.linear import linear
from shoal.kernels.packing import Packing
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.rope import rope_table
from shoal.kernels.window_attention import MAX_STEPS, window_attention

if TYPE_CHECKING:
    from shoal.codec.dac import Codec

# Frames that calls are made for. Beyond the last a larger one is no faster and only takes memory.
FRAME_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MAX_FRAMES = FRAME_BUCKETS[-1]
# Streams that one launch resets.
RESETS = 8
# Positions of the rotary table: more than an hour and a half of speech in one stream.
MAX_POSITIONS = 1 << 17


def pack_conv(layer: CausalConv, dtype: torch.dtype) -> Taps:
    conv = layer.conv
    return Taps(conv.weight.detach().permute(2, 0, 1).contiguous().to(dtype), _bias(conv), conv.dilation[0])


def pack_upsample(layer: CausalUpsample, dtype: torch.dtype) -> Taps:
    """Taps from the oldest input to the newest; outputs are the `stride` phases, one behind the other."""
    weight, stride = layer.conv.weight.detach(), layer.stride  # [in, out, kernel]
    phases = weight.unflatten(2, (-1, stride)).flip(2)  # [in, out, taps, stride]
    packed = phases.permute(2, 3, 1, 0).flatten(1, 2).contiguous()
    return Taps(packed.to(dtype), _bias(layer.conv).repeat(stride))


def pack_linear(layer: nn.Linear, dtype: torch.dtype, scale: Tensor | None = None) -> Taps:
    weight, bias = layer.weight.detach().float(), layer.bias.detach().float()
    if scale is not None:
        weight, bias = weight * scale[:, None], bias * scale
    return Taps(weight[None].to(dtype), bias.contiguous())


def _bias(layer: nn.Conv1d | nn.ConvTranspose1d) -> Tensor:
    assert layer.bias is not None
    return layer.bias.detach().float().contiguous()


@dataclass(slots=True)
class ConvLayer:
    """A convolution, the frequencies of the Snake behind it, and what it remembers of every slot."""

    taps: Taps
    alpha: Tensor | None
    past: Tensor | None

    @classmethod
    def of(cls, taps: Taps, slots: int, following: Snake | None) -> ConvLayer:
        alpha = None if following is None else following.alpha.detach().float().flatten().contiguous()
        shape = (slots, taps.steps, taps.weight.shape[2])
        return cls(taps, alpha, taps.weight.new_zeros(shape) if taps.steps else None)


@dataclass(slots=True)
class TransformerLayer:
    """A layer of the window transformer, its keys and values in rings."""

    wqkv: Tensor
    wo: Tensor
    w13: Tensor
    w2: Tensor
    norms: tuple[Tensor, Tensor]
    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class UpsampleStage:
    """A doubling of the rate and the ConvNeXt mix behind it."""

    up: ConvLayer
    filters: Tensor
    norm: tuple[Tensor, Tensor, Tensor]  # bias of the filters, scale, shift
    eps: float
    past: Tensor
    widen: Taps
    narrow: Taps


class FusedCodec:
    """Weights, packed once, and the state of every slot; one more than asked for, for rows that stand for nobody."""

    def __init__(self, codec: Codec, slots: int, dtype: torch.dtype) -> None:
        self.config, self.dtype, self.device = codec.config, dtype, codec.device
        self.spare = slots
        quantizer, decoder = codec.quantizer, codec.decoder
        self.seen = torch.zeros(slots + 1, dtype=torch.long, device=self.device)
        with torch.inference_mode():
            self.tables = quantizer.tables().to(dtype)
            sizes = torch.tensor(quantizer.sizes, device=self.device)
            self.last, self.first = sizes - 1, sizes.cumsum(0) - sizes
            mixer = codec.config.transformer
            self.rope = rope_table(MAX_POSITIONS, mixer.head_dim, mixer.rope_base, self.device)
            self.mixers = [self._mixer(cast(WindowLayer, layer)) for layer in quantizer.post_module.layers]
            self.norm = quantizer.post_module.norm.weight.detach().to(dtype)
            stages = [cast(nn.ModuleList, stage) for stage in quantizer.upsample]
            self.spreads = [self._spread(cast(CausalUpsample, up), cast(ConvNeXt, mix)) for up, mix in stages]
            self.layers = self._decoder_layers(decoder.model)

    def run(self, codes: Tensor, packing: Packing) -> Tensor:
        """Codes [F, codebooks] of packed streams -> samples [F x frame length]"""
        x = F.embedding(torch.minimum(codes, self.last) + self.first, self.tables).float().sum(1).to(self.dtype)
        x = self._mix(x, packing)
        for spread in self.spreads:
            x = self._spread_out(x, spread, packing)
        samples = self._decode(x, packing)
        self.seen.index_add_(0, packing.slots.long(), (packing.counts > 0).long())
        return samples.flatten().float()

    def reset(self, slots: Tensor) -> None:
        """These streams begin anew. Keys need no clearing: nobody looks at steps from before the first."""
        for state in (self.seen, *self._pasts()):
            state.index_fill_(0, slots, 0)

    @property
    def nbytes(self) -> int:
        rings = [ring for mixer in self.mixers for ring in (mixer.keys, mixer.values)]
        return sum(each.nbytes for each in (*self._pasts(), *rings))

    def _pasts(self) -> list[Tensor]:
        return [past for past in (*(s.past for s in self.spreads), *(x.past for x in self.layers)) if past is not None]

    def _mix(self, x: Tensor, packing: Packing) -> Tensor:
        config = self.config.transformer
        for mixer in self.mixers:
            qkv = linear(x, mixer.wqkv, norm=mixer.norms[0], eps=config.norm_eps)
            memory = mixer.keys, mixer.values
            mixed = window_attention(qkv, self.rope, self.seen, packing, *memory, config.window_size)
            x = linear(mixed, mixer.wo, residual=x)
            inner = linear(x, mixer.w13, norm=mixer.norms[1], eps=config.norm_eps, gated=True)
            x = linear(inner, mixer.w2, residual=x)
        return rms_norm(x, self.norm, config.norm_eps)

    def _spread_out(self, x: Tensor, spread: UpsampleStage, packing: Packing) -> Tensor:
        x = self._apply(x, spread.up, packing)[0].view(-1, self.config.latent_dim)
        bias, scale, shift = spread.norm
        inner = depthwise_norm(x, spread.filters, bias, scale, shift, spread.eps, spread.past, packing)
        remember(x, spread.past, packing)
        inner, _ = conv(inner, spread.widen, None, packing, activation="gelu")
        return conv(inner, spread.narrow, None, packing, residual=x)[0]

    def _decode(self, x: Tensor, packing: Packing) -> Tensor:
        layers = iter(self.layers)
        turned = self._apply(x, next(layers), packing, plain=False)[1]
        for rate in self.config.decoder_rates:
            x, turned = (each.view(rate * len(each), -1) for each in self._apply(turned, next(layers), packing))
            for _ in range(3):
                x, turned = self._residual(x, turned, next(layers), next(layers), packing)
        last = next(layers)
        samples, _ = conv(turned, last.taps, last.past, packing, activation="tanh")
        self._keep(turned, last, packing)
        return samples

    def _residual(
        self, x: Tensor, turned: Tensor, inner: ConvLayer, outer: ConvLayer, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """x and snake(x) -> the same after a residual unit."""
        if not unit.should_fuse(*x.shape):
            middle = self._apply(turned, inner, packing, plain=False)[1]
            return self._apply(middle, outer, packing, residual=x)
        assert inner.past is not None
        assert inner.alpha is not None
        assert outer.alpha is not None
        weights = inner.taps, inner.alpha, outer.taps, outer.alpha
        done = unit.residual_unit(x, turned, *weights, inner.past, packing)
        self._keep(turned, inner, packing)
        return done

    def _apply(
        self, x: Tensor, layer: ConvLayer, packing: Packing, *, plain: bool = True, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        done = conv(x, layer.taps, layer.past, packing, alpha=layer.alpha, plain=plain, residual=residual)
        self._keep(x, layer, packing)
        return done

    def _keep(self, x: Tensor, layer: ConvLayer, packing: Packing) -> None:
        if layer.past is not None:
            remember(x, layer.past, packing)

    def _mixer(self, layer: WindowLayer) -> TransformerLayer:
        config, attention, forward = self.config.transformer, layer.attention, layer.feed_forward
        shape = (len(self.seen), config.window_size - 1 + MAX_STEPS, config.n_head, config.head_dim)
        keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        wo = attention.wo.weight.float() * layer.attention_layer_scale.gamma[:, None]
        w2 = forward.w2.weight.float() * layer.ffn_layer_scale.gamma[:, None]
        w13 = torch.cat((forward.w1.weight, forward.w3.weight))
        wqkv, wo, w13, w2 = (each.detach().to(self.dtype).contiguous() for each in (attention.wqkv.weight, wo, w13, w2))
        norms = (layer.attention_norm.weight.detach().to(self.dtype), layer.ffn_norm.weight.detach().to(self.dtype))
        return TransformerLayer(wqkv, wo, w13, w2, norms, keys, values)

    def _spread(self, up: CausalUpsample, mix: ConvNeXt) -> UpsampleStage:
        filters = mix.dwconv.conv.weight.detach().squeeze(1).T.contiguous().to(self.dtype)
        norm = (_bias(mix.dwconv.conv), mix.norm.weight.detach().float(), mix.norm.bias.detach().float())
        return UpsampleStage(
            up=ConvLayer.of(pack_upsample(up, self.dtype), len(self.seen), None),
            filters=filters,
            norm=norm,
            eps=mix.norm.eps,
            past=filters.new_zeros(len(self.seen), len(filters) - 1, filters.shape[1]),
            widen=pack_linear(mix.pwconv1, self.dtype),
            narrow=pack_linear(mix.pwconv2, self.dtype, mix.gamma.detach().float()),
        )

    def _decoder_layers(self, model: nn.ModuleList) -> list[ConvLayer]:
        """Every convolution in order, each with the Snake that comes next."""
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
    """One size of call: so many frames. Inputs are slots, starts and counts of a `Packing`, then the codes."""

    def __init__(self, codec: FusedCodec, frames: int) -> None:
        self._codec, self.frames = codec, frames
        # Rows begin at addresses that kernels are built for, however few frames there are.
        width = -(-frames // 4) * 4
        self.inputs = torch.zeros(3 + codec.config.num_codebooks, width, dtype=torch.int32, device=codec.device)
        self.inputs.copy_(torch.from_numpy(self.blank()))
        self.samples = torch.zeros(frames * codec.config.frame_length, device=codec.device)

    def blank(self) -> np.ndarray:
        """Inputs that decode nobody's frames."""
        inputs = np.zeros(self.inputs.shape, np.int32)
        inputs[0], inputs[1] = self._codec.spare, np.arange(inputs.shape[1])
        return inputs

    def run(self) -> None:
        slots, starts, counts, *_ = self.inputs[:, : self.frames]
        codes = self.inputs[3:, : self.frames].T.long()
        self.samples.copy_(self._codec.run(codes, Packing(slots, starts, counts)))


class FusedReset:
    """A few streams begin anew: a graph, since it is one small launch for every layer, and somebody always leaves."""

    def __init__(self, codec: FusedCodec) -> None:
        self._codec = codec
        self.inputs = torch.full((RESETS,), codec.spare, dtype=torch.int32, device=codec.device)

    def run(self) -> None:
        self._codec.reset(self.inputs.long())


@dataclass(frozen=True, slots=True)
class FrameSpan:
    """Frames of a row, from `start` on, that one call decodes."""

    row: int
    start: int
    frames: int


@dataclass(frozen=True, slots=True)
class PendingDecode:
    """Calls that have been launched; `rows` waits for what they make."""

    calls: list[tuple[list[FrameSpan], Tensor]]  # with the samples of all parts, one behind the other
    lengths: list[int]  # frames of each row
    step: int  # samples per frame
    ended: torch.cuda.Event | None

    def wait(self) -> list[np.ndarray]:
        """The samples of each row. The one place where the codec waits for the device."""
        if self.ended is not None:
            self.ended.synchronize()
        rows = [np.empty(length * self.step, np.float32) for length in self.lengths]
        for parts, samples in self.calls:
            ends = np.cumsum([part.frames * self.step for part in parts])
            for part, piece in zip(parts, np.split(samples.numpy(), ends[:-1]), strict=True):
                begin = part.start * self.step
                rows[part.row][begin : begin + len(piece)] = piece
        return rows


class FusedDecoder:
    """The interface of `StreamingDecoder`, on a stream of its own: the model may run beside it."""

    def __init__(self, codec: Codec, slots: int, dtype: torch.dtype, *, capture: bool) -> None:
        self.codec = codec
        self.past = FusedCodec(codec, slots, dtype)
        self._seen = [0] * slots
        most = min(MAX_FRAMES, slots * MAX_STEPS)
        sizes = [size for size in FRAME_BUCKETS if size < most] + [min(size for size in FRAME_BUCKETS if size >= most)]
        self._calls = {size: CapturedGraph(FusedCall(self.past, size)) for size in sizes}
        self._reset = CapturedGraph(FusedReset(self.past))
        self._stream = torch.cuda.Stream() if codec.device.type == "cuda" else None
        if capture:
            self._capture()

    @torch.inference_mode()
    def launch(self, codes: np.ndarray, slots: Sequence[int], lengths: Sequence[int]) -> PendingDecode:
        """Launch the decoding of codes [n, codebooks, T], lengths [n] of them real."""
        if not all(map(self.can_extend, slots, lengths)):
            raise RuntimeError(f"a stream of more than {MAX_POSITIONS} frames")
        for slot, new in zip(slots, lengths, strict=True):
            self._seen[slot] += new
        with torch.cuda.stream(self._stream):
            calls = [(parts, self._launch(codes, slots, parts)) for parts in pack_calls(lengths)]
            ended = None if self._stream is None else self._stream.record_event()
        return PendingDecode(calls, list(lengths), self.codec.config.frame_length, ended)

    def can_extend(self, slot: int, frames: int) -> bool:
        """Whether the stream of a slot may have so many more frames."""
        return self._seen[slot] + frames <= MAX_POSITIONS

    def decode(self, codes: Tensor, slots: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
        """As `StreamingDecoder.decode`; codes are on the host, and so are the samples."""
        rows = self.launch(codes.numpy(), slots, lengths or [codes.shape[-1]] * len(slots)).wait()
        width = codes.shape[-1] * self.codec.config.frame_length
        return torch.stack([F.pad(torch.from_numpy(row), (0, width - len(row))) for row in rows])

    @torch.inference_mode()
    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._seen[slot] = 0
        with torch.cuda.stream(self._stream):
            for start in range(0, len(slots), RESETS):
                piece = list(slots[start : start + RESETS])
                self._reset.run(np.array(piece + [self.past.spare] * (RESETS - len(piece)), np.int32))

    def _launch(self, codes: np.ndarray, slots: Sequence[int], parts: list[FrameSpan]) -> Tensor:
        """One call; its samples are on their way to the host."""
        used = sum(part.frames for part in parts)
        call = next(call for size, call in self._calls.items() if size >= used)
        inputs, start = call.workload.blank(), 0
        for part in parts:
            place = slice(start, start + part.frames)
            inputs[0, place], inputs[1, place], inputs[2, place] = slots[part.row], start, part.frames
            inputs[3:, place] = codes[part.row, :, part.start : part.start + part.frames]
            start += part.frames
        call.run(inputs)
        return to_host(call.workload.samples[: used * self.codec.config.frame_length])

    def _capture(self) -> None:
        """The largest first, so that the others fit into the memory it leaves."""
        compile_ahead(call.workload for call in self._calls.values())
        pool = None
        for call in reversed(self._calls.values()):
            pool = call.capture(pool)
        self._reset.capture(pool)


def pack_calls(lengths: Sequence[int]) -> Iterator[list[FrameSpan]]:
    """All frames of all rows in as few calls as can be. What a row does not get into one call is in the next."""
    done = [0] * len(lengths)
    while any(done[row] < length for row, length in enumerate(lengths)):
        parts, room = list[FrameSpan](), MAX_FRAMES
        for row, length in enumerate(lengths):
            frames = min(length - done[row], MAX_STEPS, room)
            if frames:
                parts.append(FrameSpan(row, done[row], frames))
                done[row] += frames
                room -= frames
        yield parts
