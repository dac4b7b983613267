"""Weights of a DualAR as numpy arrays, for backends without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from shoal.model.config import DualARConfig


@dataclass(frozen=True, slots=True)
class ModelArrays:
    """Float or int8 weights under the names of the modules; int8 ones have scales [out].

    `head.weight` holds the output rows of the ids that may be sampled: the semantic tokens, then the stop token.
    """

    config: DualARConfig
    weights: Mapping[str, NDArray[Any]]
