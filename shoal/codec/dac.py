"""Modified DAC codec: samples -> codes -> samples, with a causal encoder and a causal decoder."""

from collections.abc import Callable
from threading import Lock

import torch
from torch import Tensor, nn

from shoal.codec.config import DILATIONS, KERNEL, CodecConfig
from shoal.codec.layers import (
    CausalConv,
    CausalUpsample,
    ResidualUnit,
    Snake,
    WindowTransformer,
    apply_layers,
)
from shoal.codec.quantizer import Quantizer
from shoal.codec.streaming import NoPast, Past, SlotPast
from shoal.errors import InvalidRequest


class Float32Convolutions:
    """Context manager that turns off TF32 in cuDNN convolutions. Thread-safe and reentrant.

    cuDNN's switch is process-wide: the first thread to enter saves it, the last one to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside, self._saved = 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._saved = torch.backends.cudnn.allow_tf32
                torch.backends.cudnn.allow_tf32 = False
            self._inside += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.cudnn.allow_tf32 = self._saved


# TF32 rounds inputs to 10 bits, which changes about 1 % of the codes of a voice.
float32_convolutions = Float32Convolutions()


class DacBlock(nn.Module):
    """Sequential layers, under the attribute name that checkpoints use."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.block = nn.ModuleList(layers)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        return apply_layers(self.block, x, past)


class DacEncoder(nn.Module):
    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.block = nn.ModuleList((CausalConv(1, config.encoder_dim, KERNEL),))
        steps_per_frame = config.frame_length
        for index, rate in enumerate(config.encoder_rates):
            steps_per_frame //= rate
            self.block.append(_encoder_block(config, index, rate, steps_per_frame))
        width = config.encoder_dim * 2 ** len(config.encoder_rates)
        self.block.append(Snake(width))
        self.block.append(CausalConv(width, config.latent_dim, 3))

    def forward(self, samples: Tensor, past: Past) -> Tensor:
        """Encode samples [n, 1, samples] -> latent [n, latent_dim, steps]."""
        return apply_layers(self.block, samples, past)


def _encoder_block(config: CodecConfig, index: int, rate: int, steps_per_frame: int) -> DacBlock:
    channels = config.encoder_dim * 2**index
    units = [ResidualUnit(channels, dilation) for dilation in DILATIONS]
    down = CausalConv(channels, 2 * channels, 2 * rate, stride=rate)
    transformer = config.encoder_transformer(index)
    tail = [] if transformer is None else [WindowTransformer(transformer, steps_per_frame)]
    return DacBlock(*units, Snake(channels), down, *tail)


class DacDecoder(nn.Module):
    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        channels = config.decoder_dim
        self.model = nn.ModuleList((CausalConv(config.latent_dim, channels, KERNEL),))
        for rate in config.decoder_rates:
            up = CausalUpsample(channels, channels // 2, 2 * rate, rate)
            units = [ResidualUnit(channels // 2, dilation) for dilation in DILATIONS]
            self.model.append(DacBlock(Snake(channels), up, *units))
            channels //= 2
        self.model.append(Snake(channels))
        self.model.append(CausalConv(channels, 1, KERNEL))

    def forward(self, latent: Tensor, past: Past) -> Tensor:
        """Decode latent [n, latent_dim, steps] -> samples [n, 1, samples] in (-1, 1)."""
        return torch.tanh(apply_layers(self.model, latent, past))


class Codec(nn.Module):
    """Encoder, quantizer and decoder. Can be built without the encoder, for servers that never encode."""

    # Long inputs are processed in chunks of this many frames to bound memory; chunking is exact. Every engine reserves
    # the memory of one chunk: with Fish's codec 4.2 MB per frame, beside the workspaces of cuDNN.
    CHUNK_FRAMES = 64

    def __init__(self, config: CodecConfig, *, encoder: bool = True) -> None:
        super().__init__()
        self.config = config
        if encoder:
            self.encoder = DacEncoder(config)
        self.quantizer = Quantizer(config, encoder=encoder)
        self.decoder = DacDecoder(config)

    @property
    def device(self) -> torch.device:
        return self.decoder.model[0].conv.weight.device  # type: ignore[union-attr,return-value]

    @property
    def can_encode(self) -> bool:
        return hasattr(self, "encoder")

    def reserve(self, frames: int) -> None:
        """Grow the rotary tables for streams of up to `frames` frames."""
        for module in self.modules():
            if isinstance(module, WindowTransformer):
                module.reserve(frames)

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """Encode samples [n, N] -> codes [n, codebooks, ceil(N / frame_length)], without TF32 on a GPU.

        Raises InvalidRequest without an encoder.
        """
        if not self.can_encode:
            raise InvalidRequest("the codec was loaded without its encoder and cannot encode audio")
        length = self.config.frame_length
        frames = -(-samples.shape[-1] // length)
        if frames == 0:
            return torch.zeros(len(samples), self.config.num_codebooks, 0, dtype=torch.long, device=samples.device)
        padded = nn.functional.pad(samples, (0, frames * length - samples.shape[-1]))
        chunks = padded[:, None].split(self.CHUNK_FRAMES * length, dim=-1)
        with float32_convolutions:
            return torch.cat(self._in_chunks(self.encode_from, chunks, frames), dim=-1)

    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes [n, codebooks, T] -> samples [n, frame_length * T]."""
        if codes.shape[-1] == 0:
            return torch.zeros(len(codes), 0, device=codes.device)
        chunks = codes.split(self.CHUNK_FRAMES, dim=-1)
        return torch.cat(self._in_chunks(self.decode_from, chunks, codes.shape[-1]), dim=-1)

    def encode_from(self, samples: Tensor, past: Past) -> Tensor:
        """Encode whole frames of samples [n, 1, frame_length * T] that follow `past` -> codes [n, codebooks, T]."""
        return self.quantizer.encode(self.encoder(samples, past), past)

    def decode_from(self, codes: Tensor, past: Past) -> Tensor:
        """Decode codes [n, codebooks, T] that follow `past` -> samples [n, frame_length * T]."""
        latent = self.quantizer.upscale(self.quantizer.lookup(codes), past)
        return self.decoder(latent, past).squeeze(1)

    def _in_chunks(
        self, process: Callable[[Tensor, Past], Tensor], chunks: tuple[Tensor, ...], frames: int
    ) -> list[Tensor]:
        self.reserve(frames)
        if len(chunks) == 1:
            return [process(chunks[0], NoPast())]
        rows = torch.arange(len(chunks[0]), device=self.device)
        past, outputs = SlotPast(len(rows), self.device), []
        for start, chunk in zip(range(0, frames, self.CHUNK_FRAMES), chunks, strict=True):
            past.open(rows, min(self.CHUNK_FRAMES, frames - start), None)
            outputs.append(process(chunk, past))
            past.close()
        return outputs
