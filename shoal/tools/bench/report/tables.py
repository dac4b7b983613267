"""Tables of a document, for the terminal, Markdown and the HTML page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from shoal.tools.bench.document import Document
from shoal.tools.bench.report.compare import Change, RunComparison

NONE = "–"
SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@dataclass(frozen=True, slots=True)
class ReportTable:
    title: str
    columns: list[str]
    rows: list[list[str]]
    words: int = 1  # number of text columns; the others are numbers and right-aligned

    def markdown(self) -> str:
        lines = [self.columns, ["---" if at < self.words else "---:" for at in range(len(self.columns))], *self.rows]
        cells = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"### {self.title}\n\n" + "\n".join(cells) + "\n"

    def rich(self) -> Table:
        table = Table(box=SIMPLE_HEAD, title=escape(self.title), title_justify="left", padding=(0, 1, 0, 0))
        for at, column in enumerate(self.columns):
            table.add_column(escape(column), justify="left" if at < self.words else "right")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table


def tables(document: Document) -> list[ReportTable]:
    found = _OF[document["kind"]](document)
    return [sheet for sheet in found if sheet.rows]


def changes_table(comparison: RunComparison, *, all: bool = True) -> ReportTable:
    shown = comparison.changes if all else comparison.changed
    return ReportTable(
        "Changes",
        ["run", "where", "metric", "verdict", "before", "after", "change", "interval"],
        [_change_row(change) for change in shown],
        words=4,
    )


def duration(seconds: float | None) -> str:
    """Format seconds with a readable unit: µs, ms or s."""
    if seconds is None:
        return NONE
    if seconds >= 1 or seconds == 0:
        return f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1000:.3g} ms" if seconds >= 0.001 else f"{seconds * 1e6:,.0f} µs"


def duration_in_unit_of(seconds: float, highest: float) -> str:
    """Format a tick of an axis that ends at `highest`: all ticks have the same unit."""
    unit, scale = ("s", 1.0) if highest >= 1 else ("ms", 1e3) if highest >= 0.001 else ("µs", 1e6)
    return f"{seconds * scale:g} {unit}"


def size_in_unit_of(count: float, highest: float) -> str:
    """Format a tick of an axis of bytes that ends at `highest`."""
    unit, scale = next((each for each in SIZES if highest >= each[1]), ("B", 1.0))
    return f"{count / scale:g} {unit}"


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.1%}".replace("%", " %")


def size(count: float | None) -> str:
    if count is None:
        return NONE
    for unit, scale in SIZES:
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def with_unit(value: float, unit: str) -> str:
    if unit == "s":
        return duration(value)
    return size(value) if unit == "B" else f"{value:,.3g}{' ' if unit else ''}{unit}"


def _bench(document: Document) -> list[ReportTable]:
    runs = document["runs"]
    missing = [[run["name"], run["reason"]] for run in runs if run["reason"]]
    return [
        _by_configuration(runs),
        _speeds(runs, document["settings"].get("currency") or ""),
        _latencies(runs),
        _starts(runs),
        _edges(runs),
        ReportTable("Not available", ["configuration", "reason"], missing, words=2),
    ]


def _batches(runs: list[dict[str, Any]]) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield every batch of every run with the first cells of its row."""
    for run in runs:
        for batch in run["batches"]:
            yield [run["name"], str(batch["voices"])], batch


def _speeds(runs: list[dict[str, Any]], currency: str) -> ReportTable:
    rates = ["RTF", "frames/s", "audio-s/s", "audio h/h", "requests/s", "CPU-s / audio-s", f"{currency} / audio h"]
    rows = [[*head, *_speed(batch)] for head, batch in _batches(runs)]
    return ReportTable("Speed", ["configuration", "batch", *rates, "errors"], rows)


def _latencies(runs: list[dict[str, Any]]) -> ReportTable:
    keys = ("mean", "std", "p50", "p95", "p99", "max")
    rows = [
        [*head, title, *_percentiles(batch[key], keys)]
        for head, batch in _batches(runs)
        for key, title in (("first_audio", "TTFA"), ("latency", "request latency"))
    ]
    columns = ["configuration", "batch", "metric", "mean", "std", "P50", "P95", "P99", "max"]
    return ReportTable("Latency", columns, rows, words=3)


def _starts(runs: list[dict[str, Any]]) -> ReportTable:
    measured = [run for run in runs if "memory" in run]
    memory = measured[0]["memory"]["kind"] if measured else "memory"
    columns = ["configuration", "dtype", "weights", "backend", "cold start", "warm start"]
    columns += [f"{memory} before", "loaded", "peak"]
    return ReportTable("Start-up and memory", columns, [[run["name"], *_start(run)] for run in measured], words=4)


