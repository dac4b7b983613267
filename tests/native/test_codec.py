"""The native streaming decoder: the samples of the codec, in any chunks, alone and beside other streams."""

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import random_checkpoint
from shoal.codec.dac import Codec
from shoal.codec.streaming import StreamingDecoder
from shoal.engine.output.audio_decoder import AudioDecoder, PlannedChunk
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.utterance import Turn, Utterance
from shoal.native.codec import NativeDecoder
from shoal.native.library import Context, NativeUnavailable
from shoal.native.modules import codec_arrays
from shoal.quantize.apply import convert_int8_for_cpu, quantize_codec
from shoal.speech import SamplingParams

FRAMES = 24


@pytest.fixture(scope="module")
def context(instruction_sets: list[str]) -> Context:
    return Context(instruction_sets[0], 2)


@pytest.fixture(scope="module")
def codes(tiny: Checkpoint) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    sizes = tiny.codec.config.codebook_sizes
    return torch.stack([torch.randint(0, size, (6, FRAMES), generator=generator) for size in sizes], dim=1)


def native_decoder(codec: Codec, slots: int, context: Context) -> NativeDecoder:
    return NativeDecoder(codec_arrays(codec), slots, context)


def decode(decoder: NativeDecoder, codes: Tensor, slots: list[int], lengths: list[int] | None = None) -> Tensor:
    return torch.from_numpy(decoder.decode(codes.numpy(), slots, lengths))


def in_chunks(decoder: NativeDecoder | StreamingDecoder, codes: Tensor, slots: list[int], sizes: list[int]) -> Tensor:
    chunks = codes.split(sizes, dim=-1)
    if isinstance(decoder, StreamingDecoder):
        return torch.cat([decoder.decode(chunk, slots) for chunk in chunks], dim=1)
    return torch.cat([decode(decoder, chunk, slots) for chunk in chunks], dim=1)


def test_any_chunks_give_the_bits_of_the_whole_on_every_instruction_set(
    tiny: Checkpoint, codes: Tensor, instruction_sets: list[str]
) -> None:
    """AVX2 and AVX-512 share their bits; the baseline has no fused multiply-add and rounds once more."""
    expected, fused = tiny.codec.decode(codes[:2]), []
    for isa in instruction_sets:
        decoded = [
            in_chunks(native_decoder(tiny.codec, 3, Context(isa, 1)), codes[:2], [2, 0], sizes)
            for sizes in ([FRAMES], [1] * FRAMES, [1, 2, 5, 16], [23, 1])
        ]
        torch.testing.assert_close(decoded[0], expected, rtol=0, atol=2e-6)
        assert all(torch.equal(each, decoded[0]) for each in decoded), isa
        fused += decoded[:1] if isa != "baseline" else []
    assert all(torch.equal(each, fused[0]) for each in fused)


def test_a_stream_has_the_same_bits_beside_others_and_with_more_threads(
    tiny: Checkpoint, codes: Tensor, instruction_sets: list[str]
) -> None:
    alone = native_decoder(tiny.codec, 1, Context(instruction_sets[0], 1))
    expected = in_chunks(alone, codes[3:4], [0], [5, 3, 16])
    for threads in (1, 2, 3):
        together = native_decoder(tiny.codec, 6, Context(instruction_sets[0], threads))
        assert torch.equal(in_chunks(together, codes, [5, 4, 3, 2, 1, 0], [5, 3, 16])[3:4], expected)


def test_streams_of_different_lengths_continue_where_they_ended(
    tiny: Checkpoint, codes: Tensor, context: Context
) -> None:
    decoder, step = native_decoder(tiny.codec, 3, context), tiny.codec.config.frame_length
    first = decode(decoder, codes[:3, :, :10], [0, 1, 2], [10, 4, 7])
    assert decoder._seen == [10, 4, 7]
    second = decode(decoder, codes[1:2, :, 4:], [1])
    found = torch.cat((first[1, : 4 * step], second[0]))
    assert torch.equal(found, decode(native_decoder(tiny.codec, 1, context), codes[1:2], [0])[0])


