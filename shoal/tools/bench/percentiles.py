"""Summary statistics of repeated measurements."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Statistics of a sample; percentiles are linearly interpolated. The field names are those of the documents."""

    count: int
    mean: float
    std: float  # sample standard deviation (n - 1); 0 for a single value
    min: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles | None":
        """Return the statistics of `values`; None if there are none."""
        found = np.asarray(list(values), np.float64)
        if not found.size:
            return None
        p50, p95, p99 = np.percentile(found, (50, 95, 99))
        return cls(
            count=found.size,
            mean=float(found.mean()),
            std=float(found.std(ddof=1)) if found.size > 1 else 0.0,
            min=float(found.min()),
            p50=float(p50),
            p95=float(p95),
            p99=float(p99),
            max=float(found.max()),
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(values: Iterable[float]) -> dict[str, Any] | None:
    """Return the statistics of `values` as they are stored in a document; None if there are no values."""
    found = Percentiles.of(values)
    return None if found is None else found.as_json()