def _edges(runs: list[dict[str, Any]]) -> ReportTable:
    rows = [[run["name"], edge["name"], *_edge(edge)] for run in runs for edge in run["edges"]]
    return ReportTable(
        "Edge cases", ["configuration", "text", "characters", "audio", "TTFA", "time", "RTF"], rows, words=2
    )


def _by_configuration(runs: list[dict[str, Any]]) -> ReportTable:
    """Return memory by part and speed at every batch size, one row per configuration."""
    sizes = sorted({batch["voices"] for run in runs for batch in run["batches"]})
    memory = ["model", "codec", "KV cache", "rest", "peak"]
    columns = ["configuration", *memory, "RTF", "TTFA P50", *(f"frames/s at {count}" for count in sizes)]
    return ReportTable("By configuration", columns, [_summary(run, sizes) for run in runs if run["batches"]])


def _summary(run: dict[str, Any], sizes: list[int]) -> list[str]:
    memory, batches = run.get("memory", {}), {batch["voices"]: batch for batch in run["batches"]}
    parts = [memory.get(key) for key in ("model", "codec", "kv")]
    # Resident memory includes Python, and pages of the KV cache that were never touched are not in it.
    known = memory.get("kind") == "VRAM" and None not in parts
    rest = memory["peak"] - sum(filter(None, parts)) if known else None
    first = run["batches"][0]
    speeds = (number(batches[count]["frames_per_second"], 0) if count in batches else NONE for count in sizes)
    wait = first["first_audio"]
    figures = [number(first["rtf"], 4), duration(wait and wait["p50"])]
    return [run["name"], *map(size, (*parts, rest, memory.get("peak"))), *figures, *speeds]


def _speed(batch: dict[str, Any]) -> list[str]:
    return [
        number(batch["rtf"], 3),
        number(batch["frames_per_second"], 1),
        number(batch["audio_per_second"]),
        number(batch["audio_hours_per_hour"]),
        number(batch.get("requests_per_second")),
        number(batch["cpu_per_audio_second"], 3),
        number(batch["cost_per_audio_hour"], 4),
        str(batch["errors"]),
    ]


def _start(run: dict[str, Any]) -> list[str]:
    starts = run.get("startup", {})
    seconds = (duration(start and start["load"] + start["warm_up"]) for start in map(starts.get, ("cold", "warm")))
    memory = (size(run["memory"][key]) for key in ("baseline", "loaded", "peak"))
    return [*(run["engine"][key] for key in ("dtype", "weights", "backend")), *seconds, *memory]


def _edge(edge: dict[str, Any]) -> list[str]:
    if edge["error"] is not None:
        return [f"{edge['characters']:,}", edge["error"], NONE, NONE, NONE]
    rtf = edge["seconds"] / edge["audio_seconds"] if edge["audio_seconds"] else None
    times = (duration(edge[key]) for key in ("first_audio", "seconds"))
    return [f"{edge['characters']:,}", f"{edge['audio_seconds']:.1f} s", *times, number(rtf, 3)]


def _engine(document: Document) -> list[ReportTable]:
    throughput, first, arrivals, waste, steps, scheduler = [], [], [], [], [], []
    for run in document["runs"]:
        core = [run["engine"][key] for key in ("dtype", "backend")]
        throughput += [[*core, str(row["voices"]), row["policy"], *_pace(row)] for row in run["throughput"]]
        first += _prefix_cache(run["first_audio"]) if "first_audio" in run else []
        arrivals += [_arrivals(run["arrivals"])] if "arrivals" in run else []
        waste += _kv_waste(run.get("arrivals", {}).get("kv"))
        steps += _steps(run)
        scheduler += [_scheduler(run["scheduler"])] if "scheduler" in run else []
    columns = ["dtype", "backend", "batch", "policy", "frames/s", "audio-s/s", "full batch", "RTF", "TTFA P50", "P95"]
    cache = ["prefix cache", "voice", "prompt", "tokens cached", "TTFA", "best", "CPU"]
    return [
        ReportTable("Throughput", [*columns, "per step", "steps", "frames / CPU-s"], throughput, words=4),
        ReportTable("Time to first audio with the prefix cache", cache, first),
        ReportTable(
            "Random (Poisson) arrivals",
            ["requests/s", "requests", "TTFA P50", "P95", "stalled"],
            arrivals,
            words=0,
        ),
        ReportTable(
            "KV cache during these arrivals",
            ["cache", "sequences", "tokens used", "tokens held", "not used"],
            waste,
        ),
        ReportTable("Engine step without codec", ["batch", "step", "frames/s", "GPU busy"], steps, words=0),
        ReportTable("Scheduler", ["batch", "sequence-steps/s", "per CPU-s", "target"], scheduler, words=0),
    ]


