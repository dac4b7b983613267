"""Report of an evaluation as JSON and as Markdown tables."""

import json
from dataclasses import asdict, dataclass

from rich.table import Table

from training.evaluate.gates import GateResult
from training.evaluate.metrics import Summary
from training.evaluate.pairs import Comparison
from training.evaluate.scores import Score

SCHEMA = "shoal.quality/1"


@dataclass(frozen=True, slots=True)
class Report:
    judges: str
    reference: str
    complete: bool
    systems: list[Summary]
    comparisons: list[Comparison]
    gates: list[GateResult]
    clips: list[Score]

    def as_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self), "clips": [_row(score) for score in self.clips]}, indent=1)


def _row(score: Score) -> dict[str, object]:
    clip, verdict = score.clip, score.verdict
    return {
        "path": clip.path.name,
        "system": clip.system,
        "voice": clip.voice,
        "text": clip.text,
        "heard": verdict.heard,
        "word_errors": score.words.edits,
        "words": score.words.length,
        "character_errors": score.characters.edits,
        "characters": score.characters.length,
        "mos": verdict.mos,
        "similarity": score.similarity,
        "nearest": score.nearest,
        "seconds": verdict.seconds,
        "expected_seconds": score.expected_seconds,
        "faults": score.faults,
    }


SHOWN = {
    "wer": ("WER %", ".1f"),
    "cer": ("CER %", ".1f"),
    "mos": ("MOS", ".2f"),
    "similarity": ("voice sim.", ".3f"),
    "nearest": ("nearest %", ".0f"),
    "seconds": ("seconds", ".2f"),
    "length": ("length x", ".2f"),
}


@dataclass(frozen=True, slots=True)
class Sheet:
    """Table of a report: title, columns and rows."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return f"## {self.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

    def rich(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for n, column in enumerate(self.columns):
            table.add_column(column, justify="left" if n < 2 else "right")
        for row in self.rows:
            table.add_row(*row, style="bold" if row[1] == "all" else None)
        return table


def sheets(report: Report) -> list[Sheet]:
    found = [_systems_sheet(report)]
    if report.comparisons:
        found.append(_comparisons_sheet(report))
    if report.gates:
        rows = [
            [
                result.gate,
                "passed" if result.passed else "MISSED",
                _number(result.value, ".3f"),
                _number(result.limit, ".3f"),
            ]
            for result in report.gates
        ]
        found.append(Sheet("Gates", ["gate", "result", "value", "limit"], rows))
    return found


def _systems_sheet(report: Report) -> Sheet:
    rows = []
    for summary in report.systems:
        faults = ", ".join(f"{count} {fault}" for fault, count in summary.faults.items()) or "none"
        values = [_number(summary.metrics[metric], form) for metric, (_, form) in SHOWN.items()]
        rows.append([summary.system, summary.voice, str(summary.clips), *values, faults])
    title = f"Quality, reference {report.reference}" + ("" if report.complete else " (interrupted: part of the clips)")
    return Sheet(title, ["system", "voice", "clips", *(name for name, _ in SHOWN.values()), "faults"], rows)


def _comparisons_sheet(report: Report) -> Sheet:
    rows = []
    for c in report.comparisons:
        name, form = SHOWN[c.metric]
        interval = "-" if c.low is None or c.high is None else f"{c.low:+{form}} to {c.high:+{form}}"
        values = [f"{c.before_value:{form}}", f"{c.after_value:{form}}", f"{c.difference:+{form}}", interval]
        rows.append([f"{c.before} -> {c.after}", name, str(c.sentences), *values])
    return Sheet("Pairs", ["systems", "metric", "sentences", "before", "after", "difference", "95 % interval"], rows)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"
