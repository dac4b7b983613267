"""Tensors on disk, memory-mapped. A pickle is only ever read as data."""

import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.checkpoint.layout import is_file, read_weight_map
from shoal.errors import CheckpointError, UnsafeCheckpoint

Transform = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one file. They are views of the mapped file: nothing is read until it is used."""
    if not is_file(path):
        raise CheckpointError(f"{path}: no such file")
    return _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)


def read_shards(index: Path) -> dict[str, Tensor]:
    """All tensors named by an index file, from the shards beside it."""
    where = read_weight_map(index)
    found: dict[str, Tensor] = {}
    for shard in sorted(set(where.values())):
        found |= read_tensors(index.parent / shard)
    lost = sorted(set(where) - set(found))
    if lost:
        raise CheckpointError(f"{index}: {len(lost)} tensors are in no shard: {shorten(lost)}")
    return found


def read_transformed(read: Callable[[], dict[str, Tensor]], change: Transform) -> dict[str, Tensor]:
    """The tensors that `read` maps, after `change`, which copies some and passes the others on as they are.

    What was copied has been read through the mapping, and those pages stay resident as long as it lives. So the
    copies are kept, the mapping is let go, and what was passed on comes from a second one that nobody has touched.
    """
    stored = read()
    names = {id(tensor): name for name, tensor in stored.items()}
    changed = change(stored)
    origins = {name: names[id(tensor)] for name, tensor in changed.items() if id(tensor) in names}
    copies = {name: tensor for name, tensor in changed.items() if name not in origins}
    del stored, changed
    again = read()
    return copies | {name: again[origin] for name, origin in origins.items()}


def shorten(names: list[str], most: int = 5) -> str:
    """A few names and a count, for error messages."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


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
    except Exception as problem:  # what the unpickler trips over in a broken file has no common type
        raise CheckpointError(f"{path}: truncated, or not a PyTorch file: {_first_line(problem)}") from problem
    if isinstance(stored, dict) and isinstance(stored.get("state_dict"), dict):
        stored = stored["state_dict"]
    if not isinstance(stored, dict) or not all(_is_named_tensor(*entry) for entry in stored.items()):
        raise CheckpointError(f"{path}: expected a dictionary of tensors")
    return stored


def _is_named_tensor(name: object, value: object) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor)


def _explain_refusal(path: Path, problem: pickle.UnpicklingError) -> CheckpointError:
    """torch names the global it would not import; anything else is just a broken file."""
    if "GLOBAL" in str(problem) or "REDUCE" in str(problem) or "Unsupported class" in str(problem):
        return UnsafeCheckpoint(
            f"{path}: this pickle wants to run code when it is loaded, so it was not loaded. "
            "Get the weights as safetensors, or from a source you can check."
        )
    return CheckpointError(f"{path}: truncated, or not a PyTorch file: {_first_line(problem)}")


def _first_line(problem: Exception) -> str:
    return str(problem).splitlines()[0] if str(problem) else type(problem).__name__
