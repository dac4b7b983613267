"""Packages are complete, reproducible and written atomically."""

import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

from shoal.checkpoint.find import BUNDLED_DIRECTORY
from shoal.checkpoint.load import load_checkpoint, load_codec
from shoal.checkpoint.save import save_quantized
from shoal.cli import app
from shoal.deploy.own_wheel import DISTRIBUTION, wheel_name
from shoal.deploy.package import (
    ARCHIVE,
    CHECKPOINT,
    model_files,
    package_runpod,
    package_sagemaker,
    package_sagemaker_triton,
    package_triton,
)
from shoal.errors import CheckpointError, InvalidRequest, OutputError
from shoal.quantize.apply import modes_of, quantize_codec
from shoal.quantize.modes import WeightModes

WHEEL = f"code/{wheel_name(distribution(DISTRIBUTION))}"


def quiet(reported: str) -> None:
    pass


@pytest.fixture(scope="module")
def packed(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package for SageMaker; the tests only read it."""
    folder = tmp_path_factory.mktemp("packed") / "out"
    package_sagemaker(model_files(str(tiny_directory)), folder, quiet)
    return folder


def test_the_same_model_gives_the_same_archive(packed: Path, tiny_directory: Path, tmp_path: Path) -> None:
    for file in tiny_directory.iterdir():
        file.touch()  # times do not count
    package_sagemaker(model_files(str(tiny_directory)), tmp_path / "again", quiet)
    assert (tmp_path / "again" / ARCHIVE).read_bytes() == (packed / ARCHIVE).read_bytes()


def test_the_archive_holds_the_model_and_the_handler(packed: Path, tiny_directory: Path, tmp_path: Path) -> None:
    with tarfile.open(packed / ARCHIVE) as archive:
        names = set(archive.getnames())
        archive.extractall(tmp_path / "model", filter="data")
    assert names == {
        *(path.name for path in tiny_directory.iterdir()),
        "code/inference.py",
        "code/requirements.txt",
        WHEEL,
    }
    for path in tiny_directory.iterdir():
        assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes()
    assert "shoal.deploy.container" in (packed / "Dockerfile").read_text()


def test_an_archive_installs_offline_from_its_own_wheel(packed: Path, tmp_path: Path) -> None:
    """Install as SageMaker's containers do, from another directory. `--no-deps`: the archive carries none."""
    with tarfile.open(packed / ARCHIVE) as archive:
        archive.extractall(tmp_path / "model", filter="data")
    installed = install_offline("--requirement", tmp_path / "model" / "code" / "requirements.txt", tmp_path)
    code = "import shoal.deploy.sagemaker as s; print(s.__file__)"
    command = [sys.executable, "-P", "-c", code]
    env = {**os.environ, "PYTHONPATH": str(installed)}
    ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=True)
    assert Path(ran.stdout.strip()).is_relative_to(installed)


def test_a_repository_for_triton_carries_its_wheel(tiny_directory: Path, tmp_path: Path) -> None:
    package_triton(model_files(str(tiny_directory)), tmp_path / "models", quiet)
    (wheel,) = (tmp_path / "models" / "shoal").glob("*.whl")
    installed = install_offline(wheel, tmp_path)
    assert (installed / "shoal" / "deploy" / "triton_backend.py").is_file()


def test_an_archive_for_sagemakers_triton_is_a_repository_with_one_model(tiny_directory: Path, tmp_path: Path) -> None:
    package_sagemaker_triton(model_files(str(tiny_directory)), tmp_path / "out", quiet)
    with tarfile.open(tmp_path / "out" / ARCHIVE) as archive:
        names = set(archive.getnames())
        config = archive.extractfile("shoal/config.pbtxt")
        assert config is not None
        text = config.read().decode()
    files = {f"shoal/1/{CHECKPOINT}/{path.name}" for path in tiny_directory.iterdir()}
    assert names == {"shoal/config.pbtxt", "shoal/1/model.py", *files}
    # The container calls no decoupled models, and gives the model the name of its archive.
    assert "decoupled: false" in text
    assert "decoupled: true" not in text
    assert "\nname:" not in f"\n{text}"
    (wheel,) = (tmp_path / "out").glob("*.whl")
    assert f"COPY {wheel.name.split('-')[0]}-*.whl" in (tmp_path / "out" / "Dockerfile").read_text()


