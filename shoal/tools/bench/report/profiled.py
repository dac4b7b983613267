"""Charts of `shoal profile`: a bar per step and per request, and the step by batch size."""

from collections.abc import Iterator
from typing import Any

from shoal.tools.bench.document import Document
from shoal.tools.bench.report.plots import AxesSpec, BarGroup, Chart, LegendEntry, LineSeries, StackedBar, bars, lines
from shoal.tools.bench.report.tables import duration, of_request, percent

Run = dict[str, Any]
Part = dict[str, Any]

# The style of the page has eight colours for series; the profile has at most eight parts.
COLOURS = ("s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8")


def profile_charts(document: Document) -> Iterator[Chart]:
    for run in document["runs"]:
        yield _bars(run)
        if len(run["steps"]) > 1:
            yield _steps(run)


def _bars(run: Run) -> Chart:
    kinds = {part["name"]: kind for part, kind in zip(run["parts"], COLOURS, strict=False)}
    steps = [part for part in run["parts"] if part["per"] == "step"]
    beside = [part for part in steps if run["overlap"] and part["name"] == "codec"]
    step_bars = [_bar([part for part in steps if part not in beside], kinds, lambda part: float(part["seconds"]))]
    step_bars += [_bar(beside, kinds, lambda part: float(part["seconds"]))] if beside else []
    request = _bar(run["parts"], kinds, lambda part: of_request(part, run))
    groups = [BarGroup("one step", step_bars), BarGroup("one request", [request])]
    together = "; the codec runs beside the model" if beside else ""
    caption = f"Batch size {run['voices']}{together}. A request has {run['frames']} frames and its share of every step."
    legend = [LegendEntry(kind, name) for name, kind in kinds.items()]
    return Chart("Where the time goes", caption, bars("Time of a step and of a request", groups, duration), legend)


def _bar(parts: list[Part], kinds: dict[str, str], seconds: Any) -> StackedBar:
    segments = [(kinds[part["name"]], seconds(part), f"{part['name']}: {duration(seconds(part))}") for part in parts]
    return StackedBar(segments, duration(sum(value for _, value, _ in segments)))


def _steps(run: Run) -> Chart:
    series = [LineSeries("step", "s1", [(row["voices"], row["seconds"]) for row in run["steps"]])]
    axes = AxesSpec("batch size", "step", lambda v: f"{v:g}", duration, x_log=True)
    caption = "Time of a step of the model, without the codec, against the number of sequences."
    return Chart("Step by batch size", caption, lines("Step by batch size", series, axes))


def profile_tiles(document: Document) -> Iterator[tuple[str, str, str]]:
    for run in document["runs"]:
        parts = {part["name"]: part for part in run["parts"]}
        total = sum(of_request(part, run) for part in run["parts"])
        yield "Backend", run["backend"], f"batch size {run['voices']}"
        for name in run["bottlenecks"]:
            share = percent(of_request(parts[name], run) / total)
            yield name.capitalize(), duration(parts[name]["seconds"]), f"per {parts[name]['per']}, {share} of a request"
