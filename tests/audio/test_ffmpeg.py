import io

import av
import pytest

from shoal.audio.ffmpeg import CODECS, CONTAINERS, MUXERS, ContainerInput
from shoal.audio.formats import FORMATS


def test_every_container_on_the_list_exists():
    known = {name for formats in av.formats_available for name in formats.split(",")}
    assert set(CONTAINERS.split(",")) <= known


def test_every_codec_on_the_list_exists_and_is_audio():
    assert {av.Codec(name, "r").type for name in CODECS.split(",")} == {"audio"}


@pytest.mark.parametrize("script", ["hls", "concat", "dash", "image2", "sdp", "rtsp", "tee", "lavfi", "ffmetadata"])
def test_nothing_that_opens_other_files_is_on_the_list(script):
    assert script not in CONTAINERS.split(",")


def test_every_format_but_wav_and_pcm_is_written_by_ffmpeg():
    assert set(MUXERS) == set(FORMATS) - {"wav", "pcm"}


def test_an_impossible_place_in_an_upload_is_an_answer():
    upload = ContainerInput(b"abc")
    assert upload.seek(1) == 1
    assert upload.seek(-5) == -1
    assert upload.seek(1 << 80) == -1
    assert upload.seek(0, io.SEEK_END) == 3
