"""Keys and values of voices on disk: the same audio, computed in fewer steps, and never from the wrong file."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.checkpoint.arrays import ArrayCheckpoint, load_arrays
from shoal.checkpoint.find import BUNDLED, BUNDLED_DIRECTORY
from shoal.config import EngineConfig
from shoal.engine import native_engine, prefix_file
from shoal.engine.native_engine import NativeEngine
from shoal.native.library import NativeUnavailable, open_library
from shoal.speech import SpeechRequest
from tests.nano import OTHER_VOICE

REQUEST = SpeechRequest("Yes.")


@pytest.fixture(scope="module")
def arrays() -> ArrayCheckpoint:
    try:
        open_library()
    except NativeUnavailable as error:
        pytest.skip(f"no native library: {error}")
    return load_arrays(BUNDLED_DIRECTORY, BUNDLED)


@pytest.fixture(scope="module")
def expected(arrays: ArrayCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return speak(arrays, None, tmp_path_factory.mktemp("voices"))[0]


@pytest.fixture(scope="module")
def written(arrays: ArrayCheckpoint, expected: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that one process has written."""
    folder = tmp_path_factory.mktemp("written") / "prefixes"
    samples, blocks = speak(arrays, folder, folder.parent)
    assert blocks == 0
    np.testing.assert_array_equal(samples, expected)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "prefixes")


def speak(
    arrays: ArrayCheckpoint, prefixes: Path | None, voices: Path, request: SpeechRequest = REQUEST
) -> tuple[np.ndarray, int]:
    """Return the samples of a new engine, and how many blocks it took from the file."""
    engine = NativeEngine(arrays, EngineConfig(), voices, prefixes=prefixes)
    samples = np.concatenate([chunk.samples for chunk in engine.speak_blocking(request)])
    assert engine.scheduler.pool.used == 0
    return samples, engine.scheduler.pool.stats.host_hits


def test_the_second_process_reads_the_voice_and_gives_the_same_bits(
    arrays: ArrayCheckpoint, expected: np.ndarray, folder: Path, tmp_path: Path
) -> None:
    samples, blocks = speak(arrays, folder, tmp_path)
    assert blocks > 0
    np.testing.assert_array_equal(samples, expected)
    assert folder.stat().st_mode & 0o077 == 0


def test_a_damaged_file_is_computed_again(
    arrays: ArrayCheckpoint, expected: np.ndarray, folder: Path, tmp_path: Path
) -> None:
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    samples, blocks = speak(arrays, folder, tmp_path)
    assert blocks == 0
    np.testing.assert_array_equal(samples, expected)
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "value"), [("library_name", lambda: "another library"), ("MODEL_FILE", "config.json")]
)
def test_a_file_of_another_library_or_model_is_not_used(
    arrays: ArrayCheckpoint, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    monkeypatch.setattr(native_engine, name, value)
    assert speak(arrays, folder, tmp_path)[1] == 0


def test_a_file_of_the_same_weights_with_another_configuration_is_not_used(
    arrays: ArrayCheckpoint, folder: Path, tmp_path: Path
) -> None:
    config = replace(arrays.model.config, slow=replace(arrays.model.config.slow, rope_base=1000.0))
    edited = replace(arrays, model=replace(arrays.model, config=config))
    samples, blocks = speak(edited, folder, tmp_path)
    assert blocks == 0
    np.testing.assert_array_equal(samples, speak(edited, None, tmp_path)[0])


def test_a_folder_that_cannot_be_written_is_no_error(
    arrays: ArrayCheckpoint, expected: np.ndarray, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    samples, _ = speak(arrays, tmp_path / "file", tmp_path)
    np.testing.assert_array_equal(samples, expected)


def test_nothing_is_stored_of_the_voices_of_a_user(arrays: ArrayCheckpoint, tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_DIRECTORY / "voices" / OTHER_VOICE, tmp_path / "voices" / "mine")
    speak(arrays, tmp_path / "p", tmp_path / "voices", SpeechRequest("No.", voice="mine"))
    marked = SpeechRequest('<speak><voice name="mine">No.</voice></speak>', ssml=True)
    speak(arrays, tmp_path / "p", tmp_path / "voices", marked)
    assert not (tmp_path / "p").exists()


def test_every_voice_has_a_file_and_the_oldest_is_deleted(
    arrays: ArrayCheckpoint, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_file, "MAX_FILES", 1)
    (first,) = folder.iterdir()
    assert speak(arrays, folder, tmp_path, SpeechRequest("No.", voice=OTHER_VOICE))[1] == 0
    (second,) = folder.iterdir()
    assert second != first
