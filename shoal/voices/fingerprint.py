"""Fingerprint that identifies a codec: codes of another codec are noise."""

import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.codec.config import CodecConfig
from shoal.kernels.rope_values import round_to_bfloat16
from shoal.voices.voice import hash_parts

# Channels hashed per Snake activation: they distinguish codecs that were fine-tuned with the same codebooks.
CHANNELS = 16


def fingerprint(config: CodecConfig, names: Iterable[str], weight: Callable[[str], NDArray[Any]]) -> str:
    """Return 16 hexadecimal digits that are the same with and without the encoder, on every device.

    Hashes the configuration, the codebooks and part of the decoder, which define what codes mean. Only weights that are
    used as stored are hashed: folded ones may differ by a bit between machines.
    """
    digest = hashlib.sha256()
    hash_parts(digest, json.dumps(config.to_dict(), sort_keys=True).encode())
    for name in sorted(names):
        if name.endswith("codebook.weight"):
            hash_parts(digest, name.encode(), _rounded_bytes(weight(name)))
        elif name.startswith("decoder.") and name.endswith("alpha"):
            hash_parts(digest, name.encode(), _rounded_bytes(weight(name).reshape(-1)[:CHANNELS]))
    return digest.hexdigest()[:16]


def _rounded_bytes(values: NDArray[Any]) -> bytes:
    """Return the bytes in bfloat16, whatever dtype the codec runs in."""
    bits = round_to_bfloat16(values.astype(np.float32)).view(np.uint32)
    return (bits >> np.uint32(16)).astype(np.uint16).tobytes()
