"""Package a model with the files that a platform needs, in a directory that is created atomically."""

import gzip
import io
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO

from shoal.checkpoint.find import RANDOM_PREFIX, find_directory
from shoal.checkpoint.format.layout import CODEC_FILES, MANIFEST, missing_files
from shoal.checkpoint.save import atomic_directory
from shoal.deploy.own_wheel import build_own_wheel, requirement
from shoal.errors import CheckpointError, InvalidRequest

CHECKPOINT = "checkpoint"
ARCHIVE = "model.tar.gz"

Progress = Callable[[str], None]

INFERENCE = '''"""Entry points for SageMaker's own containers; the Shoal image does not need them."""

from shoal.deploy.sagemaker import input_fn, model_fn, output_fn, predict_fn

__all__ = ["input_fn", "model_fn", "output_fn", "predict_fn"]
'''
TRITON_MODEL = '''"""Triton model that runs a Shoal engine; config.pbtxt lists inputs and outputs."""

from shoal.deploy.triton_backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class PackageFile:
    """File of a model and its name in the package."""

    name: str
    path: Path


def model_files(model: str, codec: Path | None = None) -> list[PackageFile]:
    """Return all files of a model, sorted by name. Raises ModelNotFound, or CheckpointError for missing files."""
    if model.startswith(RANDOM_PREFIX):
        raise InvalidRequest(f"{model} has no files: save it with `shoal random` and package that directory")
    directory = find_directory(model)
    lacking = missing_files(directory, codec=codec is None)
    if lacking:
        raise CheckpointError(f"{model} lacks {', '.join(lacking)}; a codec can be given with --codec")
    found = {
        path.relative_to(directory).as_posix(): path
        for path in directory.rglob("*")
        if path.is_file() and not any(part.startswith((".", "__")) for part in path.relative_to(directory).parts)
    }
    if codec is not None:
        # The manifest of a quantized model contains the size of the replaced codec.
        replaced = (*CODEC_FILES, "codec.json", MANIFEST)
        found = {name: path for name, path in found.items() if name not in replaced}
        found |= _codec_files(codec)
    return [PackageFile(name, found[name]) for name in sorted(found)]


def package_sagemaker(parts: list[PackageFile], out: Path, progress: Progress) -> None:
    """Write a reproducible `model.tar.gz` for the bucket and the Dockerfile of the image.

    SageMaker's own containers install `code/requirements.txt`, which names the wheel beside it.
    """
    wheel, content = build_own_wheel()
    code = {"inference.py": INFERENCE.encode(), "requirements.txt": requirement("server").encode(), wheel: content}
    with atomic_directory(out) as folder:
        with (folder / ARCHIVE).open("wb") as file:
            write_archive(file, parts, {f"code/{name}": data for name, data in code.items()}, progress)
        (folder / "Dockerfile").write_text(recipe("sagemaker.Dockerfile"))


def package_sagemaker_triton(parts: list[PackageFile], out: Path, progress: Progress) -> None:
    """Write a `model.tar.gz` for SageMaker's Triton container, alone or as one model of many, and the image's recipe.

    The model is in the directory `shoal`: the container rejects a single model with config.pbtxt at the top level. The
    image, not the archive, contains Shoal's wheel, so that all models of an endpoint share one installation.
    """
    wheel, content = build_own_wheel()
    inside = [PackageFile(f"shoal/1/{CHECKPOINT}/{part.name}", part.path) for part in parts]
    code = {"shoal/1/model.py": TRITON_MODEL.encode(), "shoal/config.pbtxt": sagemaker_triton_config().encode()}
    with atomic_directory(out) as folder:
        with (folder / ARCHIVE).open("wb") as file:
            write_archive(file, inside, code, progress)
        (folder / wheel).write_bytes(content)
        (folder / "Dockerfile").write_text(recipe("sagemaker-triton.Dockerfile"))


def sagemaker_triton_config() -> str:
    """Return config.pbtxt for SageMaker's container, which supports no decoupled models and sets the name."""
    config = recipe("config.pbtxt").replace("decoupled: true", "decoupled: false")
    return config.replace('name: "shoal"\n', "", 1)


def package_triton(parts: list[PackageFile], out: Path, progress: Progress) -> None:
    """Write a model repository for `tritonserver --model-repository`.

    The wheel, to be installed into Triton's Python environment, is beside `config.pbtxt`, where Triton ignores it.
    """
    wheel, content = build_own_wheel()
    with atomic_directory(out) as folder:
        version = folder / "shoal" / "1"
        copy(parts, version / CHECKPOINT, progress)
        (version / "model.py").write_text(TRITON_MODEL)
        (folder / "shoal" / "config.pbtxt").write_text(recipe("config.pbtxt"))
        (folder / "shoal" / wheel).write_bytes(content)


def package_runpod(parts: list[PackageFile], out: Path, progress: Progress) -> None:
    """Write a `docker build` context for the image of a worker that contains its model."""
    with atomic_directory(out) as folder:
        copy(parts, folder / CHECKPOINT, progress)
        (folder / "Dockerfile").write_text(recipe("runpod.Dockerfile"))


def write_archive(file: BinaryIO, parts: list[PackageFile], code: dict[str, bytes], progress: Progress) -> None:
    """Write a reproducible tar.gz: sorted names, no timestamps, no owners."""
    # Weights hardly compress; level 1 takes a tenth of the time of the default level.
    with (
        gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for number, part in enumerate(parts, 1):
            progress(f"{number} of {len(parts)} files, {part.name}")
            with part.path.open("rb") as opened:
                archive.addfile(_entry(part.name, part.path.stat().st_size), opened)
        for name, content in sorted(code.items()):
            archive.addfile(_entry(name, len(content)), io.BytesIO(content))


def copy(parts: list[PackageFile], to: Path, progress: Progress) -> None:
    for number, part in enumerate(parts, 1):
        progress(f"{number} of {len(parts)} files, {part.name}")
        target = to / part.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(part.path, target)


def recipe(name: str) -> str:
    return (files("shoal.deploy") / "recipes" / name).read_text(encoding="utf-8")


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    return entry


def _codec_files(codec: Path) -> dict[str, Path]:
    """Return the codec file and its description under the names that `load` looks for."""
    directory = codec if codec.is_dir() else codec.parent
    file = codec if codec.is_file() else next((codec / name for name in CODEC_FILES if (codec / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"no codec file found at {codec}")
    found = {f"codec{file.suffix}": file}
    description = directory / "codec.json"
    return found | ({"codec.json": description} if description.is_file() else {})
