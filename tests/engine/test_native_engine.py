"""The engine without torch: the audio of the ordinary engine, and what it leaves to it."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.checkpoint.arrays import ArrayCheckpoint, load_arrays
from shoal.checkpoint.find import BUNDLED, BUNDLED_DIRECTORY
from shoal.config import ISA_VARIABLE, EngineConfig
from shoal.engine import native_engine
from shoal.engine.engine import Engine
from shoal.engine.native_engine import NativeEngine, NeedsTorch, load_native
from shoal.engine.utterance import UtteranceStream
from shoal.errors import CheckpointError, GenerationFailed, TextError
from shoal.model.slow import Head
from shoal.native.choice import native_library, supported_sets
from shoal.native.library import NativeUnavailable, open_library
from shoal.native.modules import codec_arrays, model_arrays
from shoal.speech import AudioChunk, Recording, SpeechRequest, Word
from shoal.voices.encoder import codec_fingerprint
from tests.nano import DEFAULT_VOICE, OTHER_VOICE

REQUESTS = (
    SpeechRequest("The tide is coming in.", whole=True),
    SpeechRequest("Two boats left at 9:30. Nobody saw them.", voice=OTHER_VOICE),
    SpeechRequest(f'<speak>One. <voice name="{OTHER_VOICE}">Two.</voice><break time="200ms"/></speak>', ssml=True),
    SpeechRequest("Words have times.", timestamps=True),
)


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        open_library()
    except NativeUnavailable as error:
        pytest.skip(f"no native library: {error}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("voices")


@pytest.fixture(scope="module")
def ordinary(folder: Path) -> Iterator[Engine]:
    with shoal.load(BUNDLED, device="cpu", voices=folder, config=EngineConfig(slots=2)) as engine:
        yield engine


@pytest.fixture(scope="module")
def arrays() -> ArrayCheckpoint:
    return load_arrays(BUNDLED_DIRECTORY, BUNDLED)


@pytest.fixture(scope="module")
def native(arrays: ArrayCheckpoint, folder: Path) -> NativeEngine:
    return NativeEngine(arrays, EngineConfig(), folder)


def spoken(stream: UtteranceStream) -> tuple[np.ndarray, np.ndarray, list[Word]]:
    chunks: list[AudioChunk] = list(stream)
    words = [word for chunk in chunks for word in chunk.words]
    return np.concatenate([chunk.samples for chunk in chunks]), stream.codes(), words


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda each: each.text[:12])
def test_the_audio_has_the_bits_of_the_ordinary_engine(
    ordinary: Engine, native: NativeEngine, request_: SpeechRequest
) -> None:
    assert ordinary.service.backends.model == "native"
    sampling = replace(native.default_sampling, seed=3)
    expected, found = (
        spoken(each.speak_blocking(replace(request_, sampling=sampling))) for each in (ordinary.service, native)
    )
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[0], expected[0])
    assert found[2] == expected[2]
    assert len(found[0]) > native.sample_rate // 4


def test_all_weights_equal_those_of_the_modules(ordinary: Engine, arrays: ArrayCheckpoint) -> None:
    checkpoint = ordinary.service.core.checkpoint
    for found, expected in (
        (arrays.model.weights, model_arrays(checkpoint.model, Head(checkpoint.model.slow)).weights),
        (arrays.codec.weights, codec_arrays(checkpoint.codec).weights),
    ):
        assert expected.keys() <= found.keys()
        for name, weight in expected.items():
            np.testing.assert_array_equal(found[name].astype(weight.dtype), weight, err_msg=name)


def test_the_fingerprint_of_a_codec_does_not_need_torch(ordinary: Engine, native: NativeEngine) -> None:
    assert native._encoder.fingerprint == codec_fingerprint(ordinary.service.core.checkpoint.codec)


def test_say_imports_neither_torch_nor_pydantic_nor_rich(tmp_path: Path) -> None:
    """Each takes longer to import than the first words take to compute."""
    flags = ["say", "Yes.", "-o", str(tmp_path / "yes.wav"), "--no-server", "--device", "cpu"]
    code = (
        f"import sys, shoal.cli\nsys.argv = ['shoal', *{flags}]\ntry:\n    shoal.cli.main()\nexcept SystemExit:\n"
        "    sys.exit([name for name in ('torch', 'pydantic', 'rich') if name in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "yes.wav").stat().st_size > 1000


def test_closing_the_stream_releases_the_utterance(native: NativeEngine) -> None:
    stream = native.speak_blocking(SpeechRequest("This sentence is interrupted. This one is not spoken."))
    next(iter(stream))
    stream.close()
    assert not native.tracker.active
    assert native.scheduler.has_free_slot


def test_a_failing_step_fails_the_request_and_not_the_engine(
    native: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(native.context.library, "shoal_step", lambda *_: 2)
        with pytest.raises(GenerationFailed, match="out of memory"):
            list(native.speak_blocking(SpeechRequest("It fails.")))
    assert list(native.speak_blocking(SpeechRequest("Yes.")))[-1].finish is not None


def test_recordings_need_torch(folder: Path) -> None:
    request = SpeechRequest("Hello.", recordings=(Recording(b"", "hello"),))
    with pytest.raises(NeedsTorch, match="recordings"):
        load_native(BUNDLED, EngineConfig(), folder, None, request)


def test_a_voice_without_stored_codes_needs_torch(native: NativeEngine, tmp_path: Path) -> None:
    source = BUNDLED_DIRECTORY / "voices" / DEFAULT_VOICE
    audio = next(source.glob("*.wav"))
    mine = tmp_path / "mine"
    mine.mkdir()
    for file in (audio, audio.with_suffix(".lab")):
        (mine / file.name).write_bytes(file.read_bytes())
    with pytest.raises(NeedsTorch, match="not stored"):
        load_native(BUNDLED, EngineConfig(), tmp_path, None, SpeechRequest("Hello.", voice="mine"))


def test_invalid_text_is_refused_as_by_the_ordinary_engine(native: NativeEngine) -> None:
    with pytest.raises(TextError):
        native.speak_blocking(SpeechRequest("   "))


def test_files_that_numpy_cannot_read_need_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in BUNDLED_DIRECTORY.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="numpy"):
        load_arrays(tmp_path, "broken")
    monkeypatch.setattr(native_engine, "find_directory", lambda name: tmp_path)
    with pytest.raises(NeedsTorch):
        load_native(BUNDLED, EngineConfig(), tmp_path, None, SpeechRequest("Hello."))


@pytest.mark.parametrize("driver", native_engine.GPU_DRIVERS)
def test_a_gpu_driver_is_noticed(monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: path == driver)
    assert native_engine.gpu_driver_present()
    monkeypatch.setattr("os.path.exists", lambda path: False)
    assert not native_engine.gpu_driver_present()


def test_the_environment_sets_the_instruction_set(
    arrays: ArrayCheckpoint, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in supported_sets()[-2:]:
        monkeypatch.setenv(ISA_VARIABLE, name)
        assert NativeEngine(arrays, EngineConfig(), folder).context.isa == name
        assert native_library().detail == native_library(name).detail == f"native ({name})"
