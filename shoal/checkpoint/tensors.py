"""Read tensors from disk, memory-mapped. Pickles are read with `weights_only`, so they cannot run code."""

import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.checkpoint.format.layout import is_file, read_weight_map
from shoal.errors import CheckpointError, UnsafeCheckpoint, counted

Transform = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of one file as views of its mapping; pages are read on use. Raises CheckpointError."""
    if not is_file(path):
        raise CheckpointError(f"{path}: no such file")
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)


def read_shards(index: Path) -> dict[str, Tensor]:
    """Return all tensors named by an index file, from the shards beside it. Raises CheckpointError."""
    where = read_weight_map(index)
    found: dict[str, Tensor] = {}
    for shard in sorted(set(where.values())):
        found |= read_tensors(index.parent / shard)
    missing = sorted(set(where) - set(found))
    if missing:
        raise CheckpointError(
            f"{index}: {counted(len(missing), 'tensor is', 'tensors are')} in no shard: {shorten(missing)}"
        )
    return found


def read_transformed(read: Callable[[], dict[str, Tensor]], transform: Transform) -> dict[str, Tensor]:
    """Return `transform(read())`, where `transform` copies some tensors and passes the others on unchanged.

    Pages read through a mapping stay resident while the mapping lives. The copies are therefore kept, the first mapping
    is released, and the tensors passed on come from a second mapping, whose pages have not been read.
    """
    stored = read()
    names = {id(tensor): name for name, tensor in stored.items()}
    changed = transform(stored)
    origins = {name: names[id(tensor)] for name, tensor in changed.items() if id(tensor) in names}
    copies = {name: tensor for name, tensor in changed.items() if name not in origins}
    del stored, changed
    unread = read()
    return copies | {name: unread[origin] for name, origin in origins.items()}


def shorten(names: list[str], limit: int = 5) -> str:
    """Join the first names and count the others, for error messages."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(f"{path}: truncated, or not a safetensors file: {problem}") from problem


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        stored = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    except pickle.UnpicklingError as problem:
        raise _explain_refusal(path, problem) from problem
    except Exception as problem:  # edge to the unpickler: a damaged pickle can raise almost anything
        raise CheckpointError(f"{path}: truncated, or not a PyTorch file: {_first_line(problem)}") from problem
    if isinstance(stored, dict) and isinstance(stored.get("state_dict"), dict):
        stored = stored["state_dict"]
    if not isinstance(stored, dict) or not all(_is_named_tensor(*entry) for entry in stored.items()):
        raise CheckpointError(f"{path}: expected a dictionary of tensors")
    return stored


def _is_named_tensor(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor)


def _explain_refusal(path: Path, problem: pickle.UnpicklingError) -> CheckpointError:
    """Distinguish a pickle that would run code (torch names the refused global) from a damaged file."""
    if "GLOBAL" in str(problem) or "REDUCE" in str(problem) or "Unsupported class" in str(problem):
        return UnsafeCheckpoint(
            f"{path}: this pickle would run code and was not loaded; "
            "get the weights as safetensors or from a trusted source"
        )
    return CheckpointError(f"{path}: truncated, or not a PyTorch file: {_first_line(problem)}")


def _first_line(problem: Exception) -> str:
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__
