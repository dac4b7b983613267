"""Two runs of the same benchmark: what changed by more than its noise.

Measurements of the same texts in the same order are compared one by one, so that a long text is held against itself.
They are drawn again in blocks of neighbours (bootstrap): what disturbs a machine lasts longer than one request. A
change counts when the whole interval of the ratio lies beyond the tolerance. The intervals are wide enough to hold all
together in 95 of 100 comparisons: of twenty figures that did not change, one would lie outside its own 95 %.
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

# Share of the cores that others may use before times mean little: 15 % of two moved a median by a fifth.
BUSY = 0.1
BLOCKS = 10
DRAWS = 2000
MISSES = 0.05  # of comparisons may call something a change that is none


@dataclass(frozen=True, slots=True)
class Change:
    run: str
    where: str
    metric: str
    unit: str
    before: float
    after: float
    ratio: float | None  # of after to before; None if there is nothing to divide by
    low: float | None  # its interval; None for what was measured once
    high: float | None
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RunComparison:
    changes: list[Change]
    only_before: list[str]  # what only one of the runs has
    only_after: list[str]
    remarks: list[str]  # why they may differ for another reason

    @property
    def changed(self) -> list[Change]:
        return [change for change in self.changes if change.verdict != "no change"]

    @property
    def in_short(self) -> str:
        if not self.changed:
            return f"no change beyond noise in {len(self.changes)} figures"
        told = Counter(change.verdict for change in self.changes)
        unsure = f", {told['unsure']} unsure" if told["unsure"] else ""
        return f"{told['worse']} worse, {told['better']} better{unsure}, {told['no change']} unchanged"

    @property
    def better(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "better"]

    @property
    def worse(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "worse"]


def compare(before: Document, after: Document) -> RunComparison:
    """Of two documents of the same kind."""
    if len(before["runs"]) == len(after["runs"]) == 1:
        # Another port or another name for the only thing that was measured is no other thing.
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
    """Each document against the first of its kind."""
    firsts: dict[str, Document] = {}
    found = []
    for document in documents:
        first = firsts.setdefault(document["kind"], document)
        if first is not document:
            found.append(compare(first, document))
    return found


def change(old: Metric, new: Metric, *, misses: float = MISSES, sure: bool = True) -> Change:
    """`sure` if nobody else used the machine: a time that changed there may be theirs."""
    low, high = interval(old.values, new.values, misses)
    ratio = new.value / old.value if old.value else None
    verdict = _verdict(old, new, low, high)
    if not sure and verdict != "no change" and old.unit in ("s", "s/s"):
        verdict = "unsure"
    return Change(old.run, old.where, old.name, old.unit, old.value, new.value, ratio, low, high, verdict)


def interval(old: Sequence[float], new: Sequence[float], misses: float = MISSES) -> tuple[float | None, float | None]:
    """Where the ratio of new to old lies but for `misses`; None where there are not enough measurements to tell."""
    before, after = np.asarray(old, np.float64), np.asarray(new, np.float64)
    if min(len(before), len(after)) < 3 or (before <= 0).any() or (after <= 0).any():
        return None, None
    dice = np.random.default_rng(0)
    if len(before) == len(after):
        drawn = _drawn_medians(np.log(after / before), dice)
    else:
        drawn = _drawn_medians(np.log(after), dice) - _drawn_medians(np.log(before), dice)
    low, high = np.exp(np.quantile(drawn, (misses / 2, 1 - misses / 2)))
    return float(low), float(high)


def _drawn_medians(values: NDArray[np.float64], dice: np.random.Generator) -> NDArray[np.float64]:
    """Medians of DRAWS samples, each made of BLOCKS stretches of neighbours."""
    length = -(-len(values) // BLOCKS)
    begins = dice.integers(0, len(values) - length + 1, (DRAWS, -(-len(values) // length), 1))
    picked: NDArray[np.float64] = np.median(values[(begins + np.arange(length)).reshape(DRAWS, -1)], axis=1)
    return picked


def _verdict(old: Metric, new: Metric, low: float | None, high: float | None) -> Verdict:
    most, least = 1 + old.tolerance, 1 / (1 + old.tolerance)
    if low is not None and high is not None:
        grown, shrunk = low > most, high < least
    else:
        grown, shrunk = new.value > old.value * most, new.value < old.value * least
    if not (grown or shrunk) or abs(new.value - old.value) < old.least:
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
    for when, document in (("the earlier", before), ("the later", after)):
        if _disturbed(document):
            share = 100 * document["machine"]["others_cpu"]
            found.append(
                f"others used {share:.0f} % of the cores during {when} run: what seems to have changed may be theirs"
            )
        if not document["complete"]:
            found.append(f"{when} run was interrupted")
    return found
