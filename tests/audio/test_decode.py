import io
import os
import struct
import subprocess
import time
import tracemalloc
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.audio.decode import AudioLimits, check_reference, read_audio
from shoal.audio.encode import encode_file, encoder
from shoal.audio.wav import wav_header
from shoal.errors import AudioError, MissingExtra
from tests.audio.conftest import STRICT_PYTHON

RATE = 44_100
LOSSY = [
    ("mp3", "libmp3lame", "fltp"),
    ("ogg", "vorbis", "fltp"),
    ("adts", "aac", "fltp"),
    ("mp4", "aac", "fltp"),
    ("matroska", "aac", "fltp"),
    ("asf", "wmav2", "fltp"),
    ("mpegts", "mp2", "s16"),
]
LOSSLESS = [
    ("flac", "flac", "s16"),
    ("aiff", "pcm_s16be", "s16"),
    ("ipod", "alac", "s16p"),
    ("w64", "pcm_s16le", "s16"),
]


def float_wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """32-bit float, [n, channels]."""
    channels = samples.shape[1]
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, channels, rate, rate * channels * 4, channels * 4, 32)
    body = samples.astype("<f4").tobytes()
    return b"RIFF" + struct.pack("<I4s", 0, b"WAVE") + fmt + struct.pack("<4sI", b"data", len(body)) + body


@pytest.mark.parametrize(("container", "codec", "sample_format"), LOSSLESS)
def test_lossless_files_are_read_exactly(speech, recorded, container, codec, sample_format):
    pcm = np.rint(speech() * 30_000).astype(np.int16)
    recording = read_audio(recorded(pcm[np.newaxis], RATE, container, codec, sample_format), RATE)
    assert np.array_equal(recording.samples, pcm / np.float32(32768))
    assert (recording.original_rate, recording.original_channels, recording.seconds) == (RATE, 1, 1.0)


@pytest.mark.parametrize(("container", "codec", "sample_format"), LOSSY)
def test_lossy_files_sound_the_same(speech, recorded, container, codec, sample_format, likeness):
    samples = speech(2.0)
    pcm = np.rint(samples * 32767).astype(np.int16) if sample_format == "s16" else samples
    data = recorded(np.stack([pcm, pcm]), RATE, container, codec, sample_format, "stereo")
    recording = read_audio(data, RATE)
    assert recording.original_channels == 2
    assert recording.seconds == pytest.approx(2.0, abs=0.1)
    assert likeness(recording.samples, samples) > 0.99


def test_bytes_a_path_and_a_file_object_give_the_same(speech, tmp_path):
    data = encode_file(speech(), "wav", RATE)
    path = tmp_path / "voice.wav"
    path.write_bytes(data)
    with path.open("rb") as file:
        from_file = read_audio(file, RATE).samples
        assert not file.closed
    assert np.array_equal(read_audio(data, RATE).samples, from_file)
    assert np.array_equal(read_audio(path, RATE).samples, from_file)


def test_a_file_object_may_answer_in_small_pieces(speech):
    class Slow(io.BytesIO):
        def read(self, size=-1, /):
            return super().read(min(size, 1000))

    data = encode_file(speech(), "wav", RATE)
    assert len(read_audio(Slow(data), RATE).samples) == RATE


def test_a_recording_is_resampled(speech, likeness):
    recording = read_audio(encode_file(speech(rate=16_000), "wav", 16_000), RATE)
    assert (recording.sample_rate, recording.original_rate) == (RATE, 16_000)
    assert abs(len(recording.samples) - RATE) <= 1
    assert likeness(recording.samples, speech()) > 0.99


def test_channels_are_averaged(speech):
    left, right = speech(), -0.5 * speech()
    mono = read_audio(float_wav(np.stack([left, right], axis=1)), RATE).samples
    assert np.allclose(mono, 0.25 * speech(), atol=1e-6)


def test_mixing_two_full_channels_does_not_clip():
    full = np.sign(np.sin(np.arange(RATE) / 10.0))
    mono = read_audio(float_wav(np.stack([full, full], axis=1)), RATE).samples
    assert np.array_equal(mono, full.astype(np.float32))


