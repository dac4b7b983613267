import io
import wave
import weakref
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.audio.decode import AudioLimits, read_audio
from shoal.audio.encode import StreamBuffer, encode_file, encoder
from shoal.audio.formats import FORMATS
from shoal.audio.pcm import to_float, to_int16
from shoal.errors import GenerationFailed, InvalidRequest, MissingExtra

RATE = 44_100
LOSSY = ["mp3", "opus", "aac", "webm"]
TELEPHONE = {"ulaw": "mulaw", "alaw": "alaw"}  # ffmpeg's names of the headerless formats
CODEC_FRAME = {"mp3": 1152 / 44_100, "opus": 0.02, "aac": 1024 / 44_100, "webm": 0.02}
NO_LIMITS = AudioLimits(min_seconds=0)


def streamed(samples: np.ndarray, cuts: list[int], format: str, rate: int = RATE, **options: int) -> bytes:
    stream = encoder(format, rate, **options)
    return b"".join([*(stream.feed(piece) for piece in np.split(samples, np.cumsum(cuts))), stream.finish()])


def decoded(data: bytes, format: str, rate: int = RATE) -> np.ndarray:
    if format == "pcm":
        return to_float(np.frombuffer(data, "<i2"))
    if format in TELEPHONE:
        with av.open(io.BytesIO(data), format=TELEPHONE[format], options={"sample_rate": "8000"}) as file:
            samples = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])
        return to_float(samples)
    return read_audio(data, rate, NO_LIMITS).samples


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@settings(deadline=None, max_examples=40)
@given(cuts=st.lists(st.integers(0, 6000), max_size=8))
@pytest.mark.parametrize("format", ["pcm", "wav", "flac"])
def test_feeding_in_pieces_gives_the_samples_of_the_whole(speech, format, cuts):
    samples = speech(0.4)
    expected = to_int16(samples) / np.float32(32768)
    assert np.array_equal(decoded(streamed(samples, cuts, format), format), expected)
    assert np.array_equal(decoded(encode_file(samples, format, RATE), format), expected)


@settings(deadline=None, max_examples=10)
@given(cuts=st.lists(st.integers(0, 6000), max_size=8))
@pytest.mark.parametrize("format", LOSSY)
def test_lossy_streams_do_not_depend_on_the_pieces(speech, format, cuts):
    samples = speech(0.4)
    got, whole = streamed(samples, cuts, format), streamed(samples, [], format)
    # Containers carry a random serial number or id; the sound is compared.
    assert np.allclose(decoded(got, format), decoded(whole, format), atol=1e-4)


