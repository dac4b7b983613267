import os
import resource
import stat
import subprocess
import threading
import wave
from pathlib import Path

import numpy as np
import pytest

from shoal.audio.decode import read_audio
from shoal.audio.encode import AudioWriter
from shoal.audio.formats import FORMATS
from shoal.audio.write import AudioFile
from shoal.errors import GenerationFailed, InvalidRequest, OutputError
from tests.audio.conftest import STRICT_PYTHON

RATE = 44_100
READABLE = [name for name in FORMATS if name not in ("pcm", "ulaw", "alaw")]


def write_audio(path: Path, samples: np.ndarray, rate: int, *, format: str | None = None) -> None:
    with AudioFile(path, rate, format=format) as file:
        file.write(samples)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("format", READABLE)
def test_a_file_is_written_in_the_format_of_its_suffix(speech, tmp_path, format):
    path = tmp_path / f"out.{format}"
    write_audio(path, speech(), RATE)
    assert read_audio(path, RATE).seconds == pytest.approx(1.0, abs=0.08)
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("format", ["wav", "flac", "mp3"])
def test_nothing_has_the_name_until_everything_is_written(speech, tmp_path, format):
    path = tmp_path / f"out.{format}"
    with AudioFile(path, RATE) as file:
        for _ in range(4):
            file.write(speech(0.5))
            assert not path.exists()
    assert read_audio(path, RATE).seconds == pytest.approx(2.0, abs=0.001)


def test_the_header_of_a_written_wav_states_its_length(speech, tmp_path):
    with AudioFile(tmp_path / "out.wav", RATE) as file:
        file.write(speech())
        file.write(speech())
    with wave.open(str(tmp_path / "out.wav")) as written:
        assert written.getnframes() == 2 * RATE


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("format", list(FORMATS))
def test_an_error_leaves_the_old_file_and_no_trace(speech, tmp_path, format, error):
    path = tmp_path / f"out.{format}"
    path.write_bytes(b"precious")

    def interrupted() -> None:
        with AudioFile(path, RATE) as file:
            file.write(speech())
            raise error

    with pytest.raises(error):
        interrupted()
    assert path.read_bytes() == b"precious"
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("format", list(FORMATS))
def test_a_full_disk_is_an_output_error_and_leaves_no_trace(speech, tmp_path, format):
    noise = np.random.default_rng(0).uniform(-1, 1, 10 * RATE).astype(np.float32)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OutputError, match="File too large"):
            write_audio(tmp_path / f"out.{format}", noise, RATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == []


def test_a_sample_that_is_not_finite_leaves_no_trace(tmp_path):
    with pytest.raises(GenerationFailed):
        write_audio(tmp_path / "out.wav", np.array([np.nan], np.float32), RATE)
    assert names(tmp_path) == []


def test_a_missing_folder_is_reported_before_any_work(tmp_path):
    with pytest.raises(OutputError, match="No such file or directory"), AudioFile(tmp_path / "no" / "out.wav", RATE):
        pytest.fail("the block was entered")


def test_a_folder_is_no_output(tmp_path):
    (tmp_path / "out.wav").mkdir()
    with pytest.raises(OutputError, match="Is a directory"):
        write_audio(tmp_path / "out.wav", np.zeros(10, np.float32), RATE)


def test_a_file_used_as_a_folder_is_no_output(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="Not a directory"):
        write_audio(tmp_path / "file" / "out.wav", np.zeros(10, np.float32), RATE)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_without_permission_is_no_output(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"):
        write_audio(tmp_path / "out.wav", np.zeros(10, np.float32), RATE)


def test_an_unknown_format_is_refused_without_a_trace(tmp_path):
    with pytest.raises(InvalidRequest):
        write_audio(tmp_path / "out.wav", np.zeros(10, np.float32), RATE, format="midi")
    assert names(tmp_path) == []
    with (tmp_path / "out.wav").open("wb") as file:
        for settings in ({"output_rate": 1}, {"bitrate": 128_000}):
            with pytest.raises(InvalidRequest):
                AudioWriter("wav", RATE, file, **settings)


def test_an_unknown_suffix_is_refused_at_once(tmp_path):
    with pytest.raises(InvalidRequest, match="known"):
        AudioFile(tmp_path / "out.xyz", RATE)


def test_a_given_format_wins_over_the_suffix(speech, tmp_path):
    write_audio(tmp_path / "out.bin", speech(), RATE, format="flac")
    assert (tmp_path / "out.bin").read_bytes()[:4] == b"fLaC"


def test_a_symbolic_link_stays_one(speech, tmp_path):
    (tmp_path / "link.wav").symlink_to(tmp_path / "real.wav")
    write_audio(tmp_path / "link.wav", speech(), RATE)
    assert (tmp_path / "link.wav").is_symlink()
    assert read_audio(tmp_path / "real.wav", RATE).seconds == 1.0


def test_a_loop_of_links_is_named(tmp_path):
    (tmp_path / "loop.wav").symlink_to("loop.wav")
    with pytest.raises(OutputError, match="Too many levels of symbolic links"), AudioFile(tmp_path / "loop.wav", RATE):
        pass
    assert (tmp_path / "loop.wav").is_symlink()


def test_the_longest_file_name_can_be_written(tmp_path):
    path = tmp_path / ("n" * 251 + ".wav")
    write_audio(path, np.zeros(10, np.float32), RATE)
    assert path.stat().st_size == 64


def test_a_new_file_has_ordinary_permissions(tmp_path):
    write_audio(tmp_path / "out.wav", np.zeros(10, np.float32), RATE)
    (tmp_path / "plain").touch()
    assert (tmp_path / "out.wav").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_device_is_written_through_not_replaced(speech):
    write_audio(Path("/dev/null"), speech(), RATE, format="wav")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(OutputError, match="No space left"):
        write_audio(Path("/dev/full"), speech(), RATE, format="wav")


def test_a_pipe_gets_the_stream(speech, tmp_path):
    pipe = tmp_path / "pipe.flac"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write_audio(pipe, speech(), RATE)
    reader.join()
    assert read_audio(received[0], RATE).seconds == 1.0
    assert names(tmp_path) == ["pipe.flac"]


def say_to_stdout(samples: str) -> list[str]:
    script = f"""
import numpy as np
from pathlib import Path
from shoal.audio.write import AudioFile
from shoal.errors import OutputError
try:
    with AudioFile(Path("-"), 44100) as file:
        for _ in range(3):
            file.write({samples})
except OutputError as error:
    import os, sys
    print(error, file=sys.stderr)
    os._exit(error.exit_code)
"""
    return [*STRICT_PYTHON, "-c", script]


def test_a_dash_is_standard_output():
    result = subprocess.run(say_to_stdout("np.zeros(44100, np.float32)"), capture_output=True, check=True)
    assert read_audio(result.stdout, RATE).seconds == 3.0
    assert result.stderr == b""


def test_a_pipe_closed_by_its_reader_is_an_output_error():
    with subprocess.Popen(
        say_to_stdout("np.zeros(4_000_000, np.float32)"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(100)
        process.stdout.close()
        assert process.stderr.read() == b"cannot write standard output: Broken pipe\n"
    assert process.returncode == OutputError.exit_code


def test_samples_are_written_inside_the_block(tmp_path):
    with pytest.raises(RuntimeError, match="with"):
        AudioFile(tmp_path / "out.wav", RATE).write(np.zeros(10, np.float32))