def _pace(row: dict[str, Any]) -> list[str]:
    return [
        number(row["frames_per_second"], 1),
        number(row["audio_per_second"]),
        number(row.get("full_audio_per_second")),
        number(row["rtf"], 3),
        *_percentiles(row["first_audio"], ("p50", "p95")),
        number(row["frames_per_step"]),
        str(row["steps"]),
        number(row["frames_per_cpu_second"], 1),
    ]


def _prefix_cache(figures: dict[str, Any]) -> list[list[str]]:
    prompt = [f"{figures['voice_seconds']:.1f} s", f"{figures['prompt_tokens']:,} tokens"]
    return [
        [label, *prompt, number(figures[key]["tokens_saved"], 0), *_times(figures[key])]
        for label, key in (("off", "unknown"), ("on", "known"))
    ]


def _times(figures: dict[str, Any]) -> list[str]:
    return [duration(figures[key]) for key in ("seconds", "best_seconds", "cpu_seconds")]


def _arrivals(figures: dict[str, Any]) -> list[str]:
    times = _percentiles(figures["first_audio"], ("p50", "p95"))
    return [number(figures["rate"]), str(figures["requests"]), *times, str(figures["starved"])]


def _kv_waste(figures: dict[str, Any] | None) -> list[list[str]]:
    """Return the tokens that blocks and a static cache hold for the same sequences."""
    if figures is None:
        return []
    used = figures["used"]
    head = [number(figures["running"], 1), number(used, 0)]
    return [
        [name, *head, number(held, 0), percent(max(0.0, 1 - used / held) if held else None)]
        for name, held in (("blocks", figures["blocks"]), ("static buffers", figures["static"]))
    ]


def _steps(run: dict[str, Any]) -> list[list[str]]:
    """Return a row per batch size; the GPU utilisation was measured at the largest only."""
    rows = run.get("steps", [])
    busy = [""] * (len(rows) - 1) + [f"{run['gpu_busy']:.1%}" if "gpu_busy" in run else ""]
    return [
        [str(row["voices"]), duration(row["seconds"]), number(row["voices"] / row["seconds"], 0), share]
        for row, share in zip(rows, busy, strict=False)
    ]


def _scheduler(figures: dict[str, Any]) -> list[str]:
    rates = (figures[key] for key in ("sequence_steps_per_second", "sequence_steps_per_cpu_second", "target"))
    return [str(figures["voices"]), *(number(rate, 0) for rate in rates)]


def _load(document: Document) -> list[ReportTable]:
    runs = document["runs"]
    stages = [([run["name"], stage["name"]], stage) for run in runs for stage in run["stages"]]
    errors = [[*names, error, str(count)] for names, stage in stages for error, count in stage["errors"].items()]
    found = [[run["name"], f"{run['highest_rate']:.2f}"] for run in runs if run["highest_rate"] is not None]
    starved = [f"stalled {1000 * buffer:.0f} ms" for buffer in _buffers(runs)]
    percentiles = ["TTFA P50", "P95", "P99", "request P50", "P95", "P99"]
    rates = ["server", "load", "requests", "empty", "errors", "requests/s", *percentiles, "audio-s/s"]
    playback = ["server", "load", "goodput/s", "good", "RTF P50", *starved]
    return [
        ReportTable("Load", rates, [[*names, *_stage_rates(stage)] for names, stage in stages], words=2),
        ReportTable("Playback", playback, [[*names, *_stage_playback(stage)] for names, stage in stages], words=2),
        ReportTable("Highest rate that meets the objective", ["server", "requests/s"], found),
        ReportTable("Errors", ["server", "load", "error", "requests"], errors, words=3),
    ]


def _buffers(runs: Sequence[dict[str, Any]]) -> list[float]:
    return next(([each["buffer"] for each in stage["starved"]] for run in runs for stage in run["stages"]), [])


