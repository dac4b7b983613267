"""Weights of a DualAR as numpy arrays, for backends without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from shoal.model.config import DualARConfig


@dataclass(frozen=True, slots=True)
class ModelArrays:
    """Float or int8 weights under the names of the modules; int8 ones have scales [out], W8A8 ones `NAME.w8a8` as well.

    `head.weight` holds the output rows of the ids that may be sampled: the semantic tokens, then the stop token.
    """

    config: DualARConfig
    weights: Mapping[str, NDArray[Any]]

    @property
    def int8_activations(self) -> bool:
        """Return whether a layer quantizes its activations."""
        return any(name.endswith(".w8a8") for name in self.weights)
