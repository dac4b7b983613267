"""Voices, sample rate and codebooks of the bundled model, read from its files: a retrained nano may have others."""

import json
from math import prod
from typing import Any

from shoal.checkpoint.find import BUNDLED_DIRECTORY


def _document(name: str) -> Any:
    return json.loads((BUNDLED_DIRECTORY / name).read_text(encoding="utf-8"))


_codec = _document("codec.json")


VOICES = tuple(sorted(path.name for path in (BUNDLED_DIRECTORY / "voices").iterdir() if path.is_dir()))
TITLES: dict[str, str] = {name: _document(f"voices/{name}/description.json")["title"] for name in VOICES}
DEFAULT_VOICE: str = _document("shoal.json")["voice"]
# A voice that a request gets only by its name.
OTHER_VOICE = next(name for name in VOICES if name != DEFAULT_VOICE)
SAMPLE_RATE: int = _codec["sample_rate"]
CODEBOOKS: int = _document("config.json")["num_codebooks"]
# Samples per frame of codes.
FRAME_LENGTH = prod(_codec["decoder_rates"]) * prod(_codec["quantizer"]["downsample_factor"])
# Bytes of 16-bit PCM per second of audio.
PCM_BYTES_PER_SECOND = 2 * SAMPLE_RATE


def is_plausible(seconds: float, text: str) -> bool:
    """Return whether speech of that duration can be the whole text: no voice is far from 15 characters per second."""
    return 0.025 * len(text) < seconds < 2.0 + 0.3 * len(text)
