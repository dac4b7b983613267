from pathlib import Path

import pytest

from shoal.audio.formats import FORMATS, audio_format, format_of
from shoal.errors import InvalidRequest


def test_every_format_has_its_media_type():
    assert {name: audio_format(name).media_type for name in FORMATS} == {
        "wav": "audio/wav",
        "pcm": "audio/pcm",
        "flac": "audio/flac",
        "mp3": "audio/mpeg",
        "opus": "audio/ogg",
        "aac": "audio/aac",
        "webm": "audio/webm",
        "ulaw": "audio/basic",
        "alaw": "audio/x-alaw-basic",
    }


@pytest.mark.parametrize(
    ("name", "expected"), [("a.wav", "wav"), ("A.MP3", "mp3"), ("b.c.ogg", "opus"), ("speech.raw", "pcm")]
)
def test_a_suffix_names_a_format(name, expected):
    assert format_of(Path(name)) == expected


@pytest.mark.parametrize("name", ["a.xyz", "a", "wav"])
def test_an_unknown_suffix_is_refused_with_the_known_ones(name):
    with pytest.raises(InvalidRequest, match=r"\.wav.*\.mp3"):
        format_of(Path(name))


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(InvalidRequest, match=r"'midi'; use one of wav, pcm, flac"):
        audio_format("midi")


@pytest.mark.parametrize(
    ("name", "rate", "carried"),
    [
        ("wav", 44_100, 44_100),
        ("opus", 44_100, 48_000),
        ("mp3", 44_100, 44_100),
        ("mp3", 20_000, 22_050),
        ("mp3", 96_000, 48_000),
    ],
)
def test_a_rate_the_format_does_not_support_becomes_the_next_higher_one(name, rate, carried):
    assert audio_format(name).rate_for(rate) == carried


def test_a_requested_rate_that_is_not_supported_is_refused():
    with pytest.raises(InvalidRequest, match="mp3 does not support 96000 Hz"):
        audio_format("mp3").check_rate(96_000)
    with pytest.raises(InvalidRequest, match="must be 8000 to 192000"):
        audio_format("wav").check_rate(1)


def test_a_bitrate_outside_the_format_is_refused():
    assert audio_format("mp3").check_bitrate(None) == 128_000
    assert audio_format("opus").check_bitrate(24_000) == 24_000
    with pytest.raises(InvalidRequest, match="8000 to 320000 bits per second, not 128"):
        audio_format("mp3").check_bitrate(128)
    with pytest.raises(InvalidRequest, match="has no bitrate"):
        audio_format("flac").check_bitrate(128_000)