def test_a_peak_over_full_scale_is_scaled_down_and_others_are_left_alone(speech):
    loud = 5 * speech() / np.abs(speech()).max()
    assert np.abs(read_audio(float_wav(loud[:, np.newaxis]), RATE).samples).max() == 1.0
    quiet = 0.01 * speech() + 0.1
    assert np.array_equal(read_audio(float_wav(quiet[:, np.newaxis]), RATE).samples, quiet)


def test_a_streamed_wav_of_unknown_length_is_read(speech):
    stream = encoder("wav", RATE)
    assert len(read_audio(stream.feed(speech()) + stream.finish(), RATE).samples) == RATE


def video(*, with_audio: bool) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        picture = output.add_stream("mpeg4", 10)
        picture.width = picture.height = 64
        picture.pix_fmt = "yuv420p"
        sound = output.add_stream("flac", 16_000) if with_audio else None
        for index in range(10):
            frame = av.VideoFrame(64, 64, "yuv420p")
            frame.pts = index
            output.mux(picture.encode(frame))
            if sound is not None:
                tone = av.AudioFrame.from_ndarray(np.full((1, 1600), 99, np.int16), "s16", "mono")
                tone.sample_rate, tone.pts = 16_000, index * 1600
                output.mux(sound.encode(tone))
        for stream in output.streams:
            output.mux(stream.encode(None))
    return file.getvalue()


def test_an_mp3_behind_a_large_cover_picture_is_read(speech, recorded):
    cover = b"\0image/png\0\x03\0" + np.random.default_rng(0).bytes(3 << 20)
    tag = b"APIC" + struct.pack(">I", len(cover)) + b"\0\0" + cover
    size = bytes(len(tag) >> shift & 0x7F for shift in (21, 14, 7, 0))
    data = b"ID3\x03\0\0" + size + tag + encode_file(speech(), "mp3", RATE)
    assert read_audio(data, RATE).seconds == pytest.approx(1.0, abs=0.1)


def test_the_sound_of_a_film_is_read():
    assert read_audio(video(with_audio=True), 16_000).seconds == pytest.approx(1.0)


