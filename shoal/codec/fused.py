"""The decode path of the codec through fused kernels: channels-last, half precision, fixed shapes.

The same function as `Codec.decode_from` over a `SlotPast`, one launch per layer and one for what it remembers. Scales
that follow a product are folded into its weights. This is what CUDA graphs capture: one for every pair of batch size
and frames per call, both powers of two.
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
from shoal.kernels.capture import Captured, to_host
from shoal.kernels.conv import Taps, conv, depthwise_norm, remember
from shoal.kernels.jit import next_power_of_two
from shoal.kernels.linear import linear
from shoal.kernels.rms_norm import rms_norm
from shoal.kernels.rope import rope_table
from shoal.kernels.window_attention import window_attention

if TYPE_CHECKING:
    from shoal.codec.dac import Codec

# Frames of all rows that one call decodes: beyond this a larger call is no faster and only takes memory.
MOST_FRAMES = 256
# Frames per row and call: what the ring of keys has to spare.
MOST_STEPS = 32
# Streams that one launch resets.
RESETS = 8
# Positions of the rotary table: nearly an hour of speech in one stream.
POSITIONS = 1 << 16


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
class Layer:
    """A convolution, the frequencies of the Snake behind it, and what it remembers of every slot."""

    taps: Taps
    rate: int  # inputs per frame
    alpha: Tensor | None
    past: Tensor | None

    @classmethod
    def of(cls, taps: Taps, rate: int, slots: int, following: Snake | None) -> Layer:
        alpha = None if following is None else following.alpha.detach().float().flatten().contiguous()
        shape = (slots, taps.steps, taps.weight.shape[2])
        return cls(taps, rate, alpha, taps.weight.new_zeros(shape) if taps.steps else None)


@dataclass(slots=True)
class Mixer:
    """A layer of the window transformer, its keys and values in rings."""

    wqkv: Tensor
    wo: Tensor
    w13: Tensor
    w2: Tensor
    norms: tuple[Tensor, Tensor]
    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class Spread:
    """A doubling of the rate and the ConvNeXt mix behind it."""

    up: Layer
    filters: Tensor
    norm: tuple[Tensor, Tensor, Tensor]  # bias of the filters, scale, shift
    eps: float
    past: Tensor
    rate: int
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
            self.last, self.first = (sizes - 1)[:, None], (sizes.cumsum(0) - sizes)[:, None]
            mixer = codec.config.transformer
            self.rope = rope_table(POSITIONS, mixer.head_dim, mixer.rope_base, self.device)
            self.mixers = [self._mixer(cast(WindowLayer, layer)) for layer in quantizer.post_module.layers]
            self.norm = quantizer.post_module.norm.weight.detach().to(dtype)
            rate = 1
            self.spreads: list[Spread] = []
            for stage in quantizer.upsample:
                up, mix = cast(nn.ModuleList, stage)
                self.spreads.append(self._spread(cast(CausalUpsample, up), cast(ConvNeXt, mix), rate))
                rate *= cast(CausalUpsample, up).stride
            self.layers = self._decoder_layers(decoder.model, rate)

    def run(self, codes: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        """Codes [n, codebooks, T] of the streams in slots [n], lengths [n] of them real -> samples [n, T * frame]"""
        rows = torch.minimum(codes, self.last) + self.first
        x = F.embedding(rows, self.tables).float().sum(1).to(self.dtype)
        x = self._mix(x, slots)
        for spread in self.spreads:
            x = self._spread_out(x, spread, slots, lengths)
        samples = self._decode(x, slots, lengths)
        self.seen.index_add_(0, slots.long(), lengths.long())
        return samples.flatten(1).float()

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

    def _mix(self, x: Tensor, slots: Tensor) -> Tensor:
        count, length, dim = x.shape
        config = self.config.transformer
        x = x.reshape(-1, dim)
        for mixer in self.mixers:
            qkv = linear(x, mixer.wqkv, norm=mixer.norms[0], eps=config.norm_eps).view(count, length, -1)
            memory = mixer.keys, mixer.values
            mixed = window_attention(qkv, self.rope, self.seen, slots, *memory, config.window_size)
            x = linear(mixed.view(count * length, -1), mixer.wo, residual=x)
            inner = linear(x, mixer.w13, norm=mixer.norms[1], eps=config.norm_eps, gated=True)
            x = linear(inner, mixer.w2, residual=x)
        return rms_norm(x, self.norm, config.norm_eps).view(count, length, dim)

    def _spread_out(self, x: Tensor, spread: Spread, slots: Tensor, lengths: Tensor) -> Tensor:
        x = self._apply(x, spread.up, slots, lengths)[0]
        x = x.view(len(x), -1, self.config.latent_dim)
        bias, scale, shift = spread.norm
        inner = depthwise_norm(x, spread.filters, bias, scale, shift, spread.eps, spread.past, slots)
        remember(x, spread.past, slots, lengths, spread.rate)
        inner, _ = conv(inner, spread.widen, None, slots, activation="gelu")
        return conv(inner, spread.narrow, None, slots, residual=x)[0]

    def _decode(self, x: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
        layers = iter(self.layers)
        turned = self._apply(x, next(layers), slots, lengths, plain=False)[1]
        for rate in self.config.decoder_rates:
            x, turned = self._apply(turned, next(layers), slots, lengths)
            x, turned = (each.view(len(x), rate * each.shape[1], -1) for each in (x, turned))
            for _ in range(3):
                inner = self._apply(turned, next(layers), slots, lengths, plain=False)[1]
                x, turned = self._apply(inner, next(layers), slots, lengths, residual=x)
        last = next(layers)
        samples, _ = conv(turned, last.taps, last.past, slots, activation="tanh")
        self._keep(turned, last, slots, lengths)
        return samples

    def _apply(
        self,
        x: Tensor,
        layer: Layer,
        slots: Tensor,
        lengths: Tensor,
        *,
        plain: bool = True,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        done = conv(x, layer.taps, layer.past, slots, alpha=layer.alpha, plain=plain, residual=residual)
        self._keep(x, layer, slots, lengths)
        return done

    def _keep(self, x: Tensor, layer: Layer, slots: Tensor, lengths: Tensor) -> None:
        if layer.past is not None:
            remember(x, layer.past, slots, lengths, layer.rate)

    def _mixer(self, layer: WindowLayer) -> Mixer:
        config, attention, forward = self.config.transformer, layer.attention, layer.feed_forward
        shape = (len(self.seen), config.window_size - 1 + MOST_STEPS, config.n_head, config.head_dim)
        keys, values = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
        wo = attention.wo.weight.float() * layer.attention_layer_scale.gamma[:, None]
        w2 = forward.w2.weight.float() * layer.ffn_layer_scale.gamma[:, None]
        w13 = torch.cat((forward.w1.weight, forward.w3.weight))
        wqkv, wo, w13, w2 = (each.detach().to(self.dtype).contiguous() for each in (attention.wqkv.weight, wo, w13, w2))
        norms = (layer.attention_norm.weight.detach().to(self.dtype), layer.ffn_norm.weight.detach().to(self.dtype))
        return Mixer(wqkv, wo, w13, w2, norms, keys, values)

    def _spread(self, up: CausalUpsample, mix: ConvNeXt, rate: int) -> Spread:
        filters = mix.dwconv.conv.weight.detach().squeeze(1).T.contiguous().to(self.dtype)
        after = rate * up.stride
        norm = (_bias(mix.dwconv.conv), mix.norm.weight.detach().float(), mix.norm.bias.detach().float())
        return Spread(
            up=Layer.of(pack_upsample(up, self.dtype), rate, len(self.seen), None),
            filters=filters,
            norm=norm,
            eps=mix.norm.eps,
            past=filters.new_zeros(len(self.seen), len(filters) - 1, filters.shape[1]),
            rate=after,
            widen=pack_linear(mix.pwconv1, self.dtype),
            narrow=pack_linear(mix.pwconv2, self.dtype, mix.gamma.detach().float()),
        )

    def _decoder_layers(self, model: nn.ModuleList, rate: int) -> list[Layer]:
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
                layers.append(Layer.of(pack_conv(module, self.dtype), rate, len(self.seen), snake))
            elif isinstance(module, CausalUpsample):
                layers.append(Layer.of(pack_upsample(module, self.dtype), rate, len(self.seen), snake))
                rate *= module.stride
        return layers


class FusedCall:
    """One size of call: n rows of T frames. Inputs are slots, lengths, then the codes of every row."""

    def __init__(self, codec: FusedCodec, rows: int, frames: int) -> None:
        self._codec, self.frames = codec, frames
        codebooks = codec.config.num_codebooks
        self.inputs = torch.zeros(rows, 2 + codebooks * frames, dtype=torch.int32, device=codec.device)
        self.inputs[:, 0] = codec.spare
        self.samples = torch.zeros(rows, frames * codec.config.frame_length, device=codec.device)

    def run(self) -> None:
        slots, lengths = self.inputs[:, 0].contiguous(), self.inputs[:, 1].contiguous()
        codes = self.inputs[:, 2:].unflatten(1, (-1, self.frames)).long()
        self.samples.copy_(self._codec.run(codes, slots, lengths))


class FusedReset:
    """A few streams begin anew: a graph, since it is one small launch for every layer, and somebody always leaves."""

    def __init__(self, codec: FusedCodec) -> None:
        self._codec = codec
        self.inputs = torch.full((RESETS,), codec.spare, dtype=torch.int32, device=codec.device)

    def run(self) -> None:
        self._codec.reset(self.inputs.long())


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples of some rows, from the frame `start` on, on their way to the host, noise behind the ends of rows."""

    rows: list[int]
    start: int
    samples: Tensor


