"""Write checkpoints in the layouts that `load` and upstream read. Directories are written atomically."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.checkpoint.format.directory import read_tokenizer
from shoal.checkpoint.format.layout import CODEC_FILES, MANIFEST
from shoal.checkpoint.format.model_config import config_document
from shoal.checkpoint.format.names import to_upstream, unstack
from shoal.checkpoint.format.weight_norm import unfold_weight_norm
from shoal.checkpoint.load import Checkpoint, load_codec, load_model
from shoal.checkpoint.random import write_synthetic_tokenizer
from shoal.codec.config import CodecConfig
from shoal.codec.dac import Codec
from shoal.errors import InvalidRequest, OutputError
from shoal.model.dual_ar import DualAR
from shoal.quantize.apply import quantize_codec, quantize_model
from shoal.quantize.modes import WeightModes


def save_random(directory: Path, checkpoint: Checkpoint, *, shard_bytes: int = 2**30) -> None:
    """Write a random checkpoint in its family's released layout. Raises OutputError."""
    config = checkpoint.model.config
    with atomic_directory(directory) as folder:
        write_json(folder / "config.json", config_document(config))
        if config.family.release_layout == "sharded":
            save_sharded_model(folder, checkpoint.model, shard_bytes)
        else:
            save_pickled_model(folder / "model.pth", checkpoint.model)
        save_pickled_codec(folder, checkpoint.codec)
        write_synthetic_tokenizer(folder, config)


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `directory` on success and removed on failure. Raises OutputError."""
    if directory.exists():
        raise OutputError(f"{directory} already exists: choose another name")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as problem:
        raise OutputError(f"cannot write to {directory.parent}: {problem.strerror}") from problem
    try:
        yield folder
        folder.chmod(0o755)
        folder.replace(directory)
    except OSError as problem:
        raise OutputError(f"cannot write {directory}: {problem.strerror}") from problem
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def upstream_tensors(model: DualAR) -> dict[str, Tensor]:
    """Return the model's tensors under upstream's names."""
    return {to_upstream(name): tensor.contiguous() for name, tensor in unstack(model.state_dict()).items()}


def save_pickled_model(path: Path, model: DualAR) -> None:
    # Cloned: pickling a view would store the whole stacked weight once per piece.
    torch.save({name: tensor.clone() for name, tensor in upstream_tensors(model).items()}, path)


def save_model(path: Path, model: DualAR) -> None:
    """Write one safetensors file under upstream's names."""
    save_file(upstream_tensors(model), path)


def save_sharded_model(folder: Path, model: DualAR, shard_bytes: int) -> None:
    """Write S2's layout: safetensors shards under the released names, and their index."""
    shards = _shards({safetensors_name(n): t for n, t in upstream_tensors(model).items()}, shard_bytes)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name)
        where |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def save_quantized(
    source: Path, directory: Path, modes: WeightModes, *, on_layer: Callable[[str], None] = lambda component: None
) -> None:
    """Write the model of `source` with its weights quantized to `modes`, and copy all other files.

    `on_layer` is called with the component's name after each layer. Raises CheckpointError, OutputError, and
    InvalidRequest for a source that is already quantized in another mode, and for w8a8, which is stored as int8.
    """
    if "w8a8" in (modes.slow, modes.fast):
        raise InvalidRequest("w8a8 is stored as int8: use --mode int8, and --quantize w8a8 when you load the model")
    if source.resolve() in directory.resolve().parents:
        # The result would be copied into itself and into every later copy of the source.
        raise OutputError(f"{directory} is inside the source model: choose a directory outside {source}")
    tokenizer = read_tokenizer(source)
    model = load_model(source, tokenizer)
    with atomic_directory(directory) as folder:
        copied = [path for path in source.iterdir() if not _holds_weights(path.name)]
        if modes.codec != "none":
            codec = load_codec(source)
            quantize_codec(codec, modes.codec)
            on_layer("codec")
            save_file(
                {name: tensor.contiguous() for name, tensor in codec.state_dict().items()}, folder / CODEC_FILES[0]
            )
        else:
            copied += [path for path in source.iterdir() if path.name in CODEC_FILES]
        quantize_model(model, modes, on_layer=on_layer)
        save_model(folder / "model.safetensors", model)
        for path in copied:
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
        weights = [path for path in folder.iterdir() if _holds_weights(path.name)]
        for path in weights:
            path.chmod(0o644)  # safetensors creates files readable by their owner only
        sizes = {path.name: path.stat().st_size for path in weights}
        write_json(folder / MANIFEST, {"weights": str(modes), "files": sizes})


def _holds_weights(name: str) -> bool:
    return name.startswith(("model", "codec")) and name.endswith((".pth", ".safetensors", ".safetensors.index.json"))


def save_pickled_codec(folder: Path, codec: Codec) -> None:
    """Write upstream's weight-normed `codec.pth`, and `codec.json` if the sizes differ from the released codec's."""
    torch.save(unfold_weight_norm(codec.state_dict()), folder / "codec.pth")
    if codec.config != CodecConfig():
        write_json(folder / "codec.json", codec.config.to_dict())


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def safetensors_name(name: str) -> str:
    """Map upstream's internal name to that of the released S2 files."""
    if name.startswith("fast_"):
        return f"audio_decoder.{name.removeprefix('fast_')}"
    return f"audio_decoder.{name}" if name.startswith("codebook_embeddings.") else f"text_model.model.{name}"


def _shards(tensors: dict[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > max_bytes:
            shards.append({})
        shards[-1][name] = tensor
    return shards
