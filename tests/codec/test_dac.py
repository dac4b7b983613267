import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.codec.config import CodecConfig
from shoal.codec.dac import Codec, float32_convolutions
from shoal.codec.streaming import NoPast, Past
from shoal.errors import InvalidRequest

FRAME = 2048


def random_codes(rows: int, frames: int) -> Tensor:
    return torch.randint(0, 128, (rows, 10, frames), generator=torch.Generator().manual_seed(frames))


def random_samples(rows: int, count: int) -> Tensor:
    return 0.3 * torch.randn(rows, count, generator=torch.Generator().manual_seed(count))


# Decode


def test_a_frame_has_frame_length_samples_within_full_scale(codec: Codec) -> None:
    audio = codec.decode(random_codes(2, 7))
    assert audio.shape == (2, 7 * FRAME)
    assert float(audio.abs().max()) < 1.0


def test_zero_frames_decode_to_zero_samples(codec: Codec) -> None:
    assert codec.decode(random_codes(1, 0)).shape == (1, 0)
    assert codec.encode(torch.zeros(1, 0)).shape == (1, 10, 0)


def test_long_audio_in_chunks_equals_one_pass(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, samples = random_codes(2, 23), random_samples(2, 19 * FRAME + 777)
    whole, encoded = codec.decode(codes), codec.encode(samples)
    for chunk in (1, 5, 22, 23):
        monkeypatch.setattr(Codec, "CHUNK_FRAMES", chunk)
        assert float((codec.decode(codes) - whole).abs().max()) <= 1e-5
        assert torch.equal(codec.encode(samples), encoded)


def test_rows_of_a_batch_are_independent(codec: Codec) -> None:
    codes = random_codes(3, 9)
    together = codec.decode(codes)
    for row in range(3):
        assert float((codec.decode(codes[row : row + 1])[0] - together[row]).abs().max()) <= 1e-5


def test_codes_beyond_a_codebook_are_clamped_without_changing_the_input(codec: Codec) -> None:
    codes = random_codes(1, 3)
    beyond, last = codes.clone(), codes.clone()
    beyond[:, 0, 1], last[:, 0, 1] = 4000, 511
    beyond[:, 4, 2], last[:, 4, 2] = 1023, 127
    before = beyond.clone()
    assert torch.equal(codec.decode(beyond), codec.decode(last))
    assert torch.equal(beyond, before)


# Encode


@settings(deadline=None, max_examples=15)
@given(count=st.integers(1, 4 * FRAME))
def test_a_recording_of_n_samples_has_n_over_frame_length_codes_rounded_up(count: int, codec: Codec) -> None:
    assert codec.encode(random_samples(1, count)).shape == (1, 10, -(-count // FRAME))


@pytest.mark.parametrize(("count", "frames"), [(1, 1), (2047, 1), (2048, 1), (2049, 2), (44100, 22)])
def test_lengths_around_a_frame(count: int, frames: int, codec: Codec) -> None:
    assert codec.encode(random_samples(1, count)).shape[-1] == frames


def test_codes_are_inside_their_codebooks(codec: Codec) -> None:
    codes = codec.encode(random_samples(2, 6 * FRAME))
    for book, size in enumerate(codec.config.codebook_sizes):
        assert 0 <= int(codes[:, book].min()) <= int(codes[:, book].max()) < size


def test_the_codes_of_a_prefix_are_the_prefix_of_the_codes(codec: Codec) -> None:
    samples = random_samples(1, 20 * FRAME)
    whole = codec.encode(samples)
    for frames in (1, 3, 11):
        assert torch.equal(codec.encode(samples[:, : frames * FRAME]), whole[..., :frames])


def test_padding_a_recording_keeps_its_codes(codec: Codec) -> None:
    """Encoding is causal, so a batch of recordings may be padded and trimmed afterwards."""
    short, long = random_samples(1, 3 * FRAME + 5), random_samples(1, 8 * FRAME)
    padded = torch.nn.functional.pad(short, (0, long.shape[1] - short.shape[1]))
    together = codec.encode(torch.cat((padded, long)))
    assert torch.equal(together[:1, :, :4], codec.encode(short))
    assert torch.equal(together[1:], codec.encode(long))


# Configuration


def test_encoding_turns_tf32_off_and_restores_it(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    encode_from = codec.encode_from

    def record(samples: Tensor, past: Past) -> Tensor:
        seen.append(torch.backends.cudnn.allow_tf32)
        return encode_from(samples, past)

    monkeypatch.setattr(codec, "encode_from", record)
    for setting in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", setting)
        codec.encode(random_samples(1, FRAME))
        assert torch.backends.cudnn.allow_tf32 is setting
    assert seen == [False, False]


def test_tf32_stays_off_until_the_last_of_several_encodings_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with float32_convolutions:
        with float32_convolutions:
            pass
        assert torch.backends.cudnn.allow_tf32 is False
    assert torch.backends.cudnn.allow_tf32 is True


@pytest.mark.gpu
def test_a_gpu_encodes_in_fp32(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu, samples = copy.deepcopy(codec).to("cuda"), random_samples(1, 40 * FRAME).to("cuda")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    codes = on_gpu.encode(samples)
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert torch.equal(codes, on_gpu.encode_from(samples[:, None], NoPast()))
    assert float((codes.cpu() == codec.encode(samples.cpu())).float().mean()) > 0.999


def test_a_codec_without_encoder_decodes_and_rejects_encoding(codec: Codec) -> None:
    decoder = Codec(codec.config, encoder=False)
    decoder.load_state_dict({name: codec.state_dict()[name] for name in decoder.state_dict()})
    assert not decoder.can_encode
    codes = random_codes(1, 4)
    assert torch.equal(decoder.decode(codes), codec.decode(codes))
    with pytest.raises(InvalidRequest, match="without its encoder"):
        decoder.encode(torch.zeros(1, FRAME))


def test_the_released_codec_has_the_documented_frame() -> None:
    config = CodecConfig()
    assert config.frame_length == 2048
    assert round(config.frame_rate, 3) == 21.533
    assert config.codebook_sizes == (4096, *[1024] * 9)
    assert config.num_codebooks == 10
    transformer = config.encoder_transformer(3)
    assert transformer is not None
    assert (transformer.n_head, transformer.dim, transformer.window_size) == (16, 1024, 512)
    assert config.encoder_transformer(0) is None
