"""Metrics of a document with their individual measurements, for the comparison of two runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from shoal.tools.bench.document import Document

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `values` are its measurements in the order they were made."""

    run: str
    where: str
    name: str
    unit: str
    better: Better
    values: list[float]
    value: float  # the figure shown
    tolerance: float = 0.05  # relative change that is ignored
    min_difference: float = 0.0  # absolute change below which it is ignored, in the unit of the metric

    @property
    def key(self) -> tuple[str, str, str]:
        return self.run, self.where, self.name


def metrics(document: Document) -> Iterator[Metric]:
    for run in document["runs"]:
        yield from _OF[document["kind"]](run)


def _bench(run: dict[str, Any]) -> Iterator[Metric]:
    name = run["name"]
    for batch in run["batches"]:
        where = f"{batch['voices']} concurrent"
        good = [request for request in batch["requests"] if request["error"] is None]
        for key, title in (("seconds", "latency"), ("first_audio", "time to first audio")):
            figure = batch["latency" if key == "seconds" else key]
            if figure is not None:
                # Requests without audio store 0 as their time to first audio.
                values = [request[key] for request in good if request[key]]
                yield Metric(name, where, title, "s", "lower", values, figure["p50"])
        sound = [each for each in batch["rounds"] if each["audio_seconds"]]
        pace = [each["audio_seconds"] / each["seconds"] for each in sound]
        yield Metric(name, where, "throughput", "s/s", "higher", pace, batch["audio_per_second"])
        if batch["cpu_per_audio_second"] is not None:
            work = [each["cpu_seconds"] / each["audio_seconds"] for each in sound]
            yield Metric(name, where, "CPU per audio second", "s", "lower", work, batch["cpu_per_audio_second"])
        yield Metric(name, where, "errors", "", "lower", [batch["errors"]], batch["errors"], 0.0)
    if "memory" in run:
        memory = run["memory"]
        yield Metric(name, "", f"peak {memory['kind']}", "B", "lower", [memory["peak"]], memory["peak"])
    for temperature, start in run.get("startup", {}).items():
        if start is not None:
            # Measured once and dependent on the disk cache: only a factor of 2 and more than a second counts.
            seconds = start["load"] + start["warm_up"]
            yield Metric(name, f"{temperature} start", "until ready", "s", "lower", [seconds], seconds, 1.0, 1.0)


def _engine(run: dict[str, Any]) -> Iterator[Metric]:
    name = run["name"]
    for row in run["throughput"]:
        where = f"{row['voices']} concurrent, {row['policy']}"
        # Every tenth of a run contains the same steps, so tenths can be compared pairwise.
        pace = [row["audio_seconds"] / len(row["parts"]) / seconds for seconds in row["parts"]]
        yield Metric(name, where, "throughput", "s/s", "higher", pace, row["audio_per_second"])
        yield Metric(name, where, "time to first audio", "s", "lower", row["waits"], row["first_audio"]["p50"])
    if "first_audio" in run:
        for key, where in (("known", "voice cached"), ("unknown", "voice not cached")):
            figures = run["first_audio"][key]
            yield Metric(name, where, "time to first audio", "s", "lower", figures["waits"], figures["seconds"])
    if "scheduler" in run:
        figures = run["scheduler"]
        pace = [figures["sequence_steps"] / len(figures["parts"]) / seconds for seconds in figures["parts"]]
        rate = figures["sequence_steps_per_second"]
        yield Metric(name, f"{figures['voices']} sequences", "scheduler steps", "1/s", "higher", pace, rate, 0.1)


def _load(run: dict[str, Any]) -> Iterator[Metric]:
    name = run["name"]
    for stage in run["stages"]:
        where, answered = stage["name"], [each for each in stage["outcomes"] if each["error"] is None]
        good = [each for each in answered if each["first_audio"] is not None]
        for key, title in (("seconds", "latency"), ("first_audio", "time to first audio")):
            figure = stage["latency" if key == "seconds" else key]
            if figure is not None:
                yield Metric(name, where, title, "s", "lower", [each[key] for each in good], figure["p50"])
        failed = len(stage["outcomes"]) - len(answered)
        share = failed / max(1, len(stage["outcomes"]))
        yield Metric(name, where, "errors", "", "lower", [share], share, 0.01)
        yield Metric(name, where, "goodput", "1/s", "higher", [stage["goodput"]], stage["goodput"], 0.1)
    if run["highest_rate"] is not None:
        rate = run["highest_rate"]
        yield Metric(name, "", "highest rate", "1/s", "higher", [rate], rate, 0.15)


def _quality(run: dict[str, Any]) -> Iterator[Metric]:
    limits: tuple[tuple[str, str, Better], ...] = (("wer", "WER", "lower"), ("mos", "MOS", "higher"))
    for key, title, better in limits:
        value = run["metrics"].get(key)
        if value is not None:
            yield Metric(run["name"], "", title, "%" if key == "wer" else "", better, [value], value)


def _scaling(run: dict[str, Any]) -> Iterator[Metric]:
    for point in run["points"]:
        where = f"{point['size']:g} {run['unit']}"
        yield Metric(run["name"], where, run["measure"], "s", "lower", point["seconds"], point["median"])


def _profile(run: dict[str, Any]) -> Iterator[Metric]:
    where = f"batch size {run['voices']}"
    for part in run["parts"]:
        seconds = part["seconds"]
        yield Metric(run["name"], where, f"{part['name']} per {part['per']}", "s", "lower", [seconds], seconds, 0.1)


_OF = {
    "bench": _bench,
    "engine": _engine,
    "load": _load,
    "profile": _profile,
    "quality": _quality,
    "scaling": _scaling,
}
