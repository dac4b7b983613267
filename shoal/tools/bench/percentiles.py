"""Many measurements of one thing, in the figures people ask for."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of values that were measured; percentiles lie between neighbours where they fall between them."""

    count: int
    mean: float
    std: float  # of the values themselves, n - 1; 0 for a single one
    least: float
    p50: float
    p95: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles | None":
        """None if nothing was measured."""
        found = np.asarray(list(values), np.float64)
        if not found.size:
            return None
        p50, p95, p99 = np.percentile(found, (50, 95, 99))
        return cls(
            count=found.size,
            mean=float(found.mean()),
            std=float(found.std(ddof=1)) if found.size > 1 else 0.0,
            least=float(found.min()),
            p50=float(p50),
            p95=float(p95),
            p99=float(p99),
            most=float(found.max()),
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(values: Iterable[float]) -> dict[str, Any] | None:
    """The same as it stands in a document."""
    found = Percentiles.of(values)
    return None if found is None else found.as_json()
