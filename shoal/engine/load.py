"""A model's name -> an engine that is ready to speak."""

from dataclasses import replace
from pathlib import Path

import torch

from shoal.checkpoint.load import Checkpoint
from shoal.checkpoint.random import PREFIX
from shoal.checkpoint.resolve import resolve_model
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.engine import Engine
from shoal.errors import InvalidRequest
from shoal.voices.cache import VoiceCache
from shoal.voices.encoder import CodecEncoder
from shoal.voices.store import VoiceStore, voice_directory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    model: str = "nano",
    *,
    device: str = "auto",
    dtype: str | None = None,
    codec: str | Path | None = None,
    voices: str | Path | None = None,
    config: EngineConfig | None = None,
    warm: bool = False,
) -> Engine:
    """Load a model by name or directory and put an engine around it. Close the engine, or use it in a `with`.

    Without `dtype` it is bfloat16 on a GPU and float32 on a CPU. `codec` names the codec of models that have none.
    `voices` is the directory of stored voices; those that come with the model are always there. With `warm` the first
    request finds everything done that is done only once, and stored voices are read in the background.
    """
    device = choose_device(device)
    checkpoint = resolve_model(
        model, codec=Path(codec) if codec else None, dtype=choose_dtype(dtype, device), device=device
    )
    config = config or EngineConfig()
    carried = config.carried_columns or checkpoint.profile.carried_columns
    # Random weights make noise; there is nothing to judge.
    guard = config.guard and not model.startswith(PREFIX)
    core = EngineCore(checkpoint, replace(config, carried_columns=carried, guard=guard))
    cache = voice_cache(checkpoint, Path(voices) if voices else voice_directory())
    if warm:
        core.warm_up()
        cache.warm()
    return Engine(core, cache)


def voice_cache(checkpoint: Checkpoint, directory: Path) -> VoiceCache:
    """The voices of a directory and those that come with the model, encoded by the model's codec when first used."""
    store = VoiceStore(directory, checkpoint.builtin_voices, sample_rate=checkpoint.codec.config.sample_rate)
    return VoiceCache(store, CodecEncoder(checkpoint.codec))


def choose_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = "unknown"
    if kind not in ("cpu", "cuda"):
        raise InvalidRequest(f"unknown device {device!r}: auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(f"{device}: this machine has no usable CUDA device; `shoal doctor` says why")
    return device


def choose_dtype(dtype: str | None, device: str) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device == "cpu" else torch.bfloat16
    if dtype not in DTYPES:
        raise InvalidRequest(f"unknown dtype {dtype!r}: {', '.join(DTYPES)}")
    return DTYPES[dtype]
