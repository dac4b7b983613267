"""Decode-side weights of a codec as numpy arrays, for backends without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from shoal.codec.config import CodecConfig


@dataclass(frozen=True, slots=True)
class CodecArrays:
    """Float weights under the names of the modules, weight norm folded."""

    config: CodecConfig
    weights: Mapping[str, NDArray[Any]]