def test_a_reset_slot_starts_a_new_stream(tiny: Checkpoint, codes: Tensor, context: Context) -> None:
    decoder = native_decoder(tiny.codec, 2, context)
    first = decode(decoder, codes[:1], [1])
    decoder.reset([1])
    assert torch.equal(decode(decoder, codes[:1], [1]), first)
    assert not torch.equal(decode(decoder, codes[:1], [1]), first)


def test_codes_beyond_a_codebook_are_clamped(tiny: Checkpoint, codes: Tensor, context: Context) -> None:
    wild = codes[:1].clone()
    wild[0, :, 3] = 10**12
    limit = torch.tensor(tiny.codec.config.codebook_sizes)[:, None] - 1
    decoder = native_decoder(tiny.codec, 2, context)
    assert torch.equal(decode(decoder, wild, [0]), decode(decoder, torch.minimum(wild, limit), [1]))


def test_a_long_stream_grows_its_rotary_table(tiny: Checkpoint, codes: Tensor, context: Context) -> None:
    decoder, eager = native_decoder(tiny.codec, 1, context), StreamingDecoder(tiny.codec, 1)
    position = decoder._structure.max_steps - 10
    decoder._positions[0] = eager._seen[0] = position
    eager.past.frames_seen[0] = position
    found, expected = (in_chunks(each, codes[:1], [0], [8, 16]) for each in (decoder, eager))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def test_quantized_convolutions_are_refused(context: Context) -> None:
    codec = random_checkpoint("tiny", dtype=torch.float32).codec
    quantize_codec(codec, "int8")
    with pytest.raises(NativeUnavailable, match="not supported"):
        native_decoder(codec, 1, context)


def test_int8_linears_give_the_samples_of_the_codec_in_any_chunks(context: Context, codes: Tensor) -> None:
    """As on a CPU with `codec=int8`, which leaves convolutions as they are."""
    codec = random_checkpoint("tiny", dtype=torch.float32).codec
    plain = codec.decode(codes[:1])
    quantize_codec(codec, "int8", convolutions=False)
    convert_int8_for_cpu(codec, min_weights=0)
    expected = codec.decode(codes[:1])
    whole = in_chunks(native_decoder(codec, 1, context), codes[:1], [0], [FRAMES])
    assert torch.equal(in_chunks(native_decoder(codec, 1, context), codes[:1], [0], [1, 7, 16]), whole)
    difference = (expected - plain).abs().max()
    assert difference > 0
    # Activations of the reference are quantized where the CPU has VNNI.
    assert (whole - expected).abs().max() < 2 * difference


def speaker(slot: int, codes: Tensor) -> Utterance:
    prompt = np.zeros((1, 1 + codes.shape[0]), np.int32)
    made = Utterance(slot, [Turn("hm", prompt, prompt)], SamplingParams())
    made.sequence = Sequence.start(slot, prompt, SamplingParams(), 100)
    made.sequence.slot = slot
    made.codes.extend(codes.T.numpy().astype(np.int32))
    return made


def test_the_engine_continues_with_the_eager_codec_when_the_native_one_fails(
    tiny: Checkpoint, codes: Tensor, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = AudioDecoder(
        tiny.codec, 2, first_frames=1, max_frames=8, backends=("native", "eager"), native=lambda: context
    )
    assert box.backend == "native"
    each, heard = speaker(0, codes[0]), []
    for frames in (8, 8, 8):
        if len(heard) == 1:
            monkeypatch.setattr(context.library, "shoal_decode", lambda *_: 2)
        box.submit([PlannedChunk(each, frames, ended=False)])
        ((_, samples),) = box.collect()
        assert isinstance(samples, np.ndarray)
        heard.append(samples)
    assert box.backend == "eager"
    np.testing.assert_allclose(np.concatenate(heard), tiny.codec.decode(codes[:1])[0].numpy(), rtol=0, atol=1e-5)
