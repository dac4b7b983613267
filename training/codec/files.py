"""Save and load trained codecs; reduce a codec to fewer codebooks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shoal.codec.config import CodecConfig
from shoal.codec.dac import Codec

PIECE_BYTES = 15 << 20


def save_codec(codec: Codec, folder: Path, dtype: torch.dtype = torch.float32, piece_bytes: int = PIECE_BYTES) -> None:
    """Write codec.json and the weights, in several files if they are large."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "codec.json").write_text(json.dumps(codec.config.to_dict(), indent=1) + "\n")
    pieces: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in codec.state_dict().items():
        stored = value.detach().to("cpu", dtype).contiguous()
        if size + stored.nbytes > piece_bytes:
            pieces.append({})
            size = 0
        pieces[-1][name] = stored
        size += stored.nbytes
    count = len(pieces)
    names = (
        [f"codec-{k + 1:05d}-of-{count:05d}.safetensors" for k in range(count)] if count > 1 else ["codec.safetensors"]
    )
    for old in folder.glob("codec*.safetensors"):
        if old.name not in names:
            old.unlink()
    for name, piece in zip(names, pieces, strict=True):
        save_whole(piece, folder / name)


def save_whole(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file atomically."""
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.replace(path)


def load_codec(folder: Path) -> Codec:
    """Load a codec that `save_codec` wrote, in fp32."""
    codec = Codec(CodecConfig.from_dict(json.loads((folder / "codec.json").read_text())))
    stored: dict[str, Tensor] = {}
    for piece in sorted(folder.glob("codec*.safetensors")):
        stored |= load_file(piece)
    codec.load_state_dict({name: value.float() for name, value in stored.items()})
    return codec


def keep_codebooks(codec: Codec, count: int) -> Codec:
    """Return the codec with only its first `count` codebooks."""
    smaller = Codec(replace(codec.config, n_codebooks=count - 1))
    wanted = smaller.state_dict().keys()
    smaller.load_state_dict({name: value for name, value in codec.state_dict().items() if name in wanted})
    return smaller