def install_offline(*arguments: str | Path) -> Path:
    """Install with no index into a directory below the last argument; pip checks names, hashes and metadata."""
    target = Path(arguments[-1]) / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-deps", "--no-compile", "--target", str(target), *map(str, arguments[:-1])]
    subprocess.run(command, cwd=target.anchor, check=True, capture_output=True, timeout=300)
    return target


def test_the_bundled_model_brings_its_voices() -> None:
    names = {part.name for part in model_files("nano")}
    assert {"config.json", "model.safetensors", "codec.safetensors", "shoal.json"} <= names
    assert any(name.startswith("voices/") for name in names)
    assert all((BUNDLED_DIRECTORY / name).is_file() for name in names)


def test_a_repository_for_triton_has_configuration_code_and_model(tiny_directory: Path, tmp_path: Path) -> None:
    package_triton(model_files(str(tiny_directory)), tmp_path / "models", quiet)
    version = tmp_path / "models" / "shoal" / "1"
    assert "decoupled: true" in (version.parent / "config.pbtxt").read_text()
    assert "TritonPythonModel" in (version / "model.py").read_text()
    assert {path.name for path in (version / CHECKPOINT).iterdir()} == {path.name for path in tiny_directory.iterdir()}


def test_a_worker_has_its_model_inside(tiny_directory: Path, tmp_path: Path) -> None:
    package_runpod(model_files(str(tiny_directory)), tmp_path / "worker", quiet)
    assert (tmp_path / "worker" / CHECKPOINT / "config.json").is_file()
    assert f"COPY {CHECKPOINT} " in (tmp_path / "worker" / "Dockerfile").read_text()


def test_another_codec_takes_the_place_of_the_models_own(tiny_directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pth"
    other.write_bytes(b"another")
    parts = {part.name: part.path for part in model_files(str(tiny_directory), other)}
    assert parts["codec.pth"] == other
    assert "codec.json" not in parts


def test_a_quantised_model_with_another_codec_can_be_loaded(tiny_directory: Path, tmp_path: Path) -> None:
    save_quantized(tiny_directory, tmp_path / "small", WeightModes.parse("int8"))
    other = load_codec(tiny_directory)
    quantize_codec(other, "int8")
    (tmp_path / "other").mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in other.state_dict().items()},
        tmp_path / "other" / "codec.safetensors",
    )
    shutil.copy(tiny_directory / "codec.json", tmp_path / "other")
    package_runpod(model_files(str(tmp_path / "small"), tmp_path / "other"), tmp_path / "worker", quiet)
    packed = load_checkpoint(tmp_path / "worker" / CHECKPOINT)
    assert modes_of(packed.model, packed.codec) == WeightModes.parse("int8,codec=int8")


def test_a_model_that_lacks_something_is_not_packed(tiny_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="shoal random"):
        model_files("random:tiny")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="lacks"):
        model_files(str(tmp_path / "part"))


def test_nothing_is_left_of_a_package_that_was_interrupted(tiny_directory: Path, tmp_path: Path) -> None:
    def interrupted(reported: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        package_sagemaker(model_files(str(tiny_directory)), tmp_path / "out", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_not_overwritten(tiny_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="already exists"):
        package_triton(model_files(str(tiny_directory)), tmp_path, quiet)


@pytest.mark.parametrize("platform", ["sagemaker", "sagemaker --triton", "triton", "runpod"])
def test_the_command_packs(tiny_directory: Path, tmp_path: Path, platform: str) -> None:
    out = tmp_path / "out"
    ran = CliRunner().invoke(app, ["package", *platform.split(), "--model", str(tiny_directory), "-o", str(out)])
    assert (ran.exit_code, ran.stdout.strip()) == (0, str(out))
    assert any(out.iterdir())