@dataclass(frozen=True, slots=True)
class Decoding:
    """Calls that have been launched; `rows` waits for what they make."""

    pieces: list[Piece]
    lengths: list[int]  # samples of each row
    step: int  # samples per frame
    ended: torch.cuda.Event | None

    def rows(self) -> list[np.ndarray]:
        """The samples of each row. The one place where the codec waits for the device."""
        if self.ended is not None:
            self.ended.synchronize()
        rows = [np.empty(length, np.float32) for length in self.lengths]
        for piece in self.pieces:
            begin = piece.start * self.step
            for row, samples in zip(piece.rows, piece.samples.numpy(), strict=True):
                part = rows[row][begin : begin + len(samples)]
                part[:] = samples[: len(part)]
        return rows


class FusedDecoder:
    """The interface of `StreamingDecoder`, on a stream of its own: the model may run beside it."""

    def __init__(self, codec: Codec, slots: int, dtype: torch.dtype, *, capture: bool) -> None:
        self.codec = codec
        self.past = FusedCodec(codec, slots, dtype)
        self._seen = [0] * slots
        self._calls: dict[tuple[int, int], Captured[FusedCall]] = {}
        self._reset = Captured(FusedReset(self.past))
        self._most = next_power_of_two(slots)
        self._stream = torch.cuda.Stream() if codec.device.type == "cuda" else None
        if capture:
            self._capture()

    @torch.inference_mode()
    def begin(self, codes: np.ndarray, slots: Sequence[int], lengths: Sequence[int]) -> Decoding:
        """Launch the decoding of codes [n, codebooks, T], lengths [n] of them real."""
        longest = max(lengths)
        if max(map(self._seen.__getitem__, slots)) + longest > POSITIONS:
            raise RuntimeError(f"a stream of more than {POSITIONS} frames")
        for slot, new in zip(slots, lengths, strict=True):
            self._seen[slot] += new
        with torch.cuda.stream(self._stream):
            pieces = [piece for rows in _alike(lengths) for piece in self._launch(codes, slots, lengths, rows)]
            ended = None if self._stream is None else self._stream.record_event()
        step = self.codec.config.frame_length
        return Decoding(pieces, [length * step for length in lengths], step, ended)

    def decode(self, codes: Tensor, slots: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
        """As `StreamingDecoder.decode`; codes are on the host, and so are the samples."""
        rows = self.begin(codes.numpy(), slots, lengths or [codes.shape[-1]] * len(slots)).rows()
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

    def _launch(
        self, codes: np.ndarray, slots: Sequence[int], lengths: Sequence[int], rows: list[int]
    ) -> Iterator[Piece]:
        """All frames of some rows, in as few calls as memory allows."""
        count = next_power_of_two(len(rows))
        longest = max(lengths[row] for row in rows)
        piece = min(next_power_of_two(longest), MOST_STEPS, max(1, MOST_FRAMES // count))
        for start in range(0, longest, piece):
            call = self._call(count, piece)
            inputs = np.zeros((count, 2 + codes.shape[1] * piece), np.int32)
            inputs[:, 0] = self.past.spare
            part = codes[rows, :, start : start + piece]
            grid = inputs[: len(rows), 2:].reshape(len(rows), codes.shape[1], piece)
            grid[:, :, : part.shape[2]] = part
            inputs[: len(rows), 2:] = grid.reshape(len(rows), -1)
            inputs[: len(rows), 0] = [slots[row] for row in rows]
            inputs[: len(rows), 1] = [min(max(lengths[row] - start, 0), piece) for row in rows]
            call.run(inputs)
            yield Piece(rows, start, to_host(call.work.samples[: len(rows)]))

    def _call(self, rows: int, frames: int) -> Captured[FusedCall]:
        if (rows, frames) not in self._calls:
            self._calls[rows, frames] = Captured(FusedCall(self.past, rows, frames))
        return self._calls[rows, frames]

    def _capture(self) -> None:
        """Every size that can come up, the largest first, so that the others fit into the memory it leaves."""
        sizes = [1 << power for power in range(self._most.bit_length())]
        lengths = [1 << power for power in range(MOST_STEPS.bit_length())]
        pairs = [(rows, frames) for rows in sizes for frames in lengths if rows * frames <= MOST_FRAMES or frames == 1]
        pool = None
        for rows, frames in sorted(pairs, key=lambda pair: -pair[0] * pair[1]):
            pool = self._call(rows, frames).capture(pool)
        self._reset.capture(pool)


def _alike(lengths: Sequence[int]) -> list[list[int]]:
    """Rows that are decoded together: those of about the same length."""
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault(next_power_of_two(max(1, length)), []).append(row)
    return list(groups.values())
