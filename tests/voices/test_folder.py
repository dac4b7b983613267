import io
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.voices.folder import SUFFIXES, audio_suffix, open_folder, read_codes, stems, write_codes
from shoal.voices.voice import DEFAULT_LIMITS, BrokenVoice


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "anna").mkdir()
    return tmp_path


@given(st.integers(1, 1200))
def test_stems_sort_in_the_order_of_the_recordings(count):
    assert sorted(stems(count)) == stems(count)
    assert len(set(stems(count))) == count


@pytest.mark.parametrize(
    ("beginning", "suffix"),
    [
        (b"RIFF\0\0\0\0WAVEfmt ", ".wav"),
        (b"fLaC\0", ".flac"),
        (b"OggS\0", ".ogg"),
        (b"ID3\4\0", ".mp3"),
        (b"\xff\xfb\x90\x64", ".mp3"),
        (b"\xff\xf1\x50\x80", ".aac"),
        (b"\0\0\0\x20ftypM4A ", ".m4a"),
        (b"FORM\0\0\0\0AIFFCOMM", ".aiff"),
        (b"\x1aE\xdf\xa3webm", ".wav"),
    ],
)
def test_bytes_get_the_suffix_of_their_magic_bytes(beginning, suffix):
    assert audio_suffix(beginning) == suffix


def test_a_file_keeps_its_suffix_if_upstream_knows_it():
    assert audio_suffix(b"fLaC", Path("a.OGG")) == ".ogg"
    assert audio_suffix(b"fLaC", Path("a.webm")) == ".flac"


def test_every_suffix_that_is_given_is_found_again():
    assert {audio_suffix(b"", Path(f"a{suffix}")) for suffix in SUFFIXES} == set(SUFFIXES)


def test_codes_are_read_only_and_hold_no_file_open(tmp_path):
    codes = np.arange(20, dtype=np.int32).reshape(2, 10)
    write_codes(tmp_path / "codes", codes)
    with (tmp_path / "codes").open("rb") as file:
        read = read_codes(file)
    assert str(tmp_path / "codes") not in Path("/proc/self/maps").read_text()
    assert str(tmp_path / "codes") not in map(os.readlink, os.scandir("/proc/self/fd"))
    assert np.array_equal(read, codes)
    assert not read.flags.writeable


@pytest.mark.parametrize(
    "array",
    [np.zeros((2, 3), np.float32), np.zeros(3, np.int32), np.zeros((0, 3), np.int32), np.zeros((3, 2), np.int32).T],
)
def test_arrays_that_are_not_codes_are_refused(array):
    file = io.BytesIO()
    np.save(file, array)
    file.seek(0)
    with pytest.raises(ValueError, match="not codes"):
        read_codes(file)


@pytest.mark.parametrize("frames", [9, 11, 10**6, 10**30])
def test_codes_of_another_length_than_their_header_says_are_refused(frames):
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': (2, {frames}), }}".ljust(117) + "\n"
    file = io.BytesIO(b"\x93NUMPY\x01\x00v\x00" + header.encode() + bytes(2 * 10 * 4))
    with pytest.raises(ValueError, match=f"not codes.*{frames}"):
        read_codes(file)


@settings(deadline=None)
@given(st.integers(0, 200), st.binary(max_size=8))
def test_damaged_codes_are_ignored(tmp_path_factory, cut, junk):
    root = tmp_path_factory.mktemp("voices")
    (root / "anna").mkdir()
    write_codes(root / "whole", np.ones((2, 10), np.int32))
    (root / "anna" / "codes").write_bytes((root / "whole").read_bytes()[:cut] + junk)
    with open_folder(root, "anna") as folder:
        codes = folder.codes("codes")
    assert codes is None or codes.shape == (2, 10)


def test_a_fifo_is_not_read(root):
    os.mkfifo(root / "anna" / "sample.wav")
    with open_folder(root, "anna") as folder, pytest.raises(BrokenVoice, match=r"sample\.wav.*not a regular file"):
        folder.audio("sample.wav", DEFAULT_LIMITS)


def test_a_file_larger_than_the_limit_is_refused(root):
    (root / "anna" / "sample.lab").write_bytes(b" " * 20_000)
    with open_folder(root, "anna") as folder, pytest.raises(BrokenVoice, match="larger than"):
        folder.transcript("sample.wav", DEFAULT_LIMITS)


def test_reads_stay_in_the_directory_that_was_opened(root):
    (root / "anna" / "sample.lab").write_text("old")
    with open_folder(root, "anna") as folder:
        (root / "anna").rename(root / "bell")
        (root / "anna").mkdir()
        (root / "anna" / "sample.lab").write_text("new")
        assert folder.transcript("sample.wav", DEFAULT_LIMITS) == "old"


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"recordings": 3}', b"\xff", b'{"recordings": [], "x": 1}'])
def test_details_that_cannot_be_parsed_are_named(root, content):
    (root / "anna" / "voice.json").write_bytes(content)
    with open_folder(root, "anna") as folder, pytest.raises(BrokenVoice, match=r"'anna', file 'voice\.json'"):
        folder.details()
