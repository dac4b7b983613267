import io
import struct
import wave

import numpy as np
import pytest

from shoal.audio.wav import GUID_TAIL, open_wav, wav_header
from shoal.errors import AudioError


def wav_file(body: bytes, tag: int, channels: int, bits: int, *, rate: int = 16_000, size: int | None = None) -> bytes:
    frame = channels * bits // 8
    fmt = struct.pack("<HHIIHH", tag, channels, rate, rate * frame, frame, bits)
    if tag == 0xFFFE:
        fmt += struct.pack("<HHIH", 22, bits, 0, 3 if bits == 64 else 1) + GUID_TAIL
    chunks = struct.pack("<4sI", b"fmt ", len(fmt)) + fmt + struct.pack("<4sI3sx", b"LIST", 3, b"abc")
    chunks += struct.pack("<4sI", b"data", len(body) if size is None else size) + body
    return struct.pack("<4sI4s", b"RIFF", 4 + len(chunks), b"WAVE") + chunks


def samples_of(data: bytes) -> np.ndarray:
    reader = open_wav(data)
    assert reader is not None
    return np.concatenate([block for _, block in reader.blocks()])


RAMP = np.linspace(-1, 1, 2000, endpoint=False).reshape(-1, 2)


@pytest.mark.parametrize(
    ("tag", "bits", "body", "tolerance"),
    [
        (1, 8, (RAMP * 128 + 128).astype("u1").tobytes(), 1 / 128),
        (1, 16, (RAMP * 2**15).astype("<i2").tobytes(), 2**-15),
        (1, 24, (RAMP * 2**31).astype("<i4").tobytes(), 2**-23),
        (1, 32, (RAMP * 2**31).astype("<i4").tobytes(), 1e-7),
        (3, 32, RAMP.astype("<f4").tobytes(), 1e-7),
        (3, 64, RAMP.astype("<f8").tobytes(), 1e-7),
        (0xFFFE, 16, (RAMP * 2**15).astype("<i2").tobytes(), 2**-15),
        (0xFFFE, 64, RAMP.astype("<f8").tobytes(), 1e-7),
    ],
)
def test_every_plain_encoding_is_read(tag, bits, body, tolerance):
    if bits == 24:
        body = np.frombuffer(body, np.uint8).reshape(-1, 4)[:, 1:].tobytes()
    assert np.abs(samples_of(wav_file(body, tag, 2, bits)) - RAMP).max() <= tolerance


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000])
def test_a_stream_of_unknown_length_is_read_to_its_end(size):
    reader = open_wav(wav_file(bytes(3200), 1, 1, 16, size=size))
    assert reader.declared_seconds is None
    assert sum(len(block) for _, block in reader.blocks()) == 1600


def test_the_header_states_a_length_and_a_cut_frame_is_dropped():
    reader = open_wav(wav_file(bytes(1001), 1, 1, 16, size=32_000))
    assert reader.declared_seconds == 1.0
    assert sum(len(block) for _, block in reader.blocks()) == 500


def test_other_codecs_in_a_wav_are_left_to_another_decoder():
    assert open_wav(wav_file(bytes(100), 7, 1, 8)) is None


@pytest.mark.parametrize("cut", [12, 20, 36, 50])
def test_a_wav_without_samples_is_refused(cut):
    with pytest.raises(AudioError, match="wav file"):
        open_wav(wav_file(b"", 1, 1, 16)[:cut])


def test_samples_behind_a_thousand_chunks_are_not_looked_for():
    whole = wav_file(bytes(100), 1, 1, 16)
    notes = struct.pack("<4sI", b"LIST", 0)
    assert open_wav(whole[:12] + 900 * notes + whole[12:]) is not None
    with pytest.raises(AudioError, match="1,000 chunks without samples"):
        open_wav(whole[:12] + 1000 * notes + whole[12:])


def test_a_header_that_contradicts_itself_is_refused():
    whole = bytearray(wav_file(bytes(100), 1, 2, 16))
    struct.pack_into("<H", whole, 22, 0)
    with pytest.raises(AudioError, match="damaged header"):
        open_wav(bytes(whole))


def test_our_header_is_understood_by_the_standard_library():
    with wave.open(io.BytesIO(wav_header(44_100, 200) + bytes(200))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()) == (1, 2, 44_100, 100)


def test_lengths_beyond_four_gibibytes_are_unknown():
    assert wav_header(44_100, 5 << 30) == wav_header(44_100)
    assert wav_header(44_100)[4:8] == wav_header(44_100)[40:44] == b"\xff\xff\xff\xff"