def _stage_rates(stage: dict[str, Any]) -> list[str]:
    first, latency = stage["first_audio"] or {}, stage["latency"] or {}
    return [
        str(stage["requests"]),
        str(stage.get("empty", 0)),
        str(sum(stage["errors"].values())),
        number(stage["throughput"]),
        *(duration(times.get(key)) for times in (first, latency) for key in ("p50", "p95", "p99")),
        number(stage["audio_per_second"]),
    ]


def _stage_playback(stage: dict[str, Any]) -> list[str]:
    rtf = stage["rtf"] or {}
    return [
        number(stage["goodput"]),
        percent(stage["good_share"]),
        number(rtf.get("p50"), 3),
        *(percent(each["share"]) for each in stage["starved"]),
    ]


def _quality(document: Document) -> list[ReportTable]:
    columns = ["configuration", "clips", "WER %", "CER %", "MOS", "voice sim.", "faults", "WER change", "MOS change"]
    rows = [[run["name"], *_judged(run)] for run in document["runs"]]
    return [ReportTable("Quality", columns, rows)]


def _judged(run: dict[str, Any]) -> list[str]:
    figures, differences = run["metrics"], run["differences"]
    return [
        str(run["clips"]),
        *(number(figures.get(key), digits) for key, digits in (("wer", 1), ("cer", 1), ("mos", 2), ("similarity", 3))),
        number(figures.get("faults"), 1),
        *(_difference(differences.get(key), digits) for key, digits in (("wer", 1), ("mos", 2))),
    ]


def _difference(figures: dict[str, Any] | None, digits: int) -> str:
    if figures is None:
        return NONE
    inside = "" if figures["low"] is None else f" ({figures['low']:+.{digits}f} to {figures['high']:+.{digits}f})"
    return f"{figures['difference']:+.{digits}f}{inside}"


def _scaling(document: Document) -> list[ReportTable]:
    rows = [
        [run["name"], f"{point['size']:,g} {run['unit']}", duration(point["median"])]
        for run in document["runs"]
        for point in run["points"]
    ]
    fits = [[run["name"], run["law"], number(run["exponent"]), number(run["expected"])] for run in document["runs"]]
    return [
        ReportTable("Scaling", ["part", "theory", "measured exponent", "expected"], fits, words=2),
        ReportTable("Measured", ["part", "size", "time"], rows),
    ]


def of_request(part: dict[str, Any], run: dict[str, Any]) -> float:
    """Return the seconds that a request of `run["frames"]` frames spends in a part."""
    seconds = float(part["seconds"])
    return seconds if part["per"] == "request" else seconds * run["frames"] / run["voices"]


def _profile(document: Document) -> list[ReportTable]:
    columns = ["part", "time", "per", "share", "GB/s", "of memory", "weights, cache", "temporary", "GPU busy"]
    rows = [[*_part(part, run)] for run in document["runs"] for part in run["parts"]]
    steps = [
        [str(row["voices"]), duration(row["seconds"]), number(row["voices"] / row["seconds"], 0)]
        for run in document["runs"]
        for row in run["steps"]
    ]
    return [
        ReportTable("Parts", columns, rows),
        ReportTable("Step by batch size", ["batch", "step", "frames/s"], steps, words=0),
    ]


def _part(part: dict[str, Any], run: dict[str, Any]) -> Iterator[str]:
    total = sum(of_request(each, run) for each in run["parts"])
    rate = part["bytes_read"] / part["seconds"] if part["seconds"] else 0.0
    yield from (part["name"], duration(part["seconds"]), part["per"], percent(of_request(part, run) / total))
    yield from (number(rate / 1e9, 0), percent(rate / run["ceiling"])) if rate else ("", "")
    yield from (size(part[key]) if part[key] else "" for key in ("memory", "temporary"))
    yield NONE if part["gpu_busy"] is None else percent(part["gpu_busy"])


def _percentiles(figures: dict[str, Any] | None, keys: Sequence[str]) -> list[str]:
    return [NONE if figures is None else duration(figures[key]) for key in keys]


def _change_row(change: Change) -> list[str]:
    ratio = NONE if change.ratio is None else f"{100 * (change.ratio - 1):+.1f} %"
    inside = (
        "once" if change.low is None else f"{100 * (change.low - 1):+.1f} to {100 * ((change.high or 0) - 1):+.1f} %"
    )
    figures = (with_unit(value, change.unit) for value in (change.before, change.after))
    return [change.run, change.where, change.metric, change.verdict, *figures, ratio, inside]


_OF = {
    "bench": _bench,
    "engine": _engine,
    "load": _load,
    "profile": _profile,
    "quality": _quality,
    "scaling": _scaling,
}
