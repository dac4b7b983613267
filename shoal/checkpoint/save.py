"""Modules -> files, in the layouts that `load` and upstream read. A directory appears whole or not at all."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shoal.checkpoint.layout import CODEC_FILES, MANIFEST
from shoal.checkpoint.load import Checkpoint, load_codec, load_model
from shoal.checkpoint.names import to_upstream, unstack
from shoal.checkpoint.random import write_synthetic_tokenizer
from shoal.checkpoint.weight_norm import unfold_weight_norm
from shoal.codec.config import CodecConfig
from shoal.codec.dac import Codec
from shoal.errors import OutputError
from shoal.model.config import BlockConfig, DualARConfig
from shoal.model.dual_ar import DualAR
from shoal.quantize.apply import quantize_codec, quantize_model
from shoal.quantize.modes import WeightModes
from shoal.text.tokenizer import load_tokenizer


def save_random(directory: Path, checkpoint: Checkpoint, *, shard_bytes: int = 2**30) -> None:
    """Write a random checkpoint in its family's released layout: S1 as pickles, S2 as sharded safetensors."""
    config = checkpoint.model.config
    with atomic_directory(directory) as folder:
        write_json(folder / "config.json", config_document(config))
        if config.family == "s1":
            save_pickled_model(folder / "model.pth", checkpoint.model)
        else:
            save_sharded_model(folder, checkpoint.model, shard_bytes)
        save_pickled_codec(folder, checkpoint.codec)
        write_synthetic_tokenizer(folder, config)


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """A folder to write into that becomes `directory` when the block ends well, and vanishes when it does not."""
    if directory.exists():
        raise OutputError(f"{directory} exists already; choose another name")
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
    """The model's tensors under upstream's names."""
    return {to_upstream(name): tensor.contiguous() for name, tensor in unstack(model.state_dict()).items()}


def save_pickled_model(path: Path, model: DualAR) -> None:
    # Cloned: a view would drag the whole stacked weight into the file, once per piece.
    torch.save({name: tensor.clone() for name, tensor in upstream_tensors(model).items()}, path)


def save_model(path: Path, model: DualAR) -> None:
    """One safetensors file under upstream's names."""
    save_file(upstream_tensors(model), path)


def save_sharded_model(folder: Path, model: DualAR, shard_bytes: int) -> None:
    """S2's layout: shards under the released prefixes, and the index that says which tensor is where."""
    shards = _shards({_safetensors_name(n): t for n, t in upstream_tensors(model).items()}, shard_bytes)
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name)
        where |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def save_quantized(
    source: Path, directory: Path, modes: WeightModes, *, tick: Callable[[str], None] = lambda part: None
) -> None:
    """Write the model of directory `source` with its weights in `modes`; everything else there is copied.

    Raises CheckpointError, OutputError, and InvalidRequest for a source that is quantised in another way.
    """
    if source.resolve() in directory.resolve().parents:
        # It would be copied into itself, and into everything that is made of this source later.
        raise OutputError(f"{directory} lies inside the model that is read; choose a place outside {source}")
    tokenizer = load_tokenizer(source)
    model = load_model(source, tokenizer)
    with atomic_directory(directory) as folder:
        copied = [path for path in source.iterdir() if not _holds_weights(path.name)]
        if modes.codec != "none":
            codec = load_codec(source)
            quantize_codec(codec, modes.codec)
            tick("codec")
            save_file(
                {name: tensor.contiguous() for name, tensor in codec.state_dict().items()}, folder / CODEC_FILES[0]
            )
        else:
            copied += [path for path in source.iterdir() if path.name in CODEC_FILES]
        quantize_model(model, modes, tick=tick)
        save_model(folder / "model.safetensors", model)
        for path in copied:
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
        weights = [path for path in folder.iterdir() if _holds_weights(path.name)]
        for path in weights:
            path.chmod(0o644)  # safetensors keeps its files to the one who wrote them
        sizes = {path.name: path.stat().st_size for path in weights}
        write_json(folder / MANIFEST, {"weights": str(modes), "files": sizes})


def _holds_weights(name: str) -> bool:
    return name.startswith(("model", "codec")) and name.endswith((".pth", ".safetensors", ".safetensors.index.json"))


def save_pickled_codec(folder: Path, codec: Codec) -> None:
    """Upstream's `codec.pth`, weight norm and all, with the description that sizes other than Fish's need."""
    torch.save(unfold_weight_norm(codec.state_dict()), folder / "codec.pth")
    if codec.config != CodecConfig():
        write_json(folder / "codec.json", codec.config.to_dict())


def config_document(config: DualARConfig) -> dict[str, Any]:
    """`config.json` as the family writes it."""
    return _nested_document(config) if config.family == "s2" else _flat_document(config)


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _flat_document(config: DualARConfig) -> dict[str, Any]:
    fast = {f"fast_{k}": v for k, v in asdict(config.fast).items() if k in _FAST_KEYS}
    return {
        "model_type": "dual_ar",
        **asdict(config.slow),
        **fast,
        "n_fast_layer": config.fast.n_layer,
        **{key: getattr(config, key) for key in _SHARED_KEYS},
    }


def _nested_document(config: DualARConfig) -> dict[str, Any]:
    text = {**asdict(config.slow), "vocab_size": config.vocab_size, "tie_word_embeddings": config.tie_word_embeddings}
    audio = {
        **asdict(config.fast),
        "vocab_size": config.codebook_size,
        "num_codebooks": config.num_codebooks,
        "tie_word_embeddings": False,
    }
    return {"model_type": "fish_qwen3_omni", "text_config": text, "audio_decoder_config": audio}


_FAST_KEYS = set(BlockConfig.__dataclass_fields__) - {"n_layer", "rope_base", "norm_eps", "max_seq_len"}
_SHARED_KEYS = (
    "vocab_size", "codebook_size", "num_codebooks", "tie_word_embeddings", "scale_codebook_embeddings",
    "norm_fastlayer_input",
)  # fmt: skip


def _safetensors_name(name: str) -> str:
    if name.startswith("fast_"):
        return f"audio_decoder.{name.removeprefix('fast_')}"
    return f"audio_decoder.{name}" if name.startswith("codebook_embeddings.") else f"text_model.model.{name}"


def _shards(tensors: dict[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > most:
            shards.append({})
        shards[-1][name] = tensor
    return shards
