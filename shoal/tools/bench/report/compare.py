"""Comparison of two runs of the same benchmark: which metrics changed by more than noise.

Measurements of the same texts in the same order are compared pairwise. The interval of the ratio comes from a block
bootstrap, since disturbances last longer than one request. A change counts when the whole interval lies beyond the
tolerance. A Bonferroni correction keeps the probability of any false change in a comparison below 5 %.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.tools.bench.document import Document
from shoal.tools.bench.report.metrics import Metric, metrics

Verdict = Literal["better", "worse", "unsure", "no change"]

# Maximum share of the cores used by other processes for times to be trusted; 15 % of two cores moved a median by 20 %.
BUSY = 0.1
BLOCKS = 10
DRAWS = 2000
MISSES = 0.05  # probability that a comparison reports a change where there is none


@dataclass(frozen=True, slots=True)
class Change:
    """One metric in both runs."""

    run: str
    where: str
    metric: str
    unit: str
    before: float
    after: float
    ratio: float | None  # after / before; None if before is 0
    low: float | None  # interval of the ratio; None if there are too few measurements
    high: float | None
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """All metrics of two runs."""

    changes: list[Change]
    only_before: list[str]  # metrics that only one of the runs has
    only_after: list[str]
    remarks: list[str]  # other differences between the runs that may explain a change

    @property
    def changed(self) -> list[Change]:
        return [change for change in self.changes if change.verdict != "no change"]

    @property
    def in_short(self) -> str:
        if not self.changed:
            return f"no change beyond noise in {len(self.changes)} metrics"
        counts = Counter(change.verdict for change in self.changes)
        unsure = f", {counts['unsure']} unsure" if counts["unsure"] else ""
        return f"{counts['worse']} worse, {counts['better']} better{unsure}, {counts['no change']} unchanged"

    @property
    def better(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "better"]

    @property
    def worse(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "worse"]


def compare(before: Document, after: Document) -> RunComparison:
    """Compare two documents of the same kind."""
    if len(before["runs"]) == len(after["runs"]) == 1:
        # Single runs are compared even if their names differ, for example by the port of the server.
        after = {**after, "runs": [{**after["runs"][0], "name": before["runs"][0]["name"]}]}
    sure = not (_disturbed(before) or _disturbed(after))
    old = {metric.key: metric for metric in metrics(before)}
    new = {metric.key: metric for metric in metrics(after)}
    both = [key for key in old if key in new]
    return RunComparison(
        changes=[change(old[key], new[key], misses=MISSES / len(both), sure=sure) for key in both],
        only_before=[_title(key) for key in old if key not in new],
        only_after=[_title(key) for key in new if key not in old],
        remarks=_remarks(before, after),
    )


def pairs(documents: Sequence[Document]) -> list[RunComparison]:
    """Compare each document with the first one of its kind."""
    firsts: dict[str, Document] = {}
    found = []
    for document in documents:
        first = firsts.setdefault(document["kind"], document)
        if first is not document:
            found.append(compare(first, document))
    return found


def change(old: Metric, new: Metric, *, misses: float = MISSES, sure: bool = True) -> Change:
    """Compare one metric. `sure` is False if other processes loaded the machine: changed times are then unsure."""
    low, high = interval(old.values, new.values, misses)
    ratio = new.value / old.value if old.value else None
    verdict = _verdict(old, new, low, high)
    if not sure and verdict != "no change" and old.unit in ("s", "s/s"):
        verdict = "unsure"
    return Change(old.run, old.where, old.name, old.unit, old.value, new.value, ratio, low, high, verdict)


def interval(old: Sequence[float], new: Sequence[float], misses: float = MISSES) -> tuple[float | None, float | None]:
    """Return the interval of the ratio new / old with confidence 1 - misses; None if there are too few values."""
    before, after = np.asarray(old, np.float64), np.asarray(new, np.float64)
    if min(len(before), len(after)) < 3 or (before <= 0).any() or (after <= 0).any():
        return None, None
    rng = np.random.default_rng(0)
    if len(before) == len(after):
        medians = _bootstrap_medians(np.log(after / before), rng)
    else:
        medians = _bootstrap_medians(np.log(after), rng) - _bootstrap_medians(np.log(before), rng)
    low, high = np.exp(np.quantile(medians, (misses / 2, 1 - misses / 2)))
    return float(low), float(high)


def _bootstrap_medians(values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the medians of DRAWS resamples, each made of BLOCKS blocks of consecutive values."""
    length = -(-len(values) // BLOCKS)
    starts = rng.integers(0, len(values) - length + 1, (DRAWS, -(-len(values) // length), 1))
    medians: NDArray[np.float64] = np.median(values[(starts + np.arange(length)).reshape(DRAWS, -1)], axis=1)
    return medians


def _verdict(old: Metric, new: Metric, low: float | None, high: float | None) -> Verdict:
    upper, lower = 1 + old.tolerance, 1 / (1 + old.tolerance)
    if low is not None and high is not None:
        grown, shrunk = low > upper, high < lower
    else:
        grown, shrunk = new.value > old.value * upper, new.value < old.value * lower
    if not (grown or shrunk) or abs(new.value - old.value) < old.min_difference:
        return "no change"
    return "better" if grown == (old.better == "higher") else "worse"


def _disturbed(document: Document) -> bool:
    return (document["machine"].get("others_cpu") or 0.0) > BUSY


def _title(key: tuple[str, str, str]) -> str:
    return ", ".join(part for part in key if part)


def _remarks(before: Document, after: Document) -> list[str]:
    found = [
        f"{name} was {before['machine'].get(name, 'unknown')}, is {after['machine'].get(name, 'unknown')}"
        for name in ("device", "cores", "threads", "torch", "python", "shoal")
        if before["machine"].get(name) != after["machine"].get(name)
    ]
    settings = sorted(before["settings"].keys() | after["settings"].keys())
    found += [
        f"{name} was {before['settings'].get(name)}, is {after['settings'].get(name)}"
        for name in settings
        if before["settings"].get(name) != after["settings"].get(name)
    ]
    for when, document in (("the first", before), ("the second", after)):
        if _disturbed(document):
            share = 100 * document["machine"]["others_cpu"]
            found.append(
                f"other processes used {share:.0f} % of the cores during {when} run: changes may be due to them"
            )
        if not document["complete"]:
            found.append(f"{when} run was interrupted")
    return found
