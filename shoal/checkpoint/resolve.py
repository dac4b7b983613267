"""A model's name -> its directory -> the model. The network is never asked: what is not here is not found.

random:SIZE          weights drawn on the spot
nano                 the model inside this package
a directory          wherever it is
s1-mini, s2-pro      what `shoal pull` put into the Hugging Face cache, by short name
OWNER/NAME           the same, by repository; any of them with @REVISION
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from shoal.checkpoint.load import CODEC_FILES, MODEL_FILES, Checkpoint, ChooseModes, load_checkpoint, load_codec
from shoal.checkpoint.random import PREFIX, random_checkpoint
from shoal.checkpoint.tensors import read_json
from shoal.errors import CheckpointError, ModelNotFound
from shoal.quantize.apply import fit_codec, fit_model

BUNDLED = "nano"
BUNDLED_FOLDER = Path(__file__).parents[1] / "models" / BUNDLED
SHORT_NAMES = {"s1-mini": "fishaudio/openaudio-s1-mini", "s2-pro": "fishaudio/s2-pro"}
# A revision becomes part of a path in the cache, so it must not climb out of it.
REVISION = re.compile(r"[A-Za-z0-9](?:[\w-]|[./](?=[\w-]))*", re.ASCII)
TOKENIZER_FILES = {"tokenizer.json": (), "tokenizer.tiktoken": ("special_tokens.json",)}


@dataclass(frozen=True, slots=True)
class Source:
    """A repository of the Hugging Face hub at a revision."""

    repository: str
    revision: str = "main"

    @classmethod
    def parse(cls, name: str) -> "Source | None":
        """None when the name cannot be one of the hub's."""
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        known, at, revision = name.partition("@")
        repository = SHORT_NAMES.get(known, known)
        try:
            validate_repo_id(repository)
        except HFValidationError:
            return None
        if repository.count("/") != 1 or (at and not REVISION.fullmatch(revision)):
            return None
        return cls(repository, revision or "main")

    @property
    def released(self) -> bool:
        """Whether it is one of Fish's own, which bring their codec along; quantised ones borrow it."""
        return self.repository in SHORT_NAMES.values()


def resolve_model(
    name: str,
    *,
    codec: Path | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    encoder: bool = True,
    quantize: ChooseModes | None = None,
) -> Checkpoint:
    """Load the model of that name; `codec` puts another codec in the place of its own. Raises ModelNotFound.

    `quantize` decides what becomes of its weights.
    """
    if name.startswith(PREFIX):
        checkpoint = random_checkpoint(name.removeprefix(PREFIX), dtype=dtype, device=device, encoder=encoder)
        if codec is not None:
            checkpoint = replace(checkpoint, codec=load_codec(codec, device=device, encoder=encoder))
        if quantize is not None:
            modes = quantize(checkpoint.model, checkpoint.codec)
            fit_model(checkpoint.model, modes)
            fit_codec(checkpoint.codec, modes.codec)
    else:
        directory = find_directory(name)
        checkpoint = load_checkpoint(
            directory, codec=codec, dtype=dtype, device=device, encoder=encoder, quantize=quantize
        )
        checkpoint = replace(checkpoint, name=name)
    _require_same_codebooks(checkpoint)
    return checkpoint


def find_directory(name: str, *, cache: Path | None = None) -> Path:
    """The directory that holds the model of that name; `cache` is another Hugging Face cache folder than the usual."""
    if name == BUNDLED:
        return _bundled()
    directory = Path(name).expanduser()
    if name and directory.is_dir():
        return directory
    if directory.is_file():
        raise ModelNotFound(f"{name} is a file; give the directory that holds it and its config.json")
    source = Source.parse(name)
    if source is None:
        raise ModelNotFound(f"{name}: no such directory, and no known name. {_what_to_type()}")
    return _cached(name, source, cache)


def cached_snapshot(source: Source, cache: Path | None = None) -> Path | None:
    """The folder of the Hugging Face cache with this repository in it, complete or not."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.repository, "config.json", cache_dir=cache, revision=source.revision)
    return Path(found).parent if isinstance(found, str) else None


def missing_files(directory: Path, *, codec: bool) -> list[str]:
    """What a directory lacks to be a model, in words; downloads that broke off lack something."""
    lacking = [] if (directory / "config.json").is_file() else ["config.json"]
    lacking += _missing_tokenizer(directory) + _missing_weights(directory)
    if codec and not any((directory / name).is_file() for name in CODEC_FILES):
        lacking.append(" or ".join(CODEC_FILES))
    return lacking


def _missing_tokenizer(directory: Path) -> list[str]:
    for name, companions in TOKENIZER_FILES.items():
        if (directory / name).is_file():
            return [other for other in companions if not (directory / other).is_file()]
    return [" or ".join(TOKENIZER_FILES)]


def _missing_weights(directory: Path) -> list[str]:
    present = [name for name in MODEL_FILES if (directory / name).is_file()]
    if not present:
        return [" or ".join(MODEL_FILES)]
    if not present[0].endswith(".index.json"):
        return []
    where = read_json(directory / present[0]).get("weight_map", {})
    return sorted({str(shard) for shard in where.values() if not (directory / str(shard)).is_file()})


def _bundled() -> Path:
    if not missing_files(BUNDLED_FOLDER, codec=True):
        return BUNDLED_FOLDER
    raise ModelNotFound(
        f"{BUNDLED} is not part of this build. Use `--model random:tiny` to try the pipeline, "
        "or fetch a Fish model: `shoal pull s1-mini`, then `--model s1-mini`"
    )


def _cached(name: str, source: Source, cache: Path | None) -> Path:
    directory = cached_snapshot(source, cache)
    if directory is None:
        raise ModelNotFound(f"{name} is not on this machine. Type: shoal pull {name}")
    lacking = missing_files(directory, codec=source.released)
    if lacking:
        raise ModelNotFound(
            f"the download of {name} is not complete, it lacks {', '.join(lacking)}. "
            f"To go on where it stopped, type: shoal pull {name}"
        )
    return directory


def _what_to_type() -> str:
    return (
        f"A model is a directory, {BUNDLED}, {', '.join(SHORT_NAMES)} or a repository OWNER/NAME "
        f"(after `shoal pull s1-mini`), or random weights ({PREFIX}tiny)"
    )


def _require_same_codebooks(checkpoint: Checkpoint) -> None:
    spoken, heard = checkpoint.model.config.num_codebooks, checkpoint.codec.config.num_codebooks
    if spoken != heard:
        raise CheckpointError(
            f"{checkpoint.name} makes frames of {spoken} codebooks and the codec takes {heard}: "
            "they do not belong together"
        )
