"""Comparisons of the codec: whole utterances, prefixes, streams, and encoding."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shoal.codec.layers import apply_layers
from shoal.codec.streaming import NoPast, StreamingDecoder
from shoal.tools.verify.comparison import AUDIO, INTERMEDIATE, STREAMED, ParityComparison, close, equal
from shoal.tools.verify.golden import Golden, TensorFile

# Frames per chunk of a stream; the remaining frames are the last chunk.
IRREGULAR = (1, 1, 3, 5, 2, 7, 11, 1, 4)
SLOTS = {1: (3, 1, 6, 2), 3: (1, 5, 4, 9)}  # chunk sizes of two streams in one batch, by slot; repeated in turn
FIRST_SHORT_SAMPLE = 5000


def decode(golden: Golden) -> Iterator[ParityComparison]:
    codec, stored = golden.codec, golden.tensors("codec/decode.safetensors")
    codes, quantizer = _codes(golden, stored, "codes"), codec.quantizer
    codec.reserve(codes.shape[-1])
    latent = quantizer.lookup(codes)
    mixed = quantizer.post_module(latent, NoPast())
    steps = {"latent": latent, "post_module": mixed, "upsample": apply_layers(quantizer.upsample, mixed, NoPast())}
    for name, tensor in steps.items():
        yield close("codec/decode", name, tensor[0], stored[name], INTERMEDIATE)
    yield close("codec/decode", "audio", codec.decode(codes)[0], stored["audio"], AUDIO)


def prefixes(golden: Golden) -> Iterator[ParityComparison]:
    """Compare decodes of the first frames alone with the start of the whole."""
    codec, stored = golden.codec, golden.tensors("codec/decode.safetensors")
    codes = _codes(golden, stored, "codes")
    for name in stored.parts("audio"):
        if name.startswith("prefix"):
            audio = codec.decode(codes[..., : int(name.removeprefix("prefix"))])
            yield close("codec/prefixes", name, audio[0], stored[f"{name}.audio"], AUDIO)


def out_of_range(golden: Golden) -> Iterator[ParityComparison]:
    """Compare codes beyond the codebook, which are clamped to its last entry."""
    stored = golden.tensors("codec/decode.safetensors")
    audio = golden.codec.decode(_codes(golden, stored, "out_of_range.codes"))
    yield close("codec/clamp", "out_of_range.audio", audio[0], stored["out_of_range.audio"], AUDIO)


def streaming(golden: Golden) -> Iterator[ParityComparison]:
    """Compare one stream in irregular chunks, and two streams with different chunks in one batch."""
    group, codec, stored = "codec/streaming", golden.codec, golden.tensors("codec/decode.safetensors")
    codes = _codes(golden, stored, "codes")
    pieces = _stream(golden, codes)
    yield close(group, "pieces", pieces, stored["audio"], AUDIO)
    yield close(group, "pieces against whole", pieces, codec.decode(codes)[0].cpu(), STREAMED)
    for slot, audio in _side_by_side(golden, codes).items():
        yield close(group, f"slot {slot} of two", audio, stored["audio"], AUDIO)


def encode(golden: Golden) -> Iterator[ParityComparison]:
    codec, stored = golden.codec, golden.tensors("codec/encode.safetensors")
    samples, length = _samples(golden, stored["pcm"]), codec.config.frame_length
    whole = torch.nn.functional.pad(samples, (0, -samples.shape[-1] % length))
    codec.reserve(whole.shape[-1] // length)
    encoded = codec.encoder(whole[:, None], NoPast())
    slower = apply_layers(codec.quantizer.downsample, encoded, NoPast())
    steps = {"encoder": encoded, "downsample": slower, "pre_module": codec.quantizer.pre_module(slower, NoPast())}
    for name, tensor in steps.items():
        yield close("codec/encode", name, tensor[0], stored[name], INTERMEDIATE)
    yield equal("codec/encode", "codes", codec.encode(samples)[0], stored["codes"])


def short_recordings(golden: Golden) -> Iterator[ParityComparison]:
    """Compare recordings of about one frame, where the padding matters."""
    codec, stored = golden.codec, golden.tensors("codec/encode.safetensors")
    for name in stored.parts("codes"):
        pcm = stored["pcm"][FIRST_SHORT_SAMPLE : FIRST_SHORT_SAMPLE + int(name.removeprefix("len"))]
        yield equal("codec/short", name, codec.encode(_samples(golden, pcm))[0], stored[f"{name}.codes"])


def _codes(golden: Golden, stored: TensorFile, name: str) -> Tensor:
    return stored[name].long()[None].to(golden.device)


def _samples(golden: Golden, pcm: Tensor) -> Tensor:
    return (pcm.float() / 32768)[None].to(golden.device, golden.dtype)


def _stream(golden: Golden, codes: Tensor) -> Tensor:
    decoder = StreamingDecoder(golden.codec, slots=1)
    pieces = codes.tensor_split(_cuts(IRREGULAR, codes.shape[-1]), dim=-1)
    return torch.cat([decoder.decode(piece, [0])[0] for piece in pieces])


def _side_by_side(golden: Golden, codes: Tensor) -> dict[int, Tensor]:
    """Decode the same codes in two slots. Rows shorter than the longest chunk of a pass are padded with codes that
    must not affect the result.
    """
    codec, total = golden.codec, codes.shape[-1]
    decoder, decoded = (
        StreamingDecoder(codec, slots=4),
        {slot: codes.new_zeros(0, dtype=golden.dtype) for slot in SLOTS},
    )
    done, turn = dict.fromkeys(SLOTS, 0), 0
    while any(frames < total for frames in done.values()):
        new = {slot: min(sizes[turn % len(sizes)], total - done[slot]) for slot, sizes in SLOTS.items()}
        batch = torch.cat([_window(codes, done[slot], new[slot], max(new.values())) for slot in SLOTS])
        samples = decoder.decode(batch, list(SLOTS), list(new.values()))
        for row, slot in enumerate(SLOTS):
            decoded[slot] = torch.cat((decoded[slot], samples[row, : new[slot] * codec.config.frame_length]))
            done[slot] += new[slot]
        turn += 1
    return decoded


def _window(codes: Tensor, start: int, real: int, width: int) -> Tensor:
    filler = codes[..., :1].expand(-1, -1, width - real)
    return torch.cat((codes[..., start : start + real], filler), dim=-1)


def _cuts(sizes: Sequence[int], total: int) -> list[int]:
    return [cut for cut in accumulate(sizes) if cut < total]