@pytest.mark.parametrize("rate", [16_000, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("format", LOSSY)
def test_lossy_formats_keep_the_sound_and_the_length(speech, format, rate, likeness):
    samples = speech(2.0, rate)
    for data in (encode_file(samples, format, rate), streamed(samples, [777, 2048, 1, 5000], format, rate)):
        back = decoded(data, format, rate)
        # Decoders of bare streams cannot know how much the encoder padded: a frame before and one behind.
        assert len(back) / rate == pytest.approx(2.0, abs=3 * CODEC_FRAME[format] * max(1, RATE / rate))
        assert likeness(back, samples) > 0.99


@pytest.mark.parametrize("format", ["mp3", "opus", "webm"])
def test_whole_files_have_their_exact_length(speech, format):
    samples = speech(1.5, 48_000)
    assert len(decoded(encode_file(samples, format, 48_000), format, 48_000)) == len(samples)


@pytest.mark.parametrize("format", list(TELEPHONE))
def test_telephone_formats_keep_the_sound_in_a_byte_per_sample(speech, format, likeness):
    samples = speech(1.0, 8_000)
    data = streamed(samples, [100, 7, 3000], format, 8_000)
    assert data == encode_file(samples, format, 8_000)
    assert len(data) == len(samples)
    back = decoded(data, format)
    assert likeness(back, samples) > 0.99
    # 14 bits of range in 8: the error is about a thirtieth of each sample.
    assert np.abs(back - samples).max() < 0.04


def test_telephone_formats_resample_to_8_khz(speech):
    assert len(streamed(speech(1.0), [], "ulaw")) == 8_000
    with pytest.raises(InvalidRequest, match="ulaw does not support 16000 Hz; use one of 8000 Hz"):
        encoder("ulaw", RATE, output_rate=16_000)


@pytest.mark.parametrize("format", list(FORMATS))
def test_audio_is_returned_within_the_first_tenth_of_a_second(speech, format):
    samples = speech(0.3)
    stream = encoder(format, RATE)
    header = stream.feed(samples[:0])
    first = b"".join(stream.feed(samples[start : start + 441]) for start in range(0, 4410, 441))
    assert len(first) > 80
    rest = stream.feed(samples[4410:]) + stream.finish()
    assert len(decoded(header + first + rest, format)) >= (0.3 * 8_000 if format in TELEPHONE else len(samples))


def test_a_streamed_mp3_begins_with_sound_and_a_whole_one_states_its_length(speech):
    samples = speech()
    assert streamed(samples, [], "mp3")[:2] == b"\xff\xfb"
    assert b"Xing" not in streamed(samples, [], "mp3")
    whole = encode_file(samples, "mp3", RATE)
    assert b"Info" in whole[:200] or b"Xing" in whole[:200]


def test_a_streamed_wav_says_unknown_and_a_whole_one_states_its_length(speech):
    samples = speech()
    header = streamed(samples, [], "wav")[:44]
    assert header[4:8] == header[40:44] == b"\xff\xff\xff\xff"
    with wave.open(io.BytesIO(encode_file(samples, "wav", RATE))) as file:
        assert file.getnframes() == RATE


def test_a_whole_flac_states_its_length(speech):
    with av.open(io.BytesIO(encode_file(speech(), "flac", RATE))) as container:
        stream = container.streams.audio[0]
        assert stream.duration * stream.time_base == 1


@pytest.mark.parametrize("format", list(FORMATS))
def test_no_samples_make_a_file_without_samples(format):
    stream = encoder(format, RATE)
    assert isinstance(stream.finish(), bytes)
    assert isinstance(encode_file(np.zeros(0, np.float32), format, RATE), bytes)


def test_an_output_rate_is_honoured(speech, likeness):
    stream = encoder("pcm", RATE, output_rate=24_000)
    data = stream.feed(speech()) + stream.finish()
    assert stream.output_rate == 24_000
    assert len(data) == pytest.approx(2 * 24_000, abs=2)
    assert likeness(decoded(data, "pcm"), speech(rate=24_000)) > 0.99


def test_an_unsupported_output_rate_is_refused():
    with pytest.raises(InvalidRequest, match="opus does not support 44100 Hz"):
        encoder("opus", RATE, output_rate=44_100)


@pytest.mark.parametrize("format", LOSSY)
def test_a_bitrate_is_honoured(speech, format):
    samples = speech(3.0)
    small, large = (len(encode_file(samples, format, RATE, bitrate=rate)) for rate in (24_000, 128_000))
    assert small < 0.5 * large


def test_the_encoder_knows_its_media_type_and_rate():
    stream = encoder("opus", RATE)
    assert (stream.media_type, stream.output_rate) == ("audio/ogg", 48_000)


@pytest.mark.parametrize("format", list(FORMATS))
def test_a_finished_encoder_takes_no_more(speech, format):
    stream = encoder(format, RATE)
    stream.feed(speech(0.1))
    stream.finish()
    with pytest.raises(RuntimeError, match="finished"):
        stream.feed(speech(0.1))
    with pytest.raises(RuntimeError, match="finished"):
        stream.finish()


def test_loud_samples_are_clipped_the_same_way_in_every_format():
    square = np.where(np.arange(RATE) // 100 % 2, np.float32(3.0), np.float32(-3.0))
    for format in FORMATS:
        assert np.abs(decoded(encode_file(square, format, RATE), format)).max() <= 1.5


def test_samples_that_are_not_finite_are_refused():
    stream = encoder("wav", RATE)
    with pytest.raises(GenerationFailed):
        stream.feed(np.array([np.nan], np.float32))


@pytest.mark.parametrize("format", list(FORMATS))
def test_an_encoder_dropped_midway_leaves_nothing_behind(speech, format):
    descriptors = open_files()
    buffers = []
    for _ in range(20):
        stream = encoder(format, RATE)
        stream.feed(speech(0.1))
        buffers.append(weakref.ref(stream._buffer))
        del stream
    assert all(buffer() is None for buffer in buffers)
    assert open_files() == descriptors


def test_wav_and_pcm_need_no_extra_and_the_others_name_the_command(without_extras, speech):
    for format in ("wav", "pcm"):
        assert len(encode_file(speech(), format, RATE)) >= 2 * RATE
    for format in ("flac", "mp3", "aac"):
        with pytest.raises(MissingExtra, match=rf"writing {format} needs: pip install 'shoal-tts\[formats\]'"):
            encoder(format, RATE)


def test_the_buffer_returns_each_byte_once():
    buffer = StreamBuffer()
    buffer.write(b"ab")
    assert buffer.take() == b"ab"
    assert buffer.take() == b""
    buffer.write(b"c")
    assert buffer.take() == b"c"


def log_spectrum(samples: np.ndarray) -> np.ndarray:
    """Return decibels [frames, bands] of bands of 250 Hz up to 8 kHz, at 24 kHz."""
    frames = np.lib.stride_tricks.sliding_window_view(samples, 1024)[::256] * np.hanning(1024)
    power = np.abs(np.fft.rfft(frames, axis=1))[:, :341] ** 2
    return 10 * np.log10(np.add.reduceat(power, np.arange(0, 341, 11), axis=1) + 1e-4)


@pytest.mark.parametrize(("format", "decibels"), [("opus", 1.0), ("webm", 1.0), ("mp3", 0.5), ("aac", 0.25)])
def test_compressed_speech_is_close_to_the_original(format: str, decibels: float) -> None:
    """The speech mode that libopus chooses by default is further away, at 2.0 dB; aac with its default at 0.28."""
    speech = read_audio(Path(__file__).parents[2] / "docs" / "samples" / "otis.mp3", 24_000).samples
    decoded = read_audio(encode_file(speech, format, 24_000), 24_000).samples
    delay = np.argmax(np.correlate(decoded[: 24_000 + 2400], speech[:24_000], "valid"))
    length = min(len(speech), len(decoded) - delay)
    difference = log_spectrum(decoded[delay : delay + length]) - log_spectrum(speech[:length])
    assert np.abs(difference).mean() < decibels