def picture() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="image2pipe") as output:
        stream = output.add_stream("png", 1)
        stream.width = stream.height = 16
        stream.pix_fmt = "rgb24"
        output.mux(stream.encode(av.VideoFrame(16, 16, "rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


def bad(message: str, data: bytes, limits: AudioLimits | None = None) -> None:
    with pytest.raises(AudioError, match=message):
        read_audio(data, RATE, limits or AudioLimits())


class TestBadRecordings:
    def test_nothing_at_all(self):
        bad("empty", b"")

    def test_a_text_file_called_wav(self, tmp_path):
        path = tmp_path / "voice.wav"
        path.write_text("Здравствуйте, this is my voice.\n" * 50)
        with pytest.raises(AudioError, match="text file"):
            read_audio(path, RATE)

    def test_noise(self):
        bad("known audio format", np.random.default_rng(0).bytes(50_000))

    def test_a_header_without_samples(self):
        bad("no decodable audio", wav_header(RATE))

    def test_a_header_cut_in_the_middle(self):
        bad("ends before its samples", wav_header(RATE)[:30])

    def test_a_wav_cut_in_the_middle(self, speech):
        bad("truncated: 1.0 of 2.0 seconds", encode_file(speech(2.0), "wav", RATE)[: RATE * 2 + 44])

    def test_a_flac_cut_in_the_middle(self, speech):
        whole = encode_file(speech(4.0), "flac", RATE)
        bad("truncated", whole[: len(whole) // 2])

    def test_an_mp4_cut_in_the_middle(self, speech, recorded):
        whole = recorded(speech()[np.newaxis], RATE, "mp4", "aac", "fltp")
        bad("damaged", whole[: len(whole) // 2])

    def test_a_flac_with_its_middle_destroyed(self, speech):
        whole = bytearray(encode_file(speech(4.0), "flac", RATE))
        whole[10_000 : len(whole) - 100] = np.random.default_rng(0).bytes(len(whole) - 10_100)
        bad("damaged|truncated|no decodable audio", bytes(whole))

    def test_a_film_without_sound(self):
        bad("no audio stream", video(with_audio=False))

    def test_a_picture(self):
        bad("known audio format", picture())

    @pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
    def test_samples_that_are_not_numbers(self, speech, poison):
        samples = speech()
        samples[777] = poison
        bad("NaN or infinite", float_wav(samples[:, np.newaxis]))
        bad("NaN or infinite", float_wav(np.stack([samples, -samples], axis=1)))

    def test_samples_too_large_to_resample(self):
        signs = np.random.default_rng(0).choice([-1.0, 1.0], (16_000, 1))
        bad("out of range", float_wav(3.4e38 * signs, 16_000))

    def test_a_claim_of_ten_hours(self):
        bad("longer than 300 seconds", wav_header(16_000, 10 * 3600 * 16_000 * 2) + bytes(64_000))

    def test_eight_channels(self, recorded):
        bad("8 channels; at most 2", float_wav(np.zeros((RATE, 8))))
        bad("8 channels; at most 2", recorded(np.zeros((8, RATE), np.int16), RATE, "flac", "flac", "s16", "7.1"))

    def test_a_sample_rate_out_of_range(self):
        header = wav_header(RATE)
        bad("sample rate is 4000000000 Hz", struct.pack("<24sI16s100x", header, 4_000_000_000, header[28:]))
        bad("sample rate is 4000 Hz", encode_file(np.zeros(4000, np.float32), "wav", 4000))

    def test_too_short(self, speech):
        bad("lasts 0.050 seconds; at least 0.1", encode_file(speech(0.05), "wav", RATE))

    def test_too_many_bytes(self, speech, tmp_path):
        data = encode_file(speech(), "wav", RATE)
        limits = AudioLimits(max_bytes=len(data) - 1)
        path = tmp_path / "voice.wav"
        path.write_bytes(data)
        for source in (data, path, io.BytesIO(data)):
            with pytest.raises(AudioError, match="larger than"):
                read_audio(source, RATE, limits)

    def test_a_rate_that_changes_midway(self, speech, recorded):
        rates = (16_000, 32_000)
        bad(
            "changes within the recording",
            b"".join(recorded(speech(1.0, rate)[np.newaxis], rate, "adts", "aac", "fltp") for rate in rates),
        )

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(AudioError, match="No such file"):
            read_audio(tmp_path / "nowhere.wav", RATE)

    def test_a_folder(self, tmp_path):
        with pytest.raises(AudioError, match="Is a directory"):
            read_audio(tmp_path, RATE)

    def test_an_endless_device(self):
        with pytest.raises(AudioError, match="larger than 1000 bytes"):
            read_audio(Path("/dev/zero"), RATE, AudioLimits(max_bytes=1000))


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "sparse.wav"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    tracemalloc.start()
    with pytest.raises(AudioError, match="larger than"):
        read_audio(path, RATE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_small_file_that_decompresses_into_an_hour_stops_at_the_limit():
    stream = encoder("flac", 8_000)
    minute = np.zeros(60 * 8_000, np.float32)
    bomb = b"".join([*(stream.feed(minute) for _ in range(60)), stream.finish()])
    assert len(bomb) < 2 << 20
    tracemalloc.start()
    bad("longer than 30 seconds", bomb, AudioLimits(max_seconds=30))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20


def test_a_file_of_tiny_packets_stops_soon(recorded):
    """A caf header that calls every sample a packet: megabytes of it would take an hour."""
    tone = np.full((1, 10 * RATE), 1000, np.int16)
    crumbs = bytearray(recorded(tone, RATE, "caf", "pcm_s16le", "s16"))
    bytes_per_packet, frames_per_packet = 36, 40
    assert struct.unpack_from(">II", crumbs, bytes_per_packet)[1] == 1
    began = time.monotonic()
    struct.pack_into(">I", crumbs, bytes_per_packet, 2)
    struct.pack_into(">I", crumbs, frames_per_packet, 7)
    bad("tiny or damaged packets", bytes(crumbs))
    assert time.monotonic() - began < 240


class TestFilesThatNameOtherFiles:
    @pytest.fixture
    def secret(self, speech, tmp_path) -> Path:
        path = tmp_path / "secret.wav"
        path.write_bytes(encode_file(speech(), "wav", RATE))
        return path

    def test_a_playlist_as_text(self, secret):
        bad("text file", f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:1,\nfile://{secret}\n#EXT-X-ENDLIST\n".encode())

    @pytest.mark.parametrize(
        "script",
        [
            "#EXTM3U\n#\x01\n#EXT-X-TARGETDURATION:2\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1,\n{path}\n#EXT-X-ENDLIST\n",
            "ffconcat version 1.0\nfile '{path}'\n# \x01\n",
            "ffconcat version 1.0\nfile 'file:{path}'\n# \x01\n",
            "[playlist]\nFile1={path}\x01\n",
            "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\x01\nc=IN IP4 127.0.0.1\nm=audio 9 RTP/AVP 0\n",
        ],
    )
    def test_a_script_disguised_as_binary(self, secret, script):
        bad("known audio format", script.format(path=secret).encode())

    def test_ffmpeg_would_follow_such_a_script_by_itself(self, secret, tmp_path):
        """The attack is real: without our lists the same bytes open the other file."""
        script = tmp_path / "script.txt"
        script.write_bytes(f"ffconcat version 1.0\nfile '{secret}'\n".encode())
        with av.open(str(script), options={"safe": "0"}) as container:
            assert container.streams.audio


def test_damaged_files_print_nothing(speech, recorded, tmp_path):
    whole = bytearray(recorded(speech()[np.newaxis], RATE, "mp3", "libmp3lame", "fltp"))
    whole[3000:3600] = np.random.default_rng(0).bytes(600)
    path = tmp_path / "damaged.mp3"
    path.write_bytes(bytes(whole))
    script = f"""
from pathlib import Path
from shoal.audio.decode import read_audio
read_audio(Path({str(path)!r}), 44100)
try:
    read_audio(b"ID3" + bytes(range(256)) * 40, 44100)
except Exception as error:
    assert type(error).__name__ == "AudioError", error
"""
    result = subprocess.run([*STRICT_PYTHON, "-c", script], capture_output=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_a_silent_recording_is_no_reference(speech):
    silent = encode_file(np.zeros(RATE, np.float32), "wav", RATE)
    with pytest.raises(AudioError, match="silent"):
        check_reference(read_audio(silent, RATE))
    check_reference(read_audio(encode_file(0.003 * speech(), "wav", RATE), RATE))


def test_plain_wav_needs_no_extra(without_extras, speech):
    assert len(read_audio(encode_file(speech(), "wav", RATE), RATE).samples) == RATE


def test_other_files_without_the_extra_name_the_command(without_extras):
    with pytest.raises(MissingExtra, match=r"pip install 'shoal-tts\[formats\]'"):
        read_audio(b"fLaC" + bytes(100), RATE)
    with pytest.raises(AudioError, match="text file"):
        read_audio(b"hello", RATE)


@pytest.fixture(scope="session")
def good_files(speech, recorded) -> list[bytes]:
    samples = speech(0.5)
    pcm = np.rint(samples * 32767).astype(np.int16)
    files = [recorded(pcm[np.newaxis], RATE, *rest) for rest in LOSSLESS if rest[2] == "s16"]
    files += [recorded(np.stack([samples, samples]), RATE, *rest, "stereo") for rest in LOSSY if rest[2] == "fltp"]
    return [*files, encode_file(samples, "wav", RATE), encode_file(samples, "opus", RATE)]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(draw=st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(good_files, draw):
    file = bytearray(draw.draw(st.sampled_from(good_files)))
    for _ in range(draw.draw(st.integers(1, 6))):
        file[draw.draw(st.integers(0, min(len(file), 400) - 1))] = draw.draw(st.integers(0, 255))
    del file[draw.draw(st.integers(1, len(file))) :]
    try:
        recording = read_audio(bytes(file), RATE, AudioLimits(max_seconds=2))
    except AudioError:
        return
    assert np.isfinite(recording.samples).all()
    assert np.abs(recording.samples).max() <= 1.0
    assert 0 < recording.seconds < 2.1
