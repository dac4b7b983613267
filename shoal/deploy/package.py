"""A model and what a platform needs beside it, in one directory that appears whole or not at all."""

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
from shoal.checkpoint.layout import CODEC_FILES, MANIFEST, missing_files
from shoal.checkpoint.save import atomic_directory
from shoal.errors import CheckpointError, InvalidRequest

CHECKPOINT = "checkpoint"
ARCHIVE = "model.tar.gz"

Progress = Callable[[str], None]

INFERENCE = '''"""What SageMaker's own containers call; ours serves without it."""

from shoal.deploy.sagemaker import input_fn, model_fn, output_fn, predict_fn

__all__ = ["input_fn", "model_fn", "output_fn", "predict_fn"]
'''
REQUIREMENTS = "shoal[server]\n"
TRITON_MODEL = '''"""The engine does the work; see config.pbtxt for what it takes and gives."""

from shoal.deploy.triton_backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


@dataclass(frozen=True)
class PackageFile:
    """A file of a model, and its name in the package."""

    name: str
    path: Path


def model_files(model: str, codec: Path | None = None) -> list[PackageFile]:
    """All files of a model, by name. Raises ModelNotFound, CheckpointError for one that is not complete."""
    if model.startswith(RANDOM_PREFIX):
        raise InvalidRequest(f"{model} has no files: save them with `shoal random`, and package that directory")
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
        # The manifest of a quantised model tells the size of the codec that goes.
        replaced = (*CODEC_FILES, "codec.json", MANIFEST)
        found = {name: path for name, path in found.items() if name not in replaced}
        found |= _codec_files(codec)
    return [PackageFile(name, found[name]) for name in sorted(found)]


def package_sagemaker(parts: list[PackageFile], out: Path, tick: Progress) -> None:
    """`model.tar.gz` for the bucket, and the recipe of the image. The same model gives the same bytes."""
    with atomic_directory(out) as folder:
        with (folder / ARCHIVE).open("wb") as file:
            write_archive(file, parts, {"code/inference.py": INFERENCE, "code/requirements.txt": REQUIREMENTS}, tick)
        (folder / "Dockerfile").write_text(recipe("sagemaker.Dockerfile"))


def package_triton(parts: list[PackageFile], out: Path, tick: Progress) -> None:
    """A model repository: point `tritonserver --model-repository` at it."""
    with atomic_directory(out) as folder:
        version = folder / "shoal" / "1"
        copy(parts, version / CHECKPOINT, tick)
        (version / "model.py").write_text(TRITON_MODEL)
        (folder / "shoal" / "config.pbtxt").write_text(recipe("config.pbtxt"))


def package_runpod(parts: list[PackageFile], out: Path, tick: Progress) -> None:
    """What `docker build` needs for the image of a worker that has its model inside."""
    with atomic_directory(out) as folder:
        copy(parts, folder / CHECKPOINT, tick)
        (folder / "Dockerfile").write_text(recipe("runpod.Dockerfile"))


def write_archive(file: BinaryIO, parts: list[PackageFile], texts: dict[str, str], tick: Progress) -> None:
    """Names in order, no times and no owners: equal content gives equal bytes."""
    # Weights hardly shrink; the lowest level costs a tenth of the time of the usual one.
    with (
        gzip.GzipFile(filename="", fileobj=file, mode="wb", compresslevel=1, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for number, part in enumerate(parts, 1):
            tick(f"{number} of {len(parts)} files, {part.name}")
            with part.path.open("rb") as opened:
                archive.addfile(_entry(part.name, part.path.stat().st_size), opened)
        for name, text in sorted(texts.items()):
            content = text.encode()
            archive.addfile(_entry(name, len(content)), io.BytesIO(content))


def copy(parts: list[PackageFile], to: Path, tick: Progress) -> None:
    for number, part in enumerate(parts, 1):
        tick(f"{number} of {len(parts)} files, {part.name}")
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
    """The codec's file and its description, under the names that `load` looks for."""
    directory = codec if codec.is_dir() else codec.parent
    file = codec if codec.is_file() else next((codec / name for name in CODEC_FILES if (codec / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"there is no codec at {codec}")
    found = {f"codec{file.suffix}": file}
    description = directory / "codec.json"
    return found | ({"codec.json": description} if description.is_file() else {})
